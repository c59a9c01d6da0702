"""Reads passes ahead of training: segments -> events -> pipe -> samples -> batches, in threads, with bounded queues.

This is the contract between dataset and trainer. trainer.journal.pass_plan plans passes; the caller decides what a
batch becomes. Two threads: one reads samples, at most one pass ahead of the one being trained; the other cuts and makes
batches.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import Empty, Full, Queue
from types import TracebackType
from typing import Generic, Protocol, TypeVar

from headrace.dataset.samples.batch import Samples, cut_batches, merge_batches
from headrace.dataset.samples.rejection import RejectedSample
from headrace.dataset.samples.slot_counters import SlotCounters
from headrace.dataset.spec.config import READ_AHEAD_BYTES
from headrace.dataset.stream.source import Segment
from headrace.deadline import Deadline
from headrace.priority import ThreadPriority

T = TypeVar("T")
Item = TypeVar("Item")

MAX_SUBMITTED = 2
"""Most passes submitted and not yet read; one more is a bug of the caller."""
MAX_AHEAD_SAMPLES = 1 << 20
"""Most samples read and not yet made into batches; then reading waits."""
QUEUED_PARTS = 4
"""Part of the memory that the samples may have that wait to be made into batches."""
POLL_S = 0.2
"""Pause between two checks of a waiting thread whether to stop."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class PassTally:
    """The counts of reading one pass on one rank."""

    num_events: int = 0
    num_samples: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    """Events (multislot: output lines) rejected, by reason."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Events without a value, and events outside `since` and `until` of their source, by reason, which are not among
    `num_events`; and those that a join drops, which are."""
    num_clicks: int = 0
    """Clicks that a join read."""
    num_judged: int = 0
    """The total that `rejected` is a part of: events (multislot: output lines, and events rejected before the pipe)."""
    first_of: dict[str, str] = field(default_factory=dict)
    """The first rejection of each reason, as text."""
    num_dead_letters: int = 0
    slots: SlotCounters | None = None
    """Counters by slot, if the reader has them."""
    source_s: float = 0.0
    """Seconds of reading events. The three run in parallel, the last two in each of `pipe.processes`."""
    pipe_s: float = 0.0
    """Seconds of waiting for the command."""
    parse_s: float = 0.0
    """Seconds of feeding the command and parsing its output."""

    def reject(self, reason: str, where: str = "") -> None:
        """Count one rejection."""
        self.rejected[str(reason)] = self.rejected.get(reason, 0) + 1
        self.first_of.setdefault(str(reason), where)


class PassReader(Protocol):
    """Turns segments into samples. Call `read` from one thread, `close` from any."""

    def read(self, pass_number: int, segments: Sequence[Segment], tally: PassTally) -> Iterator[Samples]:
        """Samples of the segments in order, in blocks that never split an event; updates `tally` on the way."""
        ...

    def close(self) -> None:
        """End processes, close files; a `read` in progress ends or raises."""
        ...


class RejectingReader(PassReader, Protocol):
    """A PassReader that tells where samples are from, and takes those back that turned out bad after the pipe."""

    def partitions(self) -> Sequence[str]:
        """The partition of each block of the last `read`."""
        ...

    def reject(self, pass_number: int, samples: Sequence[RejectedSample], tally: PassTally) -> None:
        """Treat the events of samples of the last `read` as rejected ones, on its thread and after its end. Raises
        BadEvent."""
        ...


@dataclass(frozen=True, slots=True)
class _End:
    """Marks the end of a pass."""

    tally: PassTally


@dataclass(frozen=True, slots=True)
class _Failure:
    """Marks that a thread of the loader ended with an error."""

    error: BaseException


class _Stopped(Exception):
    """The loader is closed; raised in every thread that waits."""


class _SampleQueue:
    """Blocks of samples between reading and cutting; its bounds are numbers of samples and of bytes."""

    def __init__(self, stopping: threading.Event, max_samples: int, max_bytes: int) -> None:
        self._stopping, self._max_samples, self._max_bytes = stopping, max_samples, max_bytes
        self._blocks: deque[tuple[Samples | _End | _Failure, int, int]] = deque()
        """Each with its samples and its bytes."""
        self._num_samples = self._num_bytes = 0
        self._changed = threading.Condition()
        self._starved_s, self._starved_since_s = 0.0, math.inf

    def put(self, item: Samples | _End | _Failure) -> None:
        """Add an item; wait for room. A block larger than a bound enters an empty queue."""
        num, num_bytes = (len(item), item.num_bytes) if isinstance(item, Samples) else (0, 0)
        with self._changed:
            while self._num_samples and (
                self._num_samples + num > self._max_samples or self._num_bytes + num_bytes > self._max_bytes
            ):
                self._wait()
            self._blocks.append((item, num, num_bytes))
            self._num_samples += num
            self._num_bytes += num_bytes
            self._changed.notify_all()

    def get(self) -> Samples | _End | _Failure:
        """Remove the next item; wait for one."""
        with self._changed:
            self._starved_since_s = time.perf_counter()
            try:
                while not self._blocks:
                    self._wait()
            finally:
                self._starved_s += time.perf_counter() - self._starved_since_s
                self._starved_since_s = math.inf
            item, num, num_bytes = self._blocks.popleft()
            self._num_samples -= num
            self._num_bytes -= num_bytes
            self._changed.notify_all()
            return item

    def starved_s(self) -> float:
        """Seconds that `get` has waited for items, up to now."""
        with self._changed:
            return self._starved_s + max(0.0, time.perf_counter() - self._starved_since_s)

    def _wait(self) -> None:
        if self._stopping.is_set():
            raise _Stopped
        self._changed.wait(POLL_S)


