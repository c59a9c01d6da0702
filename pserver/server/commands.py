"""The commands of a shard: passes, operations on tables, questions about rows, the live feed, commits.

pserver.protocol.shard_command tells how they travel. The calls of every step are in pserver.protocol.shards.Shards.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from headrace import codec
from headrace.codec import NotUnderstood
from headrace.pserver.errors import InvalidShardCall
from headrace.pserver.protocol import history_messages, join_messages
from headrace.pserver.protocol.histories import Answers, HistoryAnswers, Questions
from headrace.pserver.protocol.join_clock import CLOCK_KEY, TimeSpans
from headrace.pserver.protocol.joins import JoinAnswers, JoinAnswersPart, JoinEvents
from headrace.pserver.protocol.shard_command import (
    ANY_TIME,
    BETWEEN_PASSES,
    BETWEEN_STEPS,
    COMMITTING,
    IN_PASS,
    OF_ANY_RANK,
    CommandCall,
    Gate,
    PlainCommand,
    ShardCommand,
)
from headrace.pserver.protocol.shards import ShardCommitPart, ShardFigures
from headrace.pserver.protocol.table_operations import RankedRows, ShrinkRows, ShrinkSurvey, TableOperation
from headrace.pserver.protocol.table_stats import TableStats
from headrace.pserver.rows.digest import add
from headrace.pserver.server.pass_state import CallVerdict
from headrace.pserver.server.shard_host import ShardHost
from headrace.pserver.tables.pass_clock import ClockQuestion
from headrace.rpc import refusals

# --- passes: the order is that of pserver.protocol.shards.Shards


@dataclass(frozen=True, slots=True)
class OpenPass(PlainCommand):
    """Begin pass `pass_number` (from 1), which becomes version `pass_number` at its close; see Shards.open_pass."""

    gate: ClassVar[Gate] = BETWEEN_STEPS
    pass_number: int
    samples: int = 0

    def apply(self, host: ShardHost, call: CommandCall) -> None:
        if host.state.open_pass(self.pass_number) is CallVerdict.ACT:
            host.shard.open_pass(self.samples, self.pass_number - 1)


@dataclass(frozen=True, slots=True)
class Recall(ShardCommand[dict[str, HistoryAnswers], Answers]):
    """The questions of one rank about histories whose keys one shard has: see Shards.recall."""

    gate: ClassVar[Gate] = IN_PASS
    pass_number: int
    questions: Questions

    def check(self) -> None:
        for name, each in self.questions.items():
            each.check(name)

    def apply(self, host: ShardHost, call: CommandCall) -> dict[str, HistoryAnswers]:
        answers = host.answer(host.shard.histories, self.questions, self.pass_number, "the histories", call)
        return history_messages.within_message(answers, host.max_message_bytes)

    def combine(self, replies: Sequence[dict[str, HistoryAnswers]]) -> Answers:
        (answers,) = replies
        return answers


@dataclass(frozen=True, slots=True)
class SendEventTimes(ShardCommand[float, float]):
    """Before Shards.join and on its thread: the event times of a rank's part of the pass, as spans without a gap
    above `max_ahead_s`. A job whose join has no such bound does not send it.

    Returns the latest event time that is not too far ahead, the same for every rank, once all have sent theirs.
    """

    gate: ClassVar[Gate] = IN_PASS
    pass_number: int
    spans: TimeSpans
    max_ahead_s: float

    def key(self) -> int:
        return CLOCK_KEY

    def check(self) -> None:
        if not self.max_ahead_s > 0:
            raise InvalidShardCall("event times of a join without a bound that is above 0")
        self.spans.check()

    def apply(self, host: ShardHost, call: CommandCall) -> float:
        question = ClockQuestion(self.max_ahead_s, self.spans)
        return host.answer(host.shard.clock, question, self.pass_number, "the clock of the join", call)

    def combine(self, replies: Sequence[float]) -> float:
        (bound_s,) = replies
        return bound_s


@dataclass(frozen=True, slots=True)
class SendJoinEvents(ShardCommand[JoinAnswersPart | None, JoinAnswers]):
    """Part `part` of the events of one rank whose keys one shard has: see Shards.join.

    All but the last one are answered by None, the last one by part 0 of the answer.
    """

    gate: ClassVar[Gate] = IN_PASS
    events: JoinEvents
    part: int = 0
    num_parts: int = 1

    def check(self) -> None:
        self.events.check(whole=self.num_parts == 1)
        if self.part >= self.num_parts:
            raise InvalidShardCall("events of a join that do not fit each other")

    def apply(self, host: ShardHost, call: CommandCall) -> JoinAnswersPart | None:
        joins, number = host.shard.joins, self.events.pass_number
        with host.turn:
            host.state.check_open(number, call.rank)
            events = joins.received(call.rank, self.events, self.part, self.num_parts)
        if events is None:
            return None
        answers = host.answer(joins, events, number, "the join", call)
        return join_messages.part_of(answers, host.max_message_bytes)

    def combine(self, replies: Sequence[JoinAnswersPart | None]) -> JoinAnswers:
        return join_messages.whole_of([reply for reply in replies if reply is not None])


@dataclass(frozen=True, slots=True)
class ReadJoinAnswers(ShardCommand[JoinAnswersPart, JoinAnswers]):
    """After SendJoinEvents: a later part of the answer."""

    gate: ClassVar[Gate] = IN_PASS
    pass_number: int
    part: int

    def apply(self, host: ShardHost, call: CommandCall) -> JoinAnswersPart:
        with host.turn:
            host.state.check_open(self.pass_number, call.rank)
            answers = host.shard.joins.answers(call.rank)
        if answers is None:
            raise InvalidShardCall(f"part {self.part} of an answer that rank {call.rank} did not get yet")
        return join_messages.part_of(answers, host.max_message_bytes, self.part)

    def combine(self, replies: Sequence[JoinAnswersPart]) -> JoinAnswers:
        return join_messages.whole_of(replies)


@dataclass(frozen=True, slots=True)
class LeavePass(PlainCommand):
    """This rank pushes no more in the pass: with `train.max_ahead` no other one waits for it. Every rank sends it."""

    gate: ClassVar[Gate] = BETWEEN_STEPS
    pass_number: int

    def apply(self, host: ShardHost, call: CommandCall) -> None:
        host.state.leave(self.pass_number, call.rank)
        host.closed()


@dataclass(frozen=True, slots=True)
class ClosePass(ShardCommand[str, dict[str, str]]):
    """End the pass: touched rows get `day`. Returns the digest of each shard's pushes, by shard.

    Every rank sends it, with no push in flight; a shard closes once all ranks have.
    """

    gate: ClassVar[Gate] = BETWEEN_STEPS
    pass_number: int
    day: int

    def apply(self, host: ShardHost, call: CommandCall) -> str:
        verdict, number = host.state.close_pass(self.pass_number, call.rank, self.day), self.pass_number
        if verdict is CallVerdict.WAIT:
            closed = lambda: host.state.has_closed(number)  # noqa: E731
            host.wait(closed, "the close", number, call.deadline, host.state.missing)
        elif verdict is CallVerdict.ACT:
            host.close_digest = host.shard.close_pass(self.day, number)
            host.state.closed()
            host.turn.notify_all()
            host.closed()
        return host.close_digest

    def combine(self, replies: Sequence[str]) -> dict[str, str]:
        return {str(shard): digest for shard, digest in enumerate(replies)}


@dataclass(frozen=True, slots=True)
class DigestFeatures(ShardCommand[str, str]):
    """After ClosePass: the digest of all rows that the last closed pass changed in tables of histories, counters and
    the join. They depend on the log alone, in every mode. Empty without such tables."""

    gate: ClassVar[Gate] = BETWEEN_STEPS

    def apply(self, host: ShardHost, call: CommandCall) -> str:
        return host.shard.features_digest

    def combine(self, replies: Sequence[str]) -> str:
        return f"{add(int(reply, 16) for reply in replies):032x}" if replies[0] else ""


# --- operations and questions


@dataclass(frozen=True, slots=True)
class Operate(PlainCommand):
    """Between passes: apply operations, in order, at the close of `version`, the last one."""

    gate: ClassVar[Gate] = BETWEEN_PASSES
    version: int
    operations: Sequence[TableOperation]

    def apply(self, host: ShardHost, call: CommandCall) -> None:
        if host.state.operate(self.version) is CallVerdict.ACT:
            host.shard.operate(self.operations, self.version)
            host.state.has_operated(self.version)


@dataclass(frozen=True, slots=True)
class SurveyShrink(ShardCommand[ShrinkSurvey | None, ShrinkSurvey | None]):
    """The rows that `shrink` would delete now.

    A thread of each shard counts while training goes on, so rows that change meanwhile may count either way. None
    while it counts: ask again. With `at_once`, between passes only: counted in this call, exactly.
    """

    gate: ClassVar[Gate] = ANY_TIME
    shrink: ShrinkRows

    def apply(self, host: ShardHost, call: CommandCall) -> ShrinkSurvey | None:
        return host.shard.survey(self.shrink)

    def combine(self, replies: Sequence[ShrinkSurvey | None]) -> ShrinkSurvey | None:
        surveys = [each for each in replies if each is not None]
        return ShrinkSurvey.total(surveys) if len(surveys) == len(replies) else None


@dataclass(frozen=True, slots=True)
class Explain(ShardCommand[dict[str, Any], dict[str, Any]]):
    """Everything known about a key, as JSON-able data: see pserver.tables.table_overview.TableOverview.explain.

    The result also has the "shard", if shards are processes."""

    gate: ClassVar[Gate] = ANY_TIME
    table: str
    of_key: int
    group: int

    def key(self) -> int:
        return self.of_key

    def apply(self, host: ShardHost, call: CommandCall) -> dict[str, Any]:
        known = host.shard.table(self.table).overview.explain(self.of_key, self.group)
        return known if host.number is None else known | {"shard": host.number}

    def combine(self, replies: Sequence[dict[str, Any]]) -> dict[str, Any]:
        (known,) = replies
        return known


@dataclass(frozen=True, slots=True)
class RankRows(ShardCommand[RankedRows, RankedRows]):
    """The rows of a table with most shows, and how long ago rows were seen: TableOverview.ranked."""

    gate: ClassVar[Gate] = ANY_TIME
    table: str
    top: int

    def apply(self, host: ShardHost, call: CommandCall) -> RankedRows:
        return host.shard.table(self.table).overview.ranked(self.top)

    def combine(self, replies: Sequence[RankedRows]) -> RankedRows:
        return RankedRows.of_shards(replies, self.top)


# --- all rows


@dataclass(frozen=True, slots=True)
class DigestRows(ShardCommand[dict[str, str], dict[str, int]]):
    """By table: a 128-bit sum over all rows, independent of their order and of the number of shards."""

    gate: ClassVar[Gate] = BETWEEN_STEPS

    def apply(self, host: ShardHost, call: CommandCall) -> dict[str, str]:
        return {name: f"{table.overview.digest():032x}" for name, table in host.shard.tables.items()}

    def combine(self, replies: Sequence[dict[str, str]]) -> dict[str, int]:
        return {name: add(int(reply[name], 16) for reply in replies) for name in replies[0]}


@dataclass(frozen=True, slots=True)
class ShardCounts:
    """The counts of one shard."""

    tables: Mapping[str, TableStats]
    figures: ShardFigures | None
    """None where the shard is in the trainer's process."""
    refused: Mapping[str, int]
    """Connections and calls that a port of the shard had refused, by reason."""


