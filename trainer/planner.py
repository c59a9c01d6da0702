"""Asks source and clock, on the chief, when the next pass may be cut; runs in a thread of its own.

What a pass then holds is `trainer.plan`'s decision. At most one plan is asked for and not yet taken.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from queue import Empty, Queue
from typing import Literal

from dataset.errors import SourceGap
from dataset.source import Partition, Source, lag
from millrace.deadline import Deadline
from millrace.errors import MillraceError
from trainer.config import PassesSection
from trainer.plan import Plan, backlog, cut, drained, gaps

POLL_S = 0.05
"""How often the source is asked while a plan is wanted."""
IDLE_POLL_S = 1.0
"""How often while none is, for the figures of lag."""
LAST_COMMIT_S = 5.0
"""How long the last positions may take to be shown to lag tools, at the end."""

log = logging.getLogger(__name__)


class Drained:
    """There will be no further pass."""


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
    ) -> None:
        self._source, self._passes, self._num_ranks = source, passes, num_ranks
        self._learn_until, self._on_gap = learn_until, on_gap
        self._jumped: dict[str, int] = {}
        self._by_count = (passes.cut or ("count" if source.bounded else "arrival")) == "count"
        self._requests: Queue[_Request | None] = Queue(2)  # a request, and the word to end
        self._answers: Queue[Plan | Drained | MillraceError] = Queue(1)
        self._partitions: Sequence[Partition] = ()
        self._lock = threading.Lock()
        self._to_commit: dict[str, int] = {}
        self._stopping = threading.Event()
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
            return None
        if isinstance(answer, MillraceError):
            raise answer
        return answer

    def lag(self, positions: Mapping[str, int]) -> dict[str, int]:
        """Positions that wait, by partition, as last seen."""
        return lag(self._partitions, positions)

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

    def _run(self) -> None:
        request: _Request | None = None
        try:
            while not self._stopping.is_set():
                try:
                    request = request or self._requests.get(timeout=IDLE_POLL_S)
                except Empty:
                    pass
                deadline = Deadline.after(self._passes.max_outage)
                self._partitions = self._source.partitions(deadline)
                self._show_positions(deadline)
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

    def _decide(self, request: _Request, now_s: float) -> Plan | Drained | None:
        """The plan, if it may be cut now."""
        partitions = self._partitions
        positions = dict(request.positions) | self._past_gaps(partitions, request.positions)
        if drained(partitions, positions):
            return Drained()
        max_events, learn = self._passes.max_events, True
        if self._learn_until is not None:
            left = self._learn_until - request.num_positions
            learn, max_events = left > 0, min(max_events, left) if left > 0 else max_events
        waiting = sum(backlog(partitions, positions))
        if self._by_count:
            due = waiting >= max_events or all(partition.final for partition in partitions)
        else:
            due = waiting >= max_events or (waiting > 0 and now_s - request.at_s >= self._passes.wait)
        if not due:
            return None
        return cut(request.number, partitions, positions, max_events, self._num_ranks, learn)

    def _past_gaps(self, partitions: Sequence[Partition], positions: Mapping[str, int]) -> dict[str, int]:
        """Where to go on in partitions that no longer hold our position; raises where the spec says so."""
        found = gaps(partitions, positions, self._on_gap == "latest")
        if found and self._on_gap == "fail":
            raise SourceGap(
                f"{found[0].partition}: position {found[0].position} is no longer retained, the first one is "
                f'{found[0].go_on}; on_gap = "earliest" or "latest" of the source goes on there'
            )
        for gap in found:
            if gap.partition not in self._jumped:
                log.warning("%s", gap)
            self._jumped[gap.partition] = gap.go_on - gap.position
        return {gap.partition: gap.go_on for gap in found}

    @property
    def jumped(self) -> dict[str, int]:
        """Positions jumped over at the last gap, by partition."""
        return dict(self._jumped)