class Loader(Generic[T]):
    """Reads passes ahead. Call `submit` for passes in order; then `batches(p)` to its end; then `tally(p)`.

    `make` is called on a thread of the loader with the number of the pass and the samples of one batch. At most
    `max_batches` finished batches wait. `batches` raises the errors of the threads.
    """

    def __init__(
        self,
        reader: PassReader,
        make: Callable[[int, Samples], T],
        batch_size: int,
        max_batches: int,
        num_merged: int = 1,
        *,
        reads_all: bool = False,
        memory: int = READ_AHEAD_BYTES,
    ) -> None:
        """`num_merged`: number of batches that are put together before `make`; `max_batches` counts what it makes.
        `reads_all`: whether the reader gets the segments of all ranks, of which it takes its share. `memory`:
        about the most bytes of what is read ahead."""
        self.reads_all = reads_all
        self._reader, self._make, self._batch_size, self._num_merged = reader, make, batch_size, num_merged
        self._submitted: Queue[tuple[int, Sequence[Segment]]] = Queue(MAX_SUBMITTED)
        self._order: Queue[int] = Queue(2 * MAX_SUBMITTED)
        self._stopping = threading.Event()
        self._ahead = _SampleQueue(self._stopping, MAX_AHEAD_SAMPLES, memory // QUEUED_PARTS)
        self._ready: Queue[T | _End | _Failure] = Queue(max_batches)
        self._tallies: dict[int, PassTally] = {}
        self._cutting = ThreadPriority()
        self._threads = [
            threading.Thread(target=self._guard, args=(work, fail), name=f"loader-{name}", daemon=True)
            for name, work, fail in (("read", self._read_passes, self._ahead.put), ("cut", self._cut_passes, self._put))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, pass_number: int, segments: Sequence[Segment]) -> None:
        """Add a pass to read after those submitted before."""
        assert not self._submitted.full(), f"pass {pass_number}: {MAX_SUBMITTED} passes already wait to be read"
        self._order.put_nowait(pass_number)
        self._submitted.put_nowait((pass_number, tuple(segments)))

    def batches(self, pass_number: int) -> Iterator[T]:
        """The batches of a pass. Raises the errors of reading or making them."""
        while True:
            item = self._next()
            if isinstance(item, _End):
                self._tallies = {pass_number: item.tally}
                return
            if isinstance(item, _Failure):
                self._ready.put(item)  # the next call raises it, too
                raise item.error
            yield item

    def starved_s(self) -> float:
        """Seconds up to now during which no batch could be made for lack of samples. Any thread may call."""
        return self._ahead.starved_s()

    def tally(self, pass_number: int) -> PassTally:
        """The counts of the last pass that was read to its end."""
        return self._tallies[pass_number]

    def close(self, deadline: Deadline) -> None:
        """End the reader's processes and the threads. May be called twice."""
        self._stopping.set()
        self._reader.close()
        for thread in self._threads:
            thread.join(deadline.left_s())
            if thread.is_alive():
                log.warning("thread %s did not end in time", thread.name)

    def _guard(self, work: Callable[[], None], fail: Callable[[_Failure], None]) -> None:
        with _Caught() as caught:
            work()
        if caught.error is not None:
            with _Caught():  # raises only _Stopped
                fail(_Failure(caught.error))

    def _read_passes(self) -> None:
        while True:
            pass_number, segments = self._take(self._submitted)
            tally = PassTally()
            for samples in self._reader.read(pass_number, segments, tally):
                self._ahead.put(samples)
            self._ahead.put(_End(tally))

    def _cut_passes(self) -> None:
        self._cutting.begin()
        try:
            while True:
                pass_number = self._take(self._order)
                ends: list[_End] = []
                batches = cut_batches(self._blocks(ends), self._batch_size)
                for samples in merge_batches(batches, self._num_merged):
                    self._put(self._make(pass_number, samples))
                    self._cutting.ahead()
                self._put(ends[0])
        finally:
            self._cutting.end()

    def _blocks(self, ends: list[_End]) -> Iterator[Samples]:
        """Blocks of one pass. Its end is appended to `ends`."""
        while True:
            item = self._ahead.get()
            if isinstance(item, _Failure):
                raise item.error
            if isinstance(item, _End):
                ends.append(item)
                return
            yield item

    def _next(self) -> T | _End | _Failure:
        """The next item. While none is ready, making one is urgent."""
        while not self._stopping.is_set():
            if self._ready.empty():
                self._cutting.awaited()
            try:
                return self._ready.get(timeout=POLL_S)
            except Empty:
                continue
        raise _Stopped

    def _take(self, queue: Queue[Item]) -> Item:
        while not self._stopping.is_set():
            try:
                return queue.get(timeout=POLL_S)
            except Empty:
                continue
        raise _Stopped

    def _put(self, item: T | _End | _Failure) -> None:
        while not self._stopping.is_set():
            try:
                self._ready.put(item, timeout=POLL_S)
                return
            except Full:
                continue
        raise _Stopped


class _Caught:
    """Catches any error that ends a thread, so that another thread can raise it."""

    error: BaseException | None = None

    def __enter__(self) -> "_Caught":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        if not isinstance(error, _Stopped):
            self.error = error
        return True
