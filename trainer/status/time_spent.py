"""How long a trainer works on its current step, and on each part of its work, with advice where one takes most of it.

This is for operators, and clocks here decide nothing: a step that waits too long ends by its deadline. A status shows a
stalled step; service.monitor.alarms formats the message. On a GPU, queued work counts where the loop waits for its
result.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import TypeVar

from headrace.trainer.job_status import StallStatus

STALL_SHARE = 0.25
"""A step that has taken this share of `train.step_deadline` is stalled."""


class WaitsFor(StrEnum):
    """Things that a step can wait for."""

    PIPE = "pipe"
    """Samples, from the pipe command or the source."""
    TRAINERS = "trainers"
    """The other trainers, in a collective."""
    SHARDS = "shards"
    """Rows from shards, or the acknowledgement of a push."""
    MODEL = "model"
    """This process's own computation."""
    CLOSE = "close"
    """The close of the pass."""


class StepClock:
    """The clock of one rank. Written by the loop, read by any thread."""

    def __init__(self, max_step_s: float, now: Callable[[], float] = time.monotonic) -> None:
        """A step that takes longer than `max_step_s` is stalled."""
        self._max_step_s, self._now = max_step_s, now
        self.goes_on: Callable[[WaitsFor | None], None] = lambda _: None
        """Called with what the current step waits for next; with None at its end."""
        self._at: tuple[float, WaitsFor] | None = None
        self.unanswered: Callable[[], Sequence[int]] = tuple
        """Returns the numbers of the shards that have not answered yet."""
        self.asked_s: Callable[[], float] = lambda: 0.0
        """Returns how long calls of the open pass took that are answered once all ranks have made them."""
        self.pass_s = 0.0
        """How long the last pass took on this rank, without waits for other ranks at its ends."""
        self._pass_since_s = self._asked_before_s = 0.0

    def begin(self, waits_for: WaitsFor) -> None:
        """A step begins."""
        self._at = self._now(), waits_for
        self.goes_on(waits_for)

    def at(self, waits_for: WaitsFor) -> None:
        """The step now waits for something else."""
        if self._at is not None:
            self._at = self._at[0], waits_for
            self.goes_on(waits_for)

    @contextmanager
    def awaiting(self, waits_for: WaitsFor) -> Iterator[None]:
        """A context in which the step waits for something else; after it, for the same as before."""
        before = self._at
        self.at(waits_for)
        try:
            yield
        finally:
            if before is not None:
                self.at(before[1])

    def end(self) -> None:
        """The step has ended."""
        self._at = None
        self.goes_on(None)

    def pass_begins(self) -> None:
        """The first step of a pass begins."""
        self._pass_since_s, self._asked_before_s = self._now(), self.asked_s()

    def pass_ends(self) -> None:
        """The last step of this rank is applied."""
        asked_s = self.asked_s() - self._asked_before_s
        self.pass_s = max(0.0, self._now() - self._pass_since_s - asked_s)

    def stalled(self) -> StallStatus | None:
        """The stalled step; None if no step is stalled."""
        at = self._at
        if at is None or (for_s := self._now() - at[0]) <= self._max_step_s:
            return None
        shards = list(self.unanswered()) if at[1] in (WaitsFor.SHARDS, WaitsFor.CLOSE) else []
        return StallStatus(waits_for=at[1].value, for_s=for_s, max_s=self._max_step_s, shards=shards)


T = TypeVar("T")


class LoopPart(StrEnum):
    """A part of the loop's work, or something it waits for."""

    EVENTS = "events"
    """Waiting for events."""
    PIPE = "pipe"
    """Waiting for samples from the source and the pipe command."""
    LOADER = "loader"
    """Waiting for batches to be made from samples."""
    FORWARD = "forward"
    """Predictions, and their metrics."""
    BACKWARD = "backward"
    """Gradients, and the update of the dense part."""
    EXCHANGE = "exchange"
    """Rows to and from shards, sums over trainers, and waiting for the slowest of them."""
    CLOSE = "close"
    """Closes of passes."""
    COMMIT = "commit"
    """Pauses for commits and exports, and waiting for the last ones at the end."""
    OTHER = "other"
    """The rest, for example the start."""


