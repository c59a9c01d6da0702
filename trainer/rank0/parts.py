"""The parts of rank 0 alone: planner, replay log, operator of closes, deciders, and its answers to clients.

Built for trainer.train.assembly; the work is done in the parts' own modules. Imports no torch.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.dataset.sources.kinds import open_sources
from headrace.dataset.spec.config import Opening
from headrace.dataset.spec.schema import Schema, Slot
from headrace.dataset.spec.source_set import SourceSet
from headrace.dataset.stream.source import Source
from headrace.deadline import Deadline
from headrace.errors import SpecError
from headrace.keys import bucket_of, key_of_reference, sign_of
from headrace.pserver.consistency.policy import policy_of
from headrace.pserver.protocol.shards import Shards
from headrace.pserver.server.commands import Explain, RankRows
from headrace.trainer.config import TrainerJob, WorkerConfig
from headrace.trainer.journal.succession import HeadContact
from headrace.trainer.rank0.job_in_force import JobInForce
from headrace.trainer.rank0.key_memories import memories_of_key
from headrace.trainer.rank0.operations import OperationRunner, RankUpdate
from headrace.trainer.rank0.planner import PAUSED, PassRules, Planner
from headrace.trainer.rank0.recovery import RestartPoint
from headrace.trainer.rank0.replay_log import LogPlanJournal, ReplayLog
from headrace.trainer.rank0.requests import Request
from headrace.trainer.rank0.resize_messages import decode_message, encode_message
from headrace.trainer.rank0.resizing import ResizePreparation
from headrace.trainer.rank0.shrink_guard import has_rule
from headrace.trainer.rank0.shrinks import Shrinks
from headrace.trainer.rank0.slot_guards import SlotGuards
from headrace.trainer.spec.changes import SHARDS, TRAINERS
from headrace.validation import nearest, no_such

OPEN_S = 120.0
"""Time limit for the first answer of peers and source."""
CLOSE_S = 300.0
"""Time limit of a close, and of the digest at the end."""
EXPLAIN_S = 10.0
"""Time limit for the shards' answer about one key."""
RANK_S, RANKED = 20.0, 50
"""Time limit for a ranking of a table's rows, and the rows that it tells."""