@dataclass(frozen=True, slots=True)
class JobCounts:
    """The counts of all shards."""

    tables: Mapping[str, TableStats]
    figures: Sequence[ShardFigures]
    """Of each shard that is a process."""
    refused: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class CountRows(ShardCommand[ShardCounts, JobCounts]):
    """Counts of the tables, and figures of the shards."""

    gate: ClassVar[Gate] = OF_ANY_RANK

    def apply(self, host: ShardHost, call: CommandCall) -> ShardCounts:
        tables, figures = {name: table.stats() for name, table in host.shard.tables.items()}, host.figures()
        return ShardCounts(tables, figures, {} if figures is None else refusals.PROCESS.counts())

    def combine(self, replies: Sequence[ShardCounts]) -> JobCounts:
        return JobCounts(
            {name: TableStats.total([reply.tables[name] for reply in replies]) for name in replies[0].tables},
            [reply.figures for reply in replies if reply.figures is not None],
            sum((Counter(reply.refused) for reply in replies), Counter[str]()),
        )


# --- the live feed


@dataclass(frozen=True, slots=True)
class ServeFeed(ShardCommand[str, list[str]]):
    """Serve the live feed to clients with `secret`; its address on each shard.

    A secret other than that of the first call is ignored."""

    gate: ClassVar[Gate] = ANY_TIME
    secret: str

    def apply(self, host: ShardHost, call: CommandCall) -> str:
        with host.opening:  # opening a port takes a moment, so not under the lock of steps
            return host.shard.serve_feed(self.secret, host.feed_at())

    def combine(self, replies: Sequence[str]) -> list[str]:
        return list(replies)


