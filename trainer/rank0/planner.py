"""The planner: reads source and clock, on rank 0, and plans the next pass. It runs in a thread of its own.

The content of a pass is decided in trainer.journal.pass_plan, the skew of parallel streams in trainer.rank0.skew, the
facts about a partition in trainer.journal.partitions. New partitions and plans are written to the journal before any
answer. There is at most one plan that is requested and not yet taken.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, Queue
from typing import Protocol

import msgspec

from headrace.dataset.spec.config import SourceSection
from headrace.dataset.spec.source_set import SourceSet
from headrace.dataset.stream.errors import SourceGap
from headrace.dataset.stream.source import Partition, Source
from headrace.deadline import Deadline
from headrace.errors import HeadraceError
from headrace.retry import Retrier
from headrace.trainer.config import PassesSection
from headrace.trainer.journal.log import LogFull
from headrace.trainer.journal.partitions import (
    KnownPartition,
    SkippedRange,
    after_skips,
    in_order,
    late_partitions,
    present_partitions,
    with_growth,
    with_new_partitions,
)
from headrace.trainer.journal.pass_plan import PassPlan, RankSegments, backlog, cut, gaps, is_drained
from headrace.trainer.journal.records import GapOperation, PartitionsOperation
from headrace.trainer.rank0.equal_shares import cut_equally
from headrace.trainer.rank0.rank_speeds import RankSpeeds
from headrace.trainer.rank0.skew import StreamCaps
from headrace.trainer.rank0.turns import next_turn

POLL_S = 0.05
"""Pause between polls of the source while a plan is requested."""
IDLE_POLL_S = 1.0
"""Pause between polls while none is; they keep the lag up to date."""
PAUSED = "paused"
"""While this file exists in the store, no passes of events are planned."""
MAX_NAMED = 8
"""Most partitions that a message names."""
LOG_WAITS = "training waits, for the log cannot be written"
"""Begins the status of a job while its log's disk is full."""
MISSING_S = 30.0
"""A file may come this late after the start of a job before its pattern is reported as without any."""
LAST_COMMIT_S = 5.0
"""Time limit, at the end, to commit the last positions for lag tools."""

log = logging.getLogger(__name__)


class StreamEnded(msgspec.Struct, frozen=True, tag="ended"):
    """There are no more passes."""


class PlanJournal(Protocol):
    """The planner's way to the job's log. The planner's thread writes here before it answers.

    Each method returns once its argument is durable. Raises HeadraceError; LogFull if a later try may succeed.
    """

    def operation(self, operation: PartitionsOperation | GapOperation) -> None:
        """New partitions, or positions that are no longer retained."""
        ...

    def plan(self, plan: PassPlan) -> None:
        """The next pass."""
        ...


class MemoryPlanJournal:
    """A journal in memory, for tests."""

    def __init__(self) -> None:
        self.operations: list[PartitionsOperation | GapOperation] = []
        self.plans: list[PassPlan] = []

    def operation(self, operation: PartitionsOperation | GapOperation) -> None:
        self.operations.append(operation)

    def plan(self, plan: PassPlan) -> None:
        self.plans.append(plan)


@dataclass(frozen=True, slots=True)
class _Request:
    number: int
    positions: Mapping[str, int]
    num_positions: int
    """Number of positions of all passes before."""
    at_s: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class PassRules:
    """How the passes of a job are cut."""

    passes: PassesSection
    num_ranks: int
    learn_until: int | None = None
    """Number of positions that are learnt; those after it are only predicted. None: all are learnt."""
    ends_after: int | None = None
    """Number of positions after which the stream counts as ended. None: it has its own end, or none."""
    sources: SourceSet = SourceSet.of(SourceSection())
    merged: bool = False
    """Whether passes are cut from the streams merged by event time, as far as these have one clock."""


