"""Asks source and clock, on the chief, when the next pass may be cut; runs in a thread of its own.

What a pass then holds is `trainer.plan`'s decision, how far parallel streams may be apart `trainer.skew`'s, what is
known of a partition `trainer.partitions`'. What is new and what is planned goes to the journal before anybody hears of
it. At most one plan is asked for and not yet taken.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, Queue
from typing import Literal, Protocol

from dataset.errors import SourceGap
from dataset.source import Partition, Source
from millrace.deadline import Deadline
from millrace.errors import MillraceError
from millrace.retry import Retrier
from trainer.config import PassesSection
from trainer.equal_shares import cut_equally
from trainer.log import LogFull
from trainer.partitions import Known, Skip, came_late, grown, in_order, meet, past, present
from trainer.plan import Plan, backlog, cut, drained, gaps
from trainer.records import GapOperation, PartitionsOperation
from trainer.skew import caps_by_period, caps_by_time, heads

POLL_S = 0.05
"""How often the source is asked while a plan is wanted."""
IDLE_POLL_S = 1.0
"""How often while none is, for the figures of lag."""
PAUSED = "paused"
"""While this file exists in the store, no passes of events are planned."""
MAX_NAMED = 8
"""Partitions named on a line of the log."""
LOG_WAITS = "training waits, for the log cannot be written"
"""Begins the status of a job while its log's disk is full."""
LAST_COMMIT_S = 5.0
"""How long the last positions may take to be shown to lag tools, at the end."""

log = logging.getLogger(__name__)


class Drained:
    """There will be no further pass."""


class Journal(Protocol):
    """Where the planner writes, from its own thread, before it answers: the job's log.

    Each returns once what it was given is durable. Raises MillraceError; LogFull where trying again may help.
    """

    def operation(self, operation: PartitionsOperation | GapOperation) -> None:
        """New partitions, or positions that are no longer retained."""
        ...

    def plan(self, plan: Plan) -> None:
        """The pass that is planned next."""
        ...


class MemoryJournal:
    """The twin of a journal that is kept nowhere else."""

    def __init__(self) -> None:
        self.operations: list[PartitionsOperation | GapOperation] = []
        self.plans: list[Plan] = []

    def operation(self, operation: PartitionsOperation | GapOperation) -> None:
        """See Journal."""
        self.operations.append(operation)

    def plan(self, plan: Plan) -> None:
        """See Journal."""
        self.plans.append(plan)


@dataclass(frozen=True, slots=True)
class _Request:
    number: int
    positions: Mapping[str, int]
    num_positions: int
    """Positions of all passes before."""
    at_s: float = field(default_factory=time.monotonic)