@dataclass(frozen=True, slots=True)
class PublishVersion(PlainCommand):
    """Between passes: publish `version`, the last one closed, after its operations, to subscribers, if there are any.

    Returns once the changed rows are copied."""

    gate: ClassVar[Gate] = BETWEEN_PASSES
    version: int

    def apply(self, host: ShardHost, call: CommandCall) -> None:
        host.state.publish(self.version)
        host.shard.feed.publish(self.version)


# --- commits: trainer.checkpoint.committer has their order


@dataclass(frozen=True, slots=True)
class TakeSnapshot(ShardCommand[int, int]):
    """Step 2 of a commit, between passes: copy the rows changed since the last; returns their number.

    `version` is the last closed pass; other ranks may have opened the next one, without a step applied. Training may
    go on after the call. One snapshot is in flight at a time, until SettleSnapshot.
    """

    gate: ClassVar[Gate] = BETWEEN_PASSES
    version: int
    changes_since: int | None = None
    """The commit also records the keys changed or deleted since that version, as far back as commits have recorded them
    (pserver.commit.change_files)."""

    def apply(self, host: ShardHost, call: CommandCall) -> int:
        if host.state.snapshot(self.version) is CallVerdict.ACT:
            host.num_taken = host.shard.stores.snapshot(self.version, self.changes_since)
            host.state.taken(self.version)
        return host.num_taken

    def combine(self, replies: Sequence[int]) -> int:
        return sum(replies)