@dataclass(frozen=True)
class RankZero:
    """The parts of rank 0."""

    beginning: RestartPoint
    planner: Planner | None
    replay_log: ReplayLog
    operator: OperationRunner
    shrinking: Shrinks
    shards: Shards
    resizing: ResizePreparation | None = None
    """None where the launcher prepares no workers."""
    guards: SlotGuards | None = None
    """None where the job has no guards."""
    contact: HeadContact | None = None
    """With the fence, where an object store is the truth."""
    answers: dict[str, Callable[[Request], dict[str, Any]]] = field(default_factory=dict)
    """Further answers, by "do": the live feed is built later than this."""

    @property
    def hands_over(self) -> bool:
        """Whether the workers of a resize stand by and take over from memory, without a commit."""
        return self.resizing is not None and self.resizing.hands_over

    def trouble(self) -> str:
        """Why the feed and exports must stand still, in words; empty where they need not. Any thread."""
        return "" if self.contact is None else self.contact.trouble

    def close(self) -> None:
        """End the planner and its source."""
        if self.planner is not None:
            self.planner.close()

    def begin(self, day: int) -> RankUpdate:
        """Continue with overrides and waiting operations, once everything is restored to this `day`."""
        commit = self.beginning.commit
        state = {} if commit is None else commit.state.get("operations", {})
        word = self.operator.begin(
            0 if commit is None else commit.version, day, state, self.beginning.overrides, self.beginning.waiting
        )
        if self.planner is not None:
            self.planner.wants_pass = self.operator.wants_pass
        return word

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a client's request to a running job, from any thread: {"do": ..., ...}. Raises HeadraceError.

        "ask": log an "operation" (OperationRunner.ask); "dry_run": count the rows of a shrink (Shrinks.dry_run);
        "tables": whether each has a rule that removes rows; "explain": everything about a "sign" of a "slot"; "rank":
        the rows of a "table" with most shows; "feed": the address of the live feed (trainer.train.model_feed).
        """
        answers: Mapping[str, Callable[[Request], dict[str, Any]]] = {
            "ask": lambda request: self.operator.ask(request.get("operation", {})),
            "dry_run": lambda request: self.shrinking.dry_run(request.get("operation", {})),
            "tables": lambda _: {name: has_rule(table) for name, table in self.operator.job.aging_tables.items()},
            "explain": self._explain,
            "rank": self._rank,
            **self.answers,
        }
        what = str(request.get("do"))
        if what not in answers:
            raise SpecError(f"{what!r} is not a request; {nearest(what, answers)}")
        return answers[what](request)

    def exchange(self, message: bytes) -> bytes:
        """Take a message of the launcher, and return one for it. Any thread."""
        if self.resizing is None:
            return b""
        return encode_message(self.resizing.exchange(decode_message(message)))

    def _rank(self, request: Request) -> dict[str, Any]:
        table, schema = str(request.get("table")), self.operator.job.schema
        tables = {slot.sparse.table for slot in schema.sparse}
        if table not in tables:
            raise SpecError(no_such("table", table, sorted(tables)))
        return describe_ranking(self.shards, schema, table, Deadline.after(RANK_S))

    def _explain(self, request: Request) -> dict[str, Any]:
        slot, _ = self.operator.job.key_of(request.get("slot"), request.get("sign"))
        return describe_key(self.shards, self.operator.job.schema, slot, request["sign"], Deadline.after(EXPLAIN_S))


def describe_ranking(shards: Shards, schema: Schema, table: str, deadline: Deadline) -> dict[str, Any]:
    """The rows of a table with most shows, each with its slot and feature id, and how long ago rows were seen."""
    found, slots = shards.call(RankRows(table, RANKED), deadline), dict[int, str]()
    for slot in schema.sparse:
        if slot.sparse.table == table:
            slots.setdefault(slot.group, slot.name)  # slots of one `share` have the same rows
    rows = [
        {
            "slot": slots.get(row.group),
            "sign": str(sign_of(row.key, row.group)),
            **{"show": row.show, "click": row.click, "unseen_days": row.unseen_days},
        }
        for row in found.rows
    ]
    unseen = [{"from_days": edge, "rows": count} for edge, count in zip(found.edges, found.unseen, strict=True)]
    return {"table": table, "rows": rows, "unseen": unseen, "scanned": found.scanned, "total": found.total}


def describe_key(shards: Shards, schema: Schema, slot: Slot, sign: int, deadline: Deadline) -> dict[str, Any]:
    """All facts of the shards about a feature id (`sign`) of a sparse slot, its place, and what the job remembers of
    it."""
    table, key = slot.sparse.table, key_of_reference(sign, slot.group)
    place = {"table": table, "group": slot.group, "key": key, "bucket": bucket_of(key)}
    known = {"slot": slot.name, "sign": sign, **place, **shards.call(Explain(table, key, slot.group), deadline)}
    remembers = memories_of_key(shards, schema, slot, key, deadline)
    return known | ({"remembers": remembers} if remembers else {})


def _unlike(job: TrainerJob, beginning: RestartPoint) -> Sequence[str]:
    """Why a replay makes other weights than before. An export may have been made of the commits that were damaged."""
    if policy_of(job.train.mode).repeatable or not beginning.passed_over:
        return ()
    damaged = ", ".join(sorted(beginning.passed_over))
    return (f'commit {damaged} is damaged, and mode "{job.train.mode}" does not give the same weights again',)


def rank_zero(
    config: WorkerConfig, job: TrainerJob, schema: Schema, shards: Shards, beginning: RestartPoint
) -> RankZero:
    """The parts of rank 0; planning begins at once."""
    journal = None if beginning.joblog is None else LogPlanJournal(beginning.joblog)
    planner = _planner(config, job, beginning, journal)
    on_mismatch = job.commit.on_replay_mismatch if config.rerun is None else "warn"
    replay_log = ReplayLog(
        *(beginning.joblog, journal, beginning.replay, planner, on_mismatch),
        max_full_s=job.commit.max_failing,
        unlike=_unlike(job, beginning),
    )
    workers = None if config.rerun is not None else {TRAINERS: config.world, SHARDS: len(config.shards)}
    resizing = ResizePreparation(hands_over=_may_hand_over(job)) if config.prepares_resizes else None
    prepare = None if resizing is None else resizing.ask
    operator = OperationRunner(JobInForce(job, workers, config.elastic), replay_log, shards, CLOSE_S, prepare)
    shrinking = Shrinks(lambda: operator.job.aging_tables, schema, shards, learn=job.train.learn)
    operator.add(shrinking)
    guards = None if job.guards is None else SlotGuards(job.guards, schema)
    if guards is not None:
        operator.add(guards)
    contact = None if beginning.fence is None else HeadContact(beginning.fence, config.node_timeout)
    rank0 = RankZero(beginning, planner, replay_log, operator, shrinking, shards, resizing, guards, contact)
    if resizing is not None:
        operator.add(resizing)
    return rank0


def _may_hand_over(job: TrainerJob) -> bool:
    """Whether the workers of a resize can take all rows from memory, by files in the store that both see."""
    return job.store.parts == "shared" and all(table.memory is None for table in job.tables.values())


def _planner(
    config: WorkerConfig, job: TrainerJob, beginning: RestartPoint, journal: LogPlanJournal | None
) -> Planner | None:
    """None if no new passes are planned."""
    if config.until is not None or journal is None:
        return None
    planner = Planner(
        source_of(config, job, beginning.known),
        PassRules(
            job.passes,
            config.world,
            learn_until=job.train.learn_until if job.train.learn else 0,
            ends_after=config.ends_after,
            sources=SourceSet(job.sources),
            merged=job.join is not None,
        ),
        journal=journal,
        known=beginning.known,
        skips=beginning.skips,
        max_full_s=job.commit.max_failing,
    )
    planner.held = (config.store / PAUSED).exists  # before the first request
    return planner


def source_of(config: WorkerConfig, job: TrainerJob, known: Collection[str] | None = None) -> Source:
    """The job's stream, opened. `known`: names of known partitions; None: plans are only read, not made."""
    deadline = Deadline.after(OPEN_S)
    return open_sources(
        job.sources,
        Opening(folder=config.folder, job=job.name, seed=job.seed, deadline=deadline, known=known),
    )
