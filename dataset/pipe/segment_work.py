"""Input and output of a pipe: a segment's events, its samples and its rejections.

Shapes: E events.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dataset.pipe.time_window import AFTER, BEFORE, TimeWindow
from dataset.samples.batch import I64, Samples
from dataset.samples.rejection import Reason, Rejection
from dataset.samples.slot_counters import SlotCounters
from dataset.spec.config import EventTime
from dataset.stream.source import Events, Segment
from millrace.kernel_cache import njit

LINE_FEED = 10


@dataclass(frozen=True, slots=True)
class PipeInput:
    """A segment that was read: the events for the command, and the rejected ones."""

    segment: Segment
    blocks: Sequence[Events]
    rejections: Sequence[Rejection]
    num_events: int
    """Number of all events, including rejected ones; without those left out."""
    event_time: EventTime | None = None
    """The event time of the segment's source, where the job has several; None: the runner's own."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Number of events outside the source's `since` and `until`, by reason."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the events for the command."""
        return sum(int((block.end_E - block.begin_E).sum()) for block in self.blocks)


@dataclass(slots=True)
class PipeOutput:
    """The result of a segment."""

    counters: SlotCounters
    blocks: list[Samples] = field(default_factory=list)
    rejections: list[Rejection] = field(default_factory=list)
    """All rejections by position, including those of the work."""
    num_judged: int = 0
    """The total that rejections are a part of: events, or (multislot) output lines and events rejected before."""
    pipe_s: float = 0.0
    """Seconds of waiting for the command."""
    parse_s: float = 0.0
    """Seconds of feeding the command and parsing its output."""

    @property
    def num_samples(self) -> int:
        """Number of samples in all blocks."""
        return sum(len(block) for block in self.blocks)


class PipeRunner(Protocol):
    """Runs one command. One thread at a time may call `run` and `reset`; any may call `close`."""

    def run(self, work: PipeInput) -> PipeOutput:
        """Run one segment. Raises PipeProcessFailed; nothing of a failed try is kept."""
        ...

    def reset(self) -> None:
        """End the processes of a failed try or of the last segment; the next `run` starts new ones."""
        ...

    def close(self) -> None:
        """Kill processes. A `run` in progress fails, and so does any later one."""
        ...


@njit(nogil=True, cache=True)
def find_line_feeds(data, begin_E, end_E, found_E):  # type: ignore[no-untyped-def]
    """Set `found_E` for the events that contain a line feed."""
    for e in range(len(begin_E)):
        for i in range(begin_E[e], end_E[e]):
            if data[i] == 10:
                found_E[e] = True
                break


@njit(nogil=True, cache=True)
def join_values(data, begin_E, end_E, ending, out):  # type: ignore[no-untyped-def]
    """Concatenate the values of events, each followed by the byte `ending` unless it is -1."""
    at = 0
    for e in range(len(begin_E)):
        for i in range(begin_E[e], end_E[e]):
            out[at] = data[i]
            at += 1
        if ending >= 0:
            out[at] = ending
            at += 1


def as_lines(events: Events) -> NDArray[np.uint8] | None:
    """The part of the buffer that has the events as lines, one after another; None if it has them otherwise."""
    data = bytes_of(events.data)
    if not len(events) or events.begin_E[0] < 0 or events.end_E[-1] >= len(data):
        return None
    if not np.array_equal(events.begin_E[1:], events.end_E[:-1] + 1) or np.any(data[events.end_E] != LINE_FEED):
        return None
    return data[events.begin_E[0] : events.end_E[-1] + 1]


def bytes_of(data: bytes | bytearray | memoryview) -> NDArray[np.uint8]:
    """A read-only array over a buffer, so that kernels see one type whatever the source gave."""
    array: NDArray[np.uint8] = np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)
    array.setflags(write=False)
    return array


def concat_values(events: Events, ending: int) -> NDArray[np.uint8]:
    """The concatenated values of `events`, each followed by `ending` unless it is -1."""
    num_bytes = int((events.end_E - events.begin_E).sum()) + (len(events) if ending >= 0 else 0)
    out = np.empty(num_bytes, np.uint8)
    join_values(bytes_of(events.data), events.begin_E, events.end_E, ending, out)
    return out


def reject_early(
    segment: Segment,
    blocks: Iterable[Events],
    max_event_bytes: int,
    *,
    lines: bool,
    window: TimeWindow | None = None,
    event_time: EventTime | None = None,
) -> PipeInput:
    """Separate the events that the command must not see; with `lines`, also those that contain a line feed.

    Events outside `window` are left out, and counted; one without a time is rejected. `event_time`: see PipeInput.
    """
    kept: list[Events] = []
    rejections: list[Rejection] = []
    num_events = 0
    left_out: dict[str, int] = {}
    for block in blocks:
        untimed_E = np.zeros(len(block), np.bool_)
        if window is not None:
            block, untimed_E = _inside(window, block, left_out)
        num_events += len(block)
        reasons = list(_reasons(block, max_event_bytes, lines, untimed_E))
        bad_E = np.zeros(len(block), np.bool_)
        for index, reason in reasons:
            bad_E[index] = True
            data = block.value(index)
            rejections.append(
                Rejection(
                    segment.partition,
                    int(block.position_E[index]),
                    reason,
                    "" if data is None else f"{len(data)} bytes",
                    None if data is None else data[:max_event_bytes],
                )
            )
        kept.append(take_events(block, np.flatnonzero(~bad_E)) if reasons else block)
    return PipeInput(segment, [block for block in kept if len(block)], rejections, num_events, event_time, left_out)


def _inside(window: TimeWindow, block: Events, left_out: dict[str, int]) -> tuple[Events, NDArray[np.bool_]]:
    """The events of the window, and which of them have no time; counts the others in `left_out`."""
    masks = window.masks(block)
    for reason, mask_E in ((BEFORE, masks.before_E), (AFTER, masks.after_E)):
        if count := int(np.count_nonzero(mask_E)):
            left_out[reason] = left_out.get(reason, 0) + count
    out_E = masks.before_E | masks.after_E
    return (take_events(block, np.flatnonzero(~out_E)) if out_E.any() else block), masks.untimed_E[~out_E]


def _reasons(
    block: Events, max_event_bytes: int, lines: bool, untimed_E: NDArray[np.bool_]
) -> Iterator[tuple[int, Reason]]:
    null_E = block.begin_E < 0
    long_E = ~null_E & (block.end_E - block.begin_E > max_event_bytes)
    fed_E = np.zeros(len(block), np.bool_)
    whole = as_lines(block) if lines else None
    if lines and (whole is None or np.count_nonzero(whole == LINE_FEED) > len(block)):
        find_line_feeds(bytes_of(block.data), np.where(null_E, block.end_E, block.begin_E), block.end_E, fed_E)
    for index in np.flatnonzero(null_E | long_E | fed_E | untimed_E).tolist():
        if null_E[index]:
            yield index, Reason.NULL
        elif long_E[index]:
            yield index, Reason.TOO_LONG
        else:
            yield index, Reason.LINE_FEED if fed_E[index] else Reason.NO_TIME


def take_events(events: Events, index_E: NDArray[np.intp]) -> Events:
    """Some events of a block, on the same buffer."""
    return Events(
        events.data,
        events.begin_E[index_E],
        events.end_E[index_E],
        events.position_E[index_E],
        events.timestamp_ms_E[index_E],
        None if events.keys is None else [events.keys[i] for i in index_E],
        None if events.headers is None else [events.headers[i] for i in index_E],
    )


def split_segment(segment: Segment, num_parts: int, min_positions: int = 512) -> list[Segment]:
    """Split a segment into contiguous parts for several processes: a pure function of the segment and the spec."""
    size = segment.end - segment.begin
    num_parts = max(1, min(num_parts, size // min_positions))
    cuts: I64 = segment.begin + np.arange(num_parts + 1) * size // num_parts
    bounds = zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True)
    return [replace(segment, begin=begin, end=end) for begin, end in bounds]