@dataclass(frozen=True, slots=True)
class WriteSnapshot(ShardCommand[ShardCommitPart, list[ShardCommitPart]]):
    """Step 3: every shard writes its snapshot to its store, and its whole state to its own folder in `folder`, which
    exists at the same path on every shard, synced. Returns the parts, by shard. A shard that uploads its parts writes
    to a folder of its own instead, of which only the name is that of `folder`.

    Raises StoreFailed if a disk is full or fails; nothing is left in `folder` once that is settled.
    """

    gate: ClassVar[Gate] = COMMITTING
    folder: Path

    def apply(self, host: ShardHost, call: CommandCall) -> ShardCommitPart:
        return host.shard.stores.write(self.folder, call.deadline)

    def combine(self, replies: Sequence[ShardCommitPart]) -> list[ShardCommitPart]:
        return list(replies)


@dataclass(frozen=True, slots=True)
class HandOver(ShardCommand[ShardCommitPart, list[ShardCommitPart]]):
    """In place of WriteSnapshot, when a job is resized: every shard writes the rows of its snapshot below `folder`, not
    synced, for the AdvanceCommit of the next generation's shards. Only if no table bounds its memory."""

    gate: ClassVar[Gate] = COMMITTING
    folder: Path

    def apply(self, host: ShardHost, call: CommandCall) -> ShardCommitPart:
        return host.shard.stores.hand_over(self.folder, call.deadline)

    def combine(self, replies: Sequence[ShardCommitPart]) -> list[ShardCommitPart]:
        return list(replies)


@dataclass(frozen=True, slots=True)
class SettleSnapshot(PlainCommand):
    """After step 4: mark the snapshot's rows clean, or dirty again unless `committed`.

    Waits for a WriteSnapshot that still runs. Does nothing if no snapshot is in flight.
    """

    gate: ClassVar[Gate] = COMMITTING
    committed: bool

    def apply(self, host: ShardHost, call: CommandCall) -> None:
        host.shard.stores.settle(self.committed, call.deadline)
        with host.turn:
            host.state.settled()


@dataclass(frozen=True, slots=True)
class RestoreCommit(PlainCommand):
    """Before the first pass: load a commit in `folder`, made with any number of shards, into the empty tables.

    The last closed pass is then `version`. Without parts the tables stay empty. The folder has the same path on every
    shard."""

    gate: ClassVar[Gate] = BETWEEN_PASSES
    folder: Path
    parts: Sequence[ShardCommitPart]
    version: int

    def apply(self, host: ShardHost, call: CommandCall) -> None:
        if host.state.restore(self.version) is CallVerdict.ACT:
            host.shard.restore(self.folder, self.parts, self.version)
            host.state.has_restored(self.version)


@dataclass(frozen=True, slots=True)
class AdvanceCommit(PlainCommand):
    """After RestoreCommit and before the first pass or operation: go on to a later commit in `folder`, made with any
    number of shards. The shards are then as after RestoreCommit of that one.

    It may also be what HandOver wrote: then they are as if they had trained to that version. Only rows are read that
    changed in between. Raises InvalidShardCall, with nothing done, if the commit does not record all changes since the
    version restored (`changes_since` of TakeSnapshot).
    """

    gate: ClassVar[Gate] = BETWEEN_PASSES
    folder: Path
    parts: Sequence[ShardCommitPart]
    version: int

    def apply(self, host: ShardHost, call: CommandCall) -> None:
        if host.state.advance(self.version) is CallVerdict.ACT:
            host.shard.advance(self.folder, self.parts, self.version)
            host.state.has_restored(self.version)


def command_from(name: str, fields: bytes) -> ShardCommand[Any, Any]:
    """The command that a caller sent. Raises InvalidShardCall."""
    if name not in ShardCommand.kinds:
        raise InvalidShardCall(f"unknown command {name!r}")
    try:
        command = codec.unpacked(ShardCommand.kinds[name], fields, name)
    except NotUnderstood as error:
        raise InvalidShardCall(str(error)) from error
    command.check()
    return command
