"""What only the chief has: who plans, who keeps the log, who decides what happens at closes, and what it answers.

Built for trainer.job; each part's own work is in its own module. Imports no torch.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from dataset.schema import Schema, Slot
from dataset.source import Source
from dataset.sources import open_source
from millrace.deadline import Deadline
from millrace.errors import SpecError
from millrace.keys import bucket_of, key_of_reference
from millrace.mistakes import nearest
from pserver.client import Shards
from trainer.chronicle import Chronicle, LogJournal
from trainer.config import TrainerJob, WorkerConfig
from trainer.operations import Operator, Request, Word
from trainer.planner import PAUSED, Planner
from trainer.recovery import Beginning, overrides_of
from trainer.shrink_guard import has_rule
from trainer.shrinking import Shrinking

OPEN_S = 120.0
"""How long peers and the source may take to answer at the start."""
CLOSE_S = 300.0
"""How long a close, or the digest at the end, may take."""
EXPLAIN_S = 10.0
"""How long shards may take to say what they know of a key."""


@dataclass(frozen=True)
class Lead:
    """The chief's own parts."""

    beginning: Beginning
    planner: Planner | None
    chronicle: Chronicle
    operator: Operator
    shrinking: Shrinking
    shards: Shards
    answers: dict[str, Callable[[Request], dict[str, Any]]] = field(default_factory=dict)
    """What others answer, by "do": the live feed is put together only after the chief."""

    def close(self) -> None:
        """End the planner and its source."""
        if self.planner is not None:
            self.planner.close()

    def begin(self, spec: Mapping[str, Any], day: int) -> Word:
        """Go on under `spec` with what was set, and with what waits, once everything is restored to that `day`."""
        commit = self.beginning.commit
        state = {} if commit is None else commit.state.get("operations", {})
        word = self.operator.begin(
            0 if commit is None else commit.version, day, state, overrides_of(commit, spec), self.beginning.waiting
        )
        if self.planner is not None:
            self.planner.wants_pass = self.operator.wants_pass
        return word

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """What people ask a running job, from any thread: {"do": ..., ...}. Raises MillraceError.

        "ask": an "operation" to log (Operator.ask); "dry_run": what a shrink would take (Shrinking.dry_run); "tables":
        whether each has a rule by which rows go; "explain": all that is known of a "slot"'s "sign"; "feed": where the
        live feed is (trainer.feed).
        """
        answers: Mapping[str, Callable[[Request], dict[str, Any]]] = {
            "ask": lambda request: self.operator.ask(request.get("operation", {})),
            "dry_run": lambda request: self.shrinking.dry_run(request.get("operation", {})),
            "tables": lambda _: {name: has_rule(table) for name, table in self.operator.tables.items()},
            "explain": self._explain,
            **self.answers,
        }
        what = str(request.get("do"))
        if what not in answers:
            raise SpecError(f"{what!r} is nothing that can be asked; {nearest(what, answers)}")
        return answers[what](request)

    def _explain(self, request: Request) -> dict[str, Any]:
        slot, _ = self.operator.key_of(request.get("slot"), request.get("sign"))
        return known_of(self.shards, slot, request["sign"], Deadline.after(EXPLAIN_S))


def known_of(shards: Shards, slot: Slot, sign: int, deadline: Deadline) -> dict[str, Any]:
    """All that shards know of a sign of a sparse slot, and where it is."""
    table, key = slot.sparse.table, key_of_reference(sign, slot.group)
    place = {"table": table, "group": slot.group, "key": key, "bucket": bucket_of(key)}
    return {"slot": slot.name, "sign": sign, **place, **shards.explain(table, key, slot.group, deadline)}


def lead(config: WorkerConfig, job: TrainerJob, schema: Schema, shards: Shards, beginning: Beginning) -> Lead:
    """The chief's parts; planning begins at once."""
    journal = None if beginning.joblog is None else LogJournal(beginning.joblog)
    planner = _planner(config, job, beginning, journal)
    on_mismatch = job.commit.on_replay_mismatch if config.rerun is None else "warn"
    chronicle = Chronicle(
        beginning.joblog, journal, beginning.replay, planner, on_mismatch, max_full_s=job.commit.max_failing
    )
    operator = Operator(job, chronicle, shards, CLOSE_S)
    shrinking = Shrinking(lambda: operator.tables, schema, shards, learn=job.train.learn)
    operator.add(shrinking)
    return Lead(beginning, planner, chronicle, operator, shrinking, shards)


def _planner(config: WorkerConfig, job: TrainerJob, beginning: Beginning, journal: LogJournal | None) -> Planner | None:
    """None where nothing new is to be planned."""
    if config.until is not None or journal is None:
        return None
    on_gap = next(iter(job.sources.values())).on_gap
    planner = Planner(
        source_of(config, job, beginning.known),
        job.passes,
        config.world,
        job.train.learn_until if job.train.learn else 0,
        on_gap,
        journal=journal,
        known=beginning.known,
        skips=beginning.skips,
        max_full_s=job.commit.max_failing,
    )
    planner.held = (config.store / PAUSED).exists  # before it is asked for anything
    return planner


def source_of(config: WorkerConfig, job: TrainerJob, known: Collection[str] | None = None) -> Source:
    """The job's stream, opened. `known`: names of partitions met before; None: plans are read, and none is made."""
    section = next(iter(job.sources.values()))
    deadline = Deadline.after(OPEN_S)
    return open_source(section, folder=config.folder, job=job.name, seed=job.seed, deadline=deadline, known=known)
