"""Where the time of a trainer's loop goes, part by part, and what to do where one part takes most of it.

For operators alone: nothing is decided by it. On a GPU, work that is queued counts where its result is waited for.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import TypeVar

from trainer.stalls import WaitsFor

T = TypeVar("T")


class Part(StrEnum):
    """What the loop does, or waits for."""

    EVENTS = "events"
    """Waiting for events to come."""
    PIPE = "pipe"
    """Waiting for samples of the source and the pipe command."""
    LOADER = "loader"
    """Waiting for samples to be made into batches."""
    FORWARD = "forward"
    """Predictions, and their metrics."""
    BACKWARD = "backward"
    """Gradients, and the dense part's update."""
    EXCHANGE = "exchange"
    """Rows to and from shards, sums over trainers, waiting for the slowest of both."""
    CLOSE = "close"
    """Closes of passes."""
    COMMIT = "commit"
    """Pauses for commits and exports, and waiting for the last ones."""
    OTHER = "other"
    """The rest: the start, for example."""


PARTS = {
    WaitsFor.PIPE: Part.LOADER,
    WaitsFor.TRAINERS: Part.EXCHANGE,
    WaitsFor.SHARDS: Part.EXCHANGE,
    WaitsFor.MODEL: Part.FORWARD,
    WaitsFor.CLOSE: Part.CLOSE,
}
"""What a step that waits for something is doing."""
ADVICE = {
    Part.PIPE: "raise pipe.processes, or make the generator faster (`generate_columns` takes many events at once); "
    "`python -m dataset --spec JOB.TOML --limit 100000` measures source and generator alone",
    Part.LOADER: "make batches larger (train.batch_size), or give the job more cores",
    Part.FORWARD: "make batches larger (train.batch_size) or the model smaller, or give the job more cores, a GPU "
    "(train.device), or more trainers (cluster.trainers)",
    Part.BACKWARD: "make batches larger (train.batch_size) or the model smaller, or give the job more cores, a GPU "
    "(train.device), or more trainers (cluster.trainers)",
    Part.EXCHANGE: "make batches larger (train.batch_size), or change how many trainers and shards share the cores "
    "(cluster.trainers, cluster.shards)",
    Part.CLOSE: "make passes longer: passes.max_events, and passes.wait where events come slowly",
    Part.COMMIT: "commit less often (commit.every), export less often, or use a faster disk",
}
"""What to do where a part takes most of the time. Waiting for events asks for nothing."""
MUCH = 0.5
"""Share of the time, but for waiting for events and the rest, from which on a part gets advice."""
LEAST_S = 10.0
"""Of a shorter time nothing is said."""


class TimeSpent:
    """Seconds by part. `part` on one thread; `seconds` on any."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._seconds = dict.fromkeys(Part, 0.0)
        self._within = [Part.OTHER]
        self._since_s, self._last_s = clock(), 0.0

    @contextmanager
    def part(self, part: Part) -> Iterator[None]:
        """Count what is done within to `part`; a part within another one interrupts it."""
        self._turn(part)
        try:
            yield
        finally:
            self._turn(None)

    def _turn(self, part: Part | None) -> None:
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
        """What is done outside of all `part`s is, from here on, what a step waits for; None: no step goes on."""
        with self._lock:
            self._count()
            self._within[0] = Part.OTHER if waits_for is None else PARTS[waits_for]

    def loaded(self, batches: Iterator[T], starved_s: Callable[[], float]) -> Iterator[T]:
        """Batches as they come; waiting for them is the loader's time, or, as far as that was starved, the pipe's.

        `starved_s`: see dataset.loader.Loader.
        """
        while True:
            before_s = starved_s()
            with self.part(Part.LOADER):
                batch = next(batches, None)
            self._move(Part.LOADER, Part.PIPE, starved_s() - before_s)
            if batch is None:
                return
            yield batch

    def _move(self, part: Part, to: Part, seconds: float) -> None:
        """Some of what was counted to one part last was another's."""
        with self._lock:
            moved_s = min(seconds, self._last_s)
            self._seconds[part] -= moved_s
            self._seconds[to] += moved_s

    def seconds(self) -> dict[str, float]:
        """Seconds by part, up to now; together all since the start."""
        with self._lock:
            running_s = self._clock() - self._since_s
            found = self._seconds | {self._within[-1]: self._seconds[self._within[-1]] + running_s}
        return {part.value: round(seconds, 3) for part, seconds in found.items()}


def advice(seconds: Mapping[str, float]) -> str:
    """One sentence about the part that takes most of the time; empty where none does."""
    busy = {part: seconds.get(part, 0.0) for part in ADVICE}
    total_s = sum(busy.values())
    most = max(busy, key=lambda part: busy[part])
    if total_s < LEAST_S or busy[most] < MUCH * total_s:
        return ""
    return f"{busy[most] / total_s:.0%} of the work's time went to {most.value}: {ADVICE[most]}"