PARTS = {
    WaitsFor.PIPE: LoopPart.LOADER,
    WaitsFor.TRAINERS: LoopPart.EXCHANGE,
    WaitsFor.SHARDS: LoopPart.EXCHANGE,
    WaitsFor.MODEL: LoopPart.FORWARD,
    WaitsFor.CLOSE: LoopPart.CLOSE,
}
"""The part to which a step counts, by what it waits for."""
ADVICE = {
    LoopPart.PIPE: "raise pipe.processes, or make the generator faster (`generate_columns` takes many events at once); "
    "`python -m headrace.dataset --spec JOB.TOML --limit 100000` measures source and generator alone",
    LoopPart.LOADER: "make batches larger (train.batch_size), or give the job more cores",
    LoopPart.FORWARD: "make batches larger (train.batch_size) or the model smaller, or give the job more cores, a GPU "
    "(train.device), or more trainers (cluster.trainers)",
    LoopPart.BACKWARD: "make batches larger (train.batch_size) or the model smaller, or give the job more cores, a GPU "
    "(train.device), or more trainers (cluster.trainers)",
    LoopPart.EXCHANGE: "make batches larger (train.batch_size), or change how many trainers and shards share the cores "
    "(cluster.trainers, cluster.shards)",
    LoopPart.CLOSE: "make passes longer: passes.max_events, and passes.wait where events come slowly",
    LoopPart.COMMIT: "commit less often (commit.every), export less often, or use a faster disk",
}
"""Advice where a part takes most of the time. Waiting for events needs none."""
MUCH = 0.5
"""A part gets advice from this share of the time, of which waiting for events and OTHER are no part."""
MUCH_PIPE_WAIT = 0.2
"""Waits for samples get advice from this share of the time of recent passes: they are pure loss."""
LEAST_S = 10.0
"""No advice is given before this time."""


class TimeSpent:
    """Seconds by part. `part` is used on one thread, `seconds` on any."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._seconds = dict.fromkeys(LoopPart, 0.0)
        self._within = [LoopPart.OTHER]
        self._since_s, self._last_s = clock(), 0.0

    @contextmanager
    def part(self, part: LoopPart) -> Iterator[None]:
        """A context whose time counts to `part`. A part inside another one interrupts it."""
        self._turn(part)
        try:
            yield
        finally:
            self._turn(None)

    def _turn(self, part: LoopPart | None) -> None:
        with self._lock:
            self._count()
            if part is None:
                self._within.pop()
            else:
                self._within.append(part)

    def _count(self) -> None:
        now_s = self._clock()
        self._last_s = now_s - self._since_s
        self._seconds[self._within[-1]] += self._last_s
        self._since_s = now_s

    def goes_on(self, waits_for: WaitsFor | None) -> None:
        """From now on, time outside every `part` counts to what a step waits for; None: there is no step."""
        with self._lock:
            self._count()
            self._within[0] = LoopPart.OTHER if waits_for is None else PARTS[waits_for]

    def loaded(self, batches: Iterator[T], starved_s: Callable[[], float]) -> Iterator[T]:
        """Yield the batches. Waiting for them counts to the loader, and to the pipe while the loader was starved.

        `starved_s`: see dataset.loader.batch_loader.Loader.
        """
        while True:
            before_s = starved_s()
            with self.part(LoopPart.LOADER):
                batch = next(batches, None)
            self._move(LoopPart.LOADER, LoopPart.PIPE, starved_s() - before_s)
            if batch is None:
                return
            yield batch

    def _move(self, part: LoopPart, to: LoopPart, seconds: float) -> None:
        """Move seconds of the last count from one part to another."""
        with self._lock:
            moved_s = min(seconds, self._last_s)
            self._seconds[part] -= moved_s
            self._seconds[to] += moved_s

    def seconds(self) -> dict[str, float]:
        """Seconds by part up to now. Their sum is the time since the start."""
        with self._lock:
            running_s = self._clock() - self._since_s
            found = self._seconds | {self._within[-1]: self._seconds[self._within[-1]] + running_s}
        return {part.value: round(seconds, 3) for part, seconds in found.items()}


def pipe_wait(before: Mapping[str, float], now: Mapping[str, float]) -> float | None:
    """Share of the work's time, between two results of `seconds`, of waiting for samples; None without any work."""
    busy = {part: now.get(part, 0.0) - before.get(part, 0.0) for part in ADVICE}
    total_s = sum(busy.values())
    return max(0.0, busy[LoopPart.PIPE]) / total_s if total_s > 0 else None


def advice(seconds: Mapping[str, float], recent_pipe_wait: float | None = None) -> str:
    """One sentence about the part that takes most of the time, or about waits for samples in recent passes; or ""."""
    busy = {part: seconds.get(part, 0.0) for part in ADVICE}
    total_s = sum(busy.values())
    if total_s < LEAST_S:
        return ""
    most = max(busy, key=lambda part: busy[part])
    if busy[most] >= MUCH * total_s:
        return f"{busy[most] / total_s:.0%} of the work's time went to {most.value}: {ADVICE[most]}"
    if recent_pipe_wait is not None and recent_pipe_wait >= MUCH_PIPE_WAIT:
        waited = f"in recent passes, training waited {recent_pipe_wait:.0%} of the time for samples"
        return f"{waited} from the source and the pipe command: {ADVICE[LoopPart.PIPE]}"
    return ""
