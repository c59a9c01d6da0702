"""Input and output of a pipe: a segment's events, its samples and its rejections.

Shapes: E events, B samples.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.pipe.time_window import AFTER, BEFORE, TimeWindow
from headrace.dataset.samples.batch import F64, I64, Samples
from headrace.dataset.samples.rejection import Reason, Rejection
from headrace.dataset.samples.slot_counters import SlotCounters
from headrace.dataset.sources.event_time import SECONDS, possible_times
from headrace.dataset.spec.config import EventTime, SourceSection
from headrace.dataset.stream.event_values import LINE_FEED, as_lines, bytes_of, find_line_feeds, grouped, take_events
from headrace.dataset.stream.source import Events, Segment

BYTES_OF_EVENT = 64
"""Bytes of an event beside its value, more or less."""
BLANK = "blank line"
"""Reason why an event is left out."""


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
    """Number of events outside the source's `since` and `until`, and without a value, by reason."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the events for the command."""
        return sum(int(block.length_E.sum()) for block in self.blocks)


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


@dataclass(frozen=True, slots=True)
class SkippedValues:
    """Events that are left out because they have no value."""

    null: bool = False
    """Those with null (Kafka)."""
    blank: bool = False
    """Those without a byte (lines of files)."""

    @classmethod
    def of(cls, section: SourceSection) -> "SkippedValues":
        """Those that a source leaves out."""
        return cls(section.skips_null, section.skips_blank)


NONE_SKIPPED = SkippedValues()


def reject_early(
    segment: Segment,
    blocks: Iterable[Events],
    max_event_bytes: int,
    *,
    lines: bool,
    window: TimeWindow | None = None,
    event_time: EventTime | None = None,
    skipped: SkippedValues = NONE_SKIPPED,
) -> PipeInput:
    """Separate the events that the command must not see; with `lines`, also those that contain a line feed.

    `skipped` events, and those outside `window`, are left out and counted; one without a time is rejected.
    `event_time`: see PipeInput.
    """
    kept: list[Events] = []
    rejections: list[Rejection] = []
    num_events = 0
    left_out: dict[str, int] = {}
    for block in blocks:
        block = _with_values(skipped, block, left_out)
        untimed_E = np.zeros(len(block), np.bool_)
        if window is not None:
            block, untimed_E = _inside(window, block, left_out)
        num_events += len(block)
        reasons = list(_reasons(block, max_event_bytes, lines, untimed_E))
        bad_E = np.zeros(len(block), np.bool_)
        for index, reason, fault in reasons:
            bad_E[index] = True
            data = block.value(index)
            detail = fault or ("" if data is None else f"{len(data)} bytes")
            kept_data = None if data is None else data[:max_event_bytes]
            rejections.append(Rejection(segment.partition, int(block.position_E[index]), reason, detail, kept_data))
        kept.append(take_events(block, np.flatnonzero(~bad_E)) if reasons else block)
    return PipeInput(segment, [block for block in kept if len(block)], rejections, num_events, event_time, left_out)


def _with_values(skipped: SkippedValues, block: Events, left_out: dict[str, int]) -> Events:
    """The events that are not skipped; counts the others in `left_out`."""
    null_E = (block.begin_E < 0) & skipped.null
    blank_E = (block.begin_E == block.end_E) & skipped.blank
    for reason, mask_E in ((Reason.NULL.value, null_E), (BLANK, blank_E)):
        if count := int(np.count_nonzero(mask_E)):
            left_out[reason] = left_out.get(reason, 0) + count
    out_E = null_E | blank_E
    return take_events(block, np.flatnonzero(~out_E)) if out_E.any() else block


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
) -> Iterator[tuple[int, Reason, str]]:
    """The rejected events: index, reason, and what the source says about it."""
    null_E = block.begin_E < 0
    long_E = ~null_E & (block.end_E - block.begin_E > max_event_bytes)
    fed_E, faulty_E = np.zeros(len(block), np.bool_), np.zeros(len(block), np.bool_)
    faults = block.faults or [None] * len(block)
    if block.faults is not None:
        faulty_E[:] = [fault is not None for fault in faults]
    whole = as_lines(block) if lines else None
    if lines and (whole is None or np.count_nonzero(whole == LINE_FEED) > len(block)):
        find_line_feeds(bytes_of(block.data), np.where(null_E, block.end_E, block.begin_E), block.end_E, fed_E)
    for index in np.flatnonzero(null_E | faulty_E | long_E | fed_E | untimed_E).tolist():
        if null_E[index]:
            yield index, Reason.NULL, ""
        elif faulty_E[index]:
            yield index, Reason.UNPARSABLE, faults[index] or ""
        elif long_E[index]:
            yield index, Reason.TOO_LONG, ""
        else:
            yield index, Reason.LINE_FEED if fed_E[index] else Reason.NO_TIME, ""


def cut_events(segment: Segment, blocks: Iterable[Events], max_bytes: int) -> Iterator[tuple[Segment, list[Events]]]:
    """Cut a segment behind each event that brings its part to `max_bytes`: a pure function of the events, however the
    source groups them. At least one part, of which the last ends where the segment does."""
    begin, part = segment.begin, list[Events]()
    for part, is_full in grouped(blocks, max_bytes, of_event=BYTES_OF_EVENT):
        if is_full:
            past = min(int(part[-1].position_E[-1]) + 1, segment.end)
            yield replace(segment, begin=begin, end=past), part
            begin, part = past, []
    if part or begin < segment.end or begin == segment.begin:
        yield replace(segment, begin=begin), part


def split_segment(segment: Segment, num_parts: int, min_positions: int = 512) -> list[Segment]:
    """Split a segment into contiguous parts for several processes: a pure function of the segment and the spec."""
    size = segment.end - segment.begin
    num_parts = max(1, min(num_parts, size // min_positions))
    cuts: I64 = segment.begin + np.arange(num_parts + 1) * size // num_parts
    bounds = zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True)
    return [replace(segment, begin=begin, end=end) for begin, end in bounds]


def slot_times(config: EventTime, samples: Samples) -> F64:
    """(B,) times from a slot; NaN if `config` names another source of time."""
    if config.slot is None:
        return samples.time_s_B
    return possible_times(samples.meta[config.slot].astype(np.float64) * SECONDS[config.unit])