class Planner:
    """Plans passes on a thread of its own. `request` and `take` are called from one thread."""

    def __init__(
        self,
        source: Source,
        rules: PassRules,
        *,
        journal: PlanJournal | None = None,
        known: Mapping[str, KnownPartition] | None = None,
        skips: Collection[SkippedRange] = (),
        max_full_s: float = 600.0,
    ) -> None:
        """`known` and `skips` are from commit and log. A write to a full log is retried for `max_full_s`."""
        self._source, self._rules, self._passes, self._sources = source, rules, rules.passes, rules.sources
        self._caps = StreamCaps(source, rules.sources, rules.passes, merged=rules.merged)
        self._journal = journal or MemoryPlanJournal()
        self.known: Mapping[str, KnownPartition] = dict(known or {})
        """Known partitions. The mapping is replaced, never changed, so any thread may read it."""
        self.skips: tuple[SkippedRange, ...] = tuple(skips)
        """Skipped ranges: those given, and lost ranges since. Any thread."""
        self._lost: dict[str, int] = {}
        self._by_count = (rules.passes.cut or ("count" if source.bounded else "arrival")) == "count"
        self._begun_s = time.monotonic()
        self._requests: Queue[_Request | None] = Queue(2)  # a request, and None to end
        self._answers: Queue[PassPlan | StreamEnded | HeadraceError] = Queue(1)
        self._partitions: Sequence[Partition] = ()
        self._absent: set[str] = set()
        self._may_grow = source.bounded and bool(self.known)
        self._was_bounded = not source.bounded and any(each.end is not None for each in self.known.values())
        self.num_late = 0
        """Late partitions since the start: their stream was already read beyond their place. Any thread."""
        self._lock = threading.Lock()
        self._to_commit: dict[str, int] = {}
        self._stopping = threading.Event()
        self._retrier = Retrier(LogFull, LOG_WAITS, max_full_s, self._stopping)
        self.wants_pass: Callable[[], bool] = lambda: False
        """True if an empty pass is wanted while there are no events; called by the thread."""
        self.held: Callable[[], bool] = lambda: False
        """True if the job is paused: then neither passes with events nor the end are planned; called by the thread."""
        self.paused = False
        """The last answer of `held`."""
        self.speeds = RankSpeeds(rules.num_ranks)
        """Of the trainers in passes before, where they do not wait for each other."""
        if not in_order(self.known) and len(self.known) > 1:
            log.warning(
                "this job began with an older release: each pass takes an equal share of every partition, "
                "passes.max_skew and partition_by have no effect; --fresh starts over, with files read in order"
            )
        self._thread = threading.Thread(target=self._run, name="planner", daemon=True)
        self._thread.start()

    def request(self, number: int, positions: Mapping[str, int], num_positions: int) -> None:
        """Request pass `number`, which begins at `positions`, after `num_positions` positions in all."""
        self._requests.put_nowait(_Request(number, dict(positions), num_positions))

    def take(self, wait_s: float) -> PassPlan | StreamEnded | None:
        """The answer to the last request; None if it is not ready after `wait_s`. Raises the source's errors."""
        try:
            answer = self._answers.get(timeout=wait_s) if wait_s else self._answers.get_nowait()
        except Empty:
            if self._thread.is_alive() or not self._answers.empty():
                return None
            raise RuntimeError("the planner's thread has ended by a bug; its traceback is in the output") from None
        if isinstance(answer, HeadraceError):
            raise answer
        return answer

    @property
    def trouble(self) -> str:
        """The reason why no plan can be made, for a status; empty if there is none. Any thread."""
        return self._retrier.trouble

    @property
    def missing(self) -> Sequence[str]:
        """Things that the source has not found MISSING_S after the start, in words, for a status. Any thread."""
        if time.monotonic() - self._begun_s < MISSING_S:
            return ()
        name = "" if self._sources.several else next(iter(self._sources.sections))
        return [f"source {name}: {words}" if name else words for words in self._source.missing]

    def lag(self, positions: Mapping[str, int]) -> dict[str, int]:
        """Number of waiting positions by partition, at the last poll."""
        partitions = self._partitions
        places = {p.name: max(p.begin, positions.get(p.name, p.start)) for p in partitions}
        return dict(zip(places, backlog(partitions, places, self.skips), strict=True))

    def commit(self, positions: Mapping[str, int]) -> None:
        """Commit these positions for lag tools, at the next poll."""
        with self._lock:
            self._to_commit.update(positions)

    def close(self) -> None:
        """End the thread and the source."""
        self._stopping.set()
        self._requests.put(None)
        self._thread.join(timeout=10)
        self._source.close()

    @property
    def jumped(self) -> dict[str, int]:
        """Number of lost positions since the start, by partition: they were no longer retained."""
        return dict(self._lost)

    def _run(self) -> None:
        request: _Request | None = None
        positions: Mapping[str, int] | None = None
        try:
            while not self._stopping.is_set():
                try:
                    request = request or self._requests.get(timeout=IDLE_POLL_S)
                except Empty:
                    pass
                deadline = Deadline.after(self._passes.max_outage)
                self._show_positions(deadline)
                if request is not None:
                    if positions is None:
                        self._source.resume(request.positions)
                    positions = request.positions
                if positions is None:
                    continue
                self._poll(positions, deadline)
                if request is not None:
                    answer = self._decide(request, time.monotonic())
                    if answer is None:
                        self._stopping.wait(POLL_S)
                    else:
                        request = None
                        self._answers.put(answer)
            self._show_positions(Deadline.after(LAST_COMMIT_S))
        except HeadraceError as error:
            if self._stopping.is_set():
                log.warning("lag tools may not show the last position: %s", error)
            else:
                self._answers.put(error)

    def _show_positions(self, deadline: Deadline) -> None:
        with self._lock:
            positions, self._to_commit = self._to_commit, {}
        if positions:
            self._source.commit(positions, deadline)

    def _poll(self, positions: Mapping[str, int], deadline: Deadline) -> None:
        """Read the source's partitions; new ones are logged."""
        seen = self._source.partitions(deadline)
        if self._was_bounded:  # an earlier run read the stream up to an end
            self._was_bounded = False
            self._read_on(seen, positions)
        known, new = with_new_partitions(self.known, seen, self._source.bounded)
        self._take_in(known, new, positions)
        absent = self.known.keys() - {partition.name for partition in seen}
        for name in sorted(absent - self._absent):
            log.warning("%s is no longer there; it was read up to position %d", name, positions.get(name, 0))
        self._absent |= absent
        self._partitions = present_partitions(self.known, seen, positions, self.skips)

    def _take_in(
        self, known: Mapping[str, KnownPartition], new: Sequence[KnownPartition], positions: Mapping[str, int]
    ) -> None:
        """Log new partitions, and old ones that are longer now or have no end any more."""
        if not new:
            return
        added = [each for each in new if each.end is not None or each.name not in self.known]
        if in_order(known) and (late := late_partitions(self.known, added, positions)):
            log.warning("late: %s; read next, although later partitions of the stream were read before", _named(late))
            self.num_late += len(late)
        # first: a commit in between must contain them, because the record in the log may be pruned after it
        self.known = known
        self._retrier.call(lambda: self._journal.operation(PartitionsOperation(partitions=new)))

    def _grow(self, positions: Mapping[str, int]) -> bool:
        """Once, for a bounded stream of an earlier run: whether the stream has grown since."""
        if not self._may_grow:
            return False
        self._may_grow = False
        deadline = Deadline.after(self._passes.max_outage)
        self._source.look_again(deadline)
        new = self._read_on(self._source.partitions(deadline), positions)
        num_new = sum((each.end or 0) - positions.get(each.name, each.start) for each in new)
        if new:
            named = _named([each.name for each in new])
            log.info("%d events are new since the stream was read completely, in %s", num_new, named)
        return bool(new)

    def _read_on(self, seen: Sequence[Partition], positions: Mapping[str, int]) -> Sequence[KnownPartition]:
        """Take in what lies behind the ends of an earlier run: the new and the longer partitions."""
        known, new, words = with_growth(self.known, seen, self._source.bounded)
        for word in words:
            log.warning("%s; it is not read again: give new data a new name, or start over with --fresh", word)
        self._take_in(known, new, positions)
        return new

    def _decide(self, request: _Request, now_s: float) -> PassPlan | StreamEnded | None:
        """The plan, if it may be cut now."""
        partitions = self._partitions
        positions = self._past_gaps(partitions, request.positions)
        self.paused = self.held()
        if self._source.bounded and not self.paused and is_drained(partitions, positions, self.skips):
            return None if self._grow(request.positions) else StreamEnded()
        turn = next_turn(partitions, positions, self._sources, self.skips)
        partitions = turn.partitions
        max_events, learn = self._passes.max_events, True
        if self._rules.learn_until is not None:
            left = self._rules.learn_until - request.num_positions
            learn, max_events = left > 0, min(max_events, left) if left > 0 else max_events
        if self._rules.ends_after is not None:
            if (rest := self._rules.ends_after - request.num_positions) <= 0:
                return StreamEnded()
            max_events = min(max_events, rest)
        waiting, waited = sum(backlog(partitions, positions, self.skips)), now_s - request.at_s >= self._passes.wait
        due = waiting >= max_events or (turn.holds and turn.is_final)
        if self._by_count:
            due = due or (self._source.bounded and turn.is_final)
        else:
            due = due or (waiting > 0 and waited)
        if self.paused:
            self._caps.forget_ends()
        if not due or self.paused:
            if not waited or not self.wants_pass():
                return None
            max_events = 0
        plan = PassPlan(request.number, self._cut(partitions, positions, max_events), learn, epoch=turn.epoch)
        self._retrier.call(lambda: self._journal.plan(plan))
        return plan

    def _cut(self, partitions: Sequence[Partition], positions: Mapping[str, int], max_events: int) -> RankSegments:
        whole = (partitions, positions, max_events, self._rules.num_ranks, self.skips)
        if not in_order(self.known):
            return cut_equally(*whole)
        caps = self._caps.of(partitions, positions, self.skips, max_events) if max_events else {}
        segments = cut(*whole, caps, self.speeds.shares)
        if not self._source.bounded:
            ends = {segment.partition: segment.end for rank in segments for segment in rank}
            self._caps.planned(partitions, {**positions, **ends}, self.skips)
        return segments

    def _past_gaps(self, partitions: Sequence[Partition], positions: Mapping[str, int]) -> dict[str, int]:
        """The next position of each partition, after skipped and lost ranges.

        A lost range is logged at once, and skipped from then on, also after a restart. Raises SourceGap where
        `on_gap` is "fail".
        """
        places = {p.name: after_skips(p.name, positions.get(p.name, p.start), self.skips) for p in partitions}
        on_gap = {p.name: self._sources.section_of(p.name).on_gap for p in partitions}
        for gap in (gap for p in partitions for gap in gaps([p], places, on_gap[p.name] == "latest")):
            if on_gap[gap.partition] == "fail":
                raise SourceGap(
                    f"{gap.partition}: position {gap.position} is no longer retained, the first one is {gap.go_on}; "
                    f'with on_gap = "earliest" or "latest" the source continues after the gap'
                )
            log.warning("%s", gap)
            operation = GapOperation(partition=gap.partition, position=gap.position, go_on=gap.go_on)
            self.skips += (operation.skip,)  # first, as above
            self._retrier.call(partial(self._journal.operation, operation))
            self._lost[gap.partition] = self._lost.get(gap.partition, 0) + gap.go_on - gap.position
            places[gap.partition] = gap.go_on
        return places


def _named(names: Sequence[str]) -> str:
    """The first names, for a message."""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more