class Planner:
    """See module docstring. `request` and `take` from one thread."""

    def __init__(
        self,
        source: Source,
        passes: PassesSection,
        num_ranks: int,
        learn_until: int | None,
        on_gap: Literal["fail", "earliest", "latest"] = "fail",
        *,
        journal: Journal | None = None,
        known: Mapping[str, Known] | None = None,
        skips: Collection[Skip] = (),
        max_full_s: float = 600.0,
    ) -> None:
        """`known` and `skips` are what commit and log say; a full log is tried for `max_full_s`."""
        self._source, self._passes, self._num_ranks = source, passes, num_ranks
        self._learn_until, self._on_gap = learn_until, on_gap
        self._journal = journal or MemoryJournal()
        self.known: Mapping[str, Known] = dict(known or {})
        """Partitions met; replaced, never changed, so any thread may read it."""
        self.skips: tuple[Skip, ...] = tuple(skips)
        """What is gone past: as given, and what was jumped over since. Any thread."""
        self._jumped: dict[str, int] = {}
        self._by_count = (passes.cut or ("count" if source.bounded else "arrival")) == "count"
        self._requests: Queue[_Request | None] = Queue(2)  # a request, and the word to end
        self._answers: Queue[Plan | Drained | MillraceError] = Queue(1)
        self._partitions: Sequence[Partition] = ()
        self._absent: set[str] = set()
        self._looks_again = source.bounded and bool(self.known)
        self._at_end: frozenset[str] = frozenset()  # streams that the last pass read to their end, and more may come
        self._cells: dict[str, int] = {}  # see caps_by_time
        self.num_late = 0
        """Partitions found since the start that come before one of their stream that was begun already. Any thread."""
        self._lock = threading.Lock()
        self._to_commit: dict[str, int] = {}
        self._stopping = threading.Event()
        self._retrier = Retrier(LogFull, LOG_WAITS, max_full_s, self._stopping)
        self.wants_pass: Callable[[], bool] = lambda: False
        """Whether a pass of no events is wanted while nothing comes; asked by the thread."""
        self.held: Callable[[], bool] = lambda: False
        """Whether the job is paused: no pass of events is planned then, nor the end; asked by the thread."""
        self.paused = False
        """What the thread was told last."""
        if not in_order(self.known) and len(self.known) > 1:
            log.warning(
                "this job began when each pass took an equal share of every partition, and keeps to that: "
                "passes.max_skew and partition_by have no effect; --fresh begins anew, with files read in order"
            )
        self._thread = threading.Thread(target=self._run, name="planner", daemon=True)
        self._thread.start()

    def request(self, number: int, positions: Mapping[str, int], num_positions: int) -> None:
        """Ask for pass `number`, which begins at `positions` after `num_positions` in all."""
        self._requests.put_nowait(_Request(number, dict(positions), num_positions))

    def take(self, wait_s: float) -> Plan | Drained | None:
        """The answer to the last request, or None if it is not there after `wait_s`. Raises what the source raised."""
        try:
            answer = self._answers.get(timeout=wait_s) if wait_s else self._answers.get_nowait()
        except Empty:
            if self._thread.is_alive() or not self._answers.empty():
                return None
            raise RuntimeError("the thread that plans has ended by a bug; its traceback is in the output") from None
        if isinstance(answer, MillraceError):
            raise answer
        return answer

    @property
    def trouble(self) -> str:
        """Why no plan can be had now, for a status; empty where there is no trouble. Any thread."""
        return self._retrier.trouble

    def lag(self, positions: Mapping[str, int]) -> dict[str, int]:
        """Positions that wait, by partition, as last seen."""
        partitions = self._partitions
        places = {p.name: max(p.begin, positions.get(p.name, p.start)) for p in partitions}
        return dict(zip(places, backlog(partitions, places, self.skips), strict=True))

    def commit(self, positions: Mapping[str, int]) -> None:
        """Show lag tools where the job is in these partitions, at the next poll."""
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
        """Positions jumped over since the start because they were no longer retained, by partition."""
        return dict(self._jumped)

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
                self._look(positions, deadline)
                if request is not None:
                    answer = self._decide(request, time.monotonic())
                    if answer is None:
                        self._stopping.wait(POLL_S)
                    else:
                        request = None
                        self._answers.put(answer)
            self._show_positions(Deadline.after(LAST_COMMIT_S))
        except MillraceError as error:
            if self._stopping.is_set():
                log.warning("lag tools may not see where the job ended: %s", error)
            else:
                self._answers.put(error)

    def _show_positions(self, deadline: Deadline) -> None:
        with self._lock:
            positions, self._to_commit = self._to_commit, {}
        if positions:
            self._source.commit(positions, deadline)

    def _look(self, positions: Mapping[str, int], deadline: Deadline) -> None:
        """Ask the source what is there; partitions met for the first time are logged."""
        seen = self._source.partitions(deadline)
        known, new = meet(self.known, seen, self._source.bounded)
        self._take_in(known, new, positions)
        absent = self.known.keys() - {partition.name for partition in seen}
        for name in sorted(absent - self._absent):
            log.warning("%s is no longer there; it was read up to %d", name, positions.get(name, 0))
        self._absent |= absent
        self._partitions = present(self.known, seen, positions, self.skips)

    def _take_in(self, known: Mapping[str, Known], new: Sequence[Known], positions: Mapping[str, int]) -> None:
        """Log partitions that are new, or longer than they were."""
        if not new:
            return
        if in_order(known) and (late := came_late(self.known, new, positions)):
            log.warning("late: %s; read next, after what comes later in its stream", _named(late))
            self.num_late += len(late)
        self.known = known  # first: a commit made in between must not lack what pruning may then take from the log
        self._retrier.call(lambda: self._journal.operation(PartitionsOperation(partitions=new)))

    def _look_again(self, positions: Mapping[str, int]) -> bool:
        """Once, of a bounded stream that a run before this one began: whether there is more of it by now."""
        if not self._looks_again:
            return False
        self._looks_again = False
        deadline = Deadline.after(self._passes.max_outage)
        self._source.look_again(deadline)
        known, new, words = grown(self.known, self._source.partitions(deadline))
        for word in words:
            log.warning("%s; it is not read again: give what is new its own name, or begin anew with --fresh", word)
        num_new = sum((each.end or 0) - positions.get(each.name, each.start) for each in new)
        if new:
            named = _named([each.name for each in new])
            log.info("%d events are new since the stream was read to its end, in %s", num_new, named)
        self._take_in(known, new, positions)
        return bool(new)

    def _decide(self, request: _Request, now_s: float) -> Plan | Drained | None:
        """The plan, if it may be cut now."""
        partitions = self._partitions
        positions = self._past_gaps(partitions, request.positions)
        self.paused = self.held()
        if self._source.bounded and not self.paused and drained(partitions, positions, self.skips):
            return None if self._look_again(request.positions) else Drained()
        max_events, learn = self._passes.max_events, True
        if self._learn_until is not None:
            left = self._learn_until - request.num_positions
            learn, max_events = left > 0, min(max_events, left) if left > 0 else max_events
        waiting, waited = sum(backlog(partitions, positions, self.skips)), now_s - request.at_s >= self._passes.wait
        if self._by_count:
            ended = self._source.bounded and all(partition.final for partition in partitions)
            due = waiting >= max_events or ended
        else:
            due = waiting >= max_events or (waiting > 0 and waited)
        if self.paused:
            self._at_end = frozenset()
        if not due or self.paused:
            if not waited or not self.wants_pass():
                return None
            max_events = 0
        plan = self._cut(request.number, partitions, positions, max_events, learn)
        self._retrier.call(lambda: self._journal.plan(plan))
        return plan

    def _cut(
        self, number: int, partitions: Sequence[Partition], positions: Mapping[str, int], max_events: int, learn: bool
    ) -> Plan:
        whole = (number, partitions, positions, max_events, self._num_ranks, learn, self.skips)
        if not in_order(self.known):
            return cut_equally(*whole)
        plan = cut(*whole, self._caps(partitions, positions) if max_events else {})
        if not self._source.bounded:
            left = heads(partitions, {**positions, **plan.positions()}, self.skips)
            self._at_end = frozenset(partition.stream_name for partition in partitions) - left.keys()
        return plan

    def _caps(self, partitions: Sequence[Partition], positions: Mapping[str, int]) -> Mapping[str, int]:
        """Up to where the next pass may read. A stream that has caught up with what arrives holds nobody."""
        waiting = heads(partitions, positions, self.skips)
        holders = [name for name in waiting if name not in self._at_end]
        if len(holders) < 2:
            return {}
        deadline = Deadline.after(self._passes.max_outage)
        if self._source.positions_at({}, deadline) is None:
            return caps_by_period(partitions, waiting, holders)

        def ask(times_ms: Mapping[str, int]) -> Mapping[str, int]:
            return self._source.positions_at(times_ms, deadline) or {}

        return caps_by_time(waiting, holders, round(1000 * self._passes.max_skew), ask, self._cells)

    def _past_gaps(self, partitions: Sequence[Partition], positions: Mapping[str, int]) -> dict[str, int]:
        """Where to go on in each partition, past what is skipped or no longer retained; raises where the spec says so.

        A gap jumped over is logged at once and skipped from then on, also after a restart.
        """
        places = {p.name: past(p.name, positions.get(p.name, p.start), self.skips) for p in partitions}
        for gap in gaps(partitions, places, self._on_gap == "latest"):
            if self._on_gap == "fail":
                raise SourceGap(
                    f"{gap.partition}: position {gap.position} is no longer retained, the first one is {gap.go_on}; "
                    f'on_gap = "earliest" or "latest" of the source goes on there'
                )
            log.warning("%s", gap)
            operation = GapOperation(partition=gap.partition, position=gap.position, go_on=gap.go_on)
            self.skips += (operation.skip,)  # first, as above
            self._retrier.call(partial(self._journal.operation, operation))
            self._jumped[gap.partition] = self._jumped.get(gap.partition, 0) + gap.go_on - gap.position
            places[gap.partition] = gap.go_on
        return places


def _named(names: Sequence[str]) -> str:
    """The first names, for a line of the log."""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more
