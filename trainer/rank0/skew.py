"""The skew of parallel streams: up to which position each may be read, so that all advance together.

A stream that lags limits those ahead of it. A gap inside a stream limits nothing, nor does a stream without backlog.
Time comes from names (the periods of files) or, in finer steps, from the times of events. Streams of a join are merged
event by event instead, so that no pass has a click without the impressions before it. Functions are pure but for the
source's answers; StreamCaps asks it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from headrace.dataset.spec.config import RECORD_CLOCK
from headrace.dataset.spec.source_set import SourceSet
from headrace.dataset.stream.source import Partition, Source
from headrace.deadline import Deadline
from headrace.trainer.config import PassesSection
from headrace.trainer.journal.partitions import SkippedRange, StreamPlace, open_ranges, place
from headrace.trainer.journal.pass_plan import streams

CELLS = 16
"""The time of a partition's next record is found up to 1/CELLS of the allowed skew."""
MAX_MS = 1 << 62
"""Upper bound of the time of all records."""
MERGED, FIRST_STEP_MS = "", 1_000
"""Of merged streams: the key of the last time in `lowest`, and how far after it the next one is sought first."""

Ask = Callable[[Mapping[str, int]], Mapping[str, int]]
"""Source.positions_at, for a source whose events have times."""


class StreamHead(NamedTuple):
    """The next position of a stream."""

    partition: Partition
    position: int


class StreamCaps:
    """The caps of a job's streams, from pass to pass. On the planner's thread."""

    def __init__(self, source: Source, sources: SourceSet, passes: PassesSection, *, merged: bool) -> None:
        """`merged`: streams of one clock are merged by event time."""
        self._source, self._sources, self._passes, self._merged = source, sources, passes, merged
        self._at_end: frozenset[str] = frozenset()
        """Unfinished streams that the last pass read completely."""
        self._lowest: dict[str, int] = {}
        """See caps_by_time."""

    def of(
        self,
        partitions: Sequence[Partition],
        positions: Mapping[str, int],
        skips: Collection[SkippedRange],
        max_events: int,
    ) -> Mapping[str, int]:
        """The position up to which the next pass may read each partition. A stream without backlog limits no other."""
        caps: dict[str, int] = {}
        waiting = heads(partitions, positions, skips)
        clocks = dict.fromkeys(self._clock_of(name) for name in waiting)
        if self._merged and len(clocks) == 1 and self._has_times(*clocks):
            return merged_caps(rests_of(partitions, positions, skips), max_events, self._ask, self._lowest)
        for clock in clocks:
            of_clock = [each for each in partitions if self._clock_of(each.stream_name) == clock]
            theirs = {name: head for name, head in waiting.items() if self._clock_of(name) == clock}
            holders = [name for name in theirs if name not in self._at_end]
            if len(holders) < 2:
                continue
            if not self._has_times(clock) or (not clock and any(head.partition.period for head in theirs.values())):
                caps |= caps_by_period(of_clock, theirs, holders)
            else:
                max_skew_ms, rests = round(1000 * self._passes.max_skew), rests_of(of_clock, positions, skips)
                caps |= caps_by_time(rests, theirs, holders, max_skew_ms, self._ask, self._lowest)
        return caps

    def planned(
        self, partitions: Sequence[Partition], positions: Mapping[str, int], skips: Collection[SkippedRange]
    ) -> None:
        """A pass was cut that ends at these positions."""
        self._at_end = frozenset(each.stream_name for each in partitions) - heads(partitions, positions, skips).keys()

    def forget_ends(self) -> None:
        """No stream counts as read completely, as after a start."""
        self._at_end = frozenset()

    def _clock_of(self, stream: str) -> str:
        return self._sources.clock_of(stream, merged=self._merged)

    def _has_times(self, clock: str) -> bool:
        """Whether streams of a clock know positions by time."""
        deadline = Deadline.after(self._passes.max_outage)
        return clock in ("", RECORD_CLOCK) and self._source.positions_at({}, deadline) is not None

    def _ask(self, times_ms: Mapping[str, int]) -> Mapping[str, int]:
        return self._source.positions_at(times_ms, Deadline.after(self._passes.max_outage)) or {}


def heads(
    partitions: Sequence[Partition], positions: Mapping[str, int], skips: Collection[SkippedRange] = ()
) -> dict[str, StreamHead]:
    """The next position of each stream by its name, without streams that have no backlog."""
    found: dict[str, StreamHead] = {}
    for members in streams(partitions):
        for each in members:
            if waiting := open_ranges(each.name, positions.get(each.name, each.start), each.end, skips):
                found[each.stream_name] = StreamHead(each, waiting[0][0])
                break
    return found


def caps_by_period(
    partitions: Sequence[Partition], waiting: Mapping[str, StreamHead], holders: Collection[str]
) -> dict[str, int]:
    """The partitions of periods too late for the pass, each capped at its start.

    The pass takes the earliest period of `holders` (at least two streams). If only one of them is in it, the pass takes
    that stream up to the period of the next one.
    """
    first, second = sorted(_period(waiting[name].partition) for name in holders)[:2]
    return {
        each.name: each.start
        for each in partitions
        if _period(each) > first and (second == first or _period(each) >= second)
    }


def caps_by_time(
    rests: Sequence[Sequence["Rest"]],
    waiting: Mapping[str, StreamHead],
    holders: Collection[str],
    max_skew_ms: int,
    ask: Ask,
    lowest: dict[str, int],
) -> dict[str, int]:
    """The position up to which each partition is read: records less than `max_skew_ms` after the oldest waiting one.

    If only one of `holders` (at least two streams) has such old records, it is read up to the oldest record of the next
    one. `lowest` is passed from call to call: it saves queries and does not change results.
    """
    cell_ms = max(1, max_skew_ms // CELLS)
    held = {waiting[name].partition.name: waiting[name].position for name in holders}
    cells = first_cells(held, cell_ms, ask, lowest)
    lowest |= cells
    (first, name), (second, _) = sorted((cell, name) for name, cell in cells.items())[:2]
    until_ms = max(first * cell_ms + max_skew_ms, second * cell_ms)
    caps = ends_at(rests, until_ms, ask)
    caps[name] = max(caps[name], held[name] + 1)  # a pass is never empty, whatever the time stamps are
    return caps


def merged_caps(rests: Sequence[Sequence["Rest"]], max_events: int, ask: Ask, lowest: dict[str, int]) -> dict[str, int]:
    """The position up to which each partition is read: the first `max_events` events of all streams merged by time, in
    the order in which they count (pserver.rows.join_order). Of equal times, those of the stream with the lower number.

    None are capped if all fit, or if so many events have no time that the first with one does not. `lowest`: see
    caps_by_time.
    """
    caps = {rest.name: rest.position for stream in rests for rest in stream}
    rests = [_beginning(stream, max_events) for stream in rests]  # the source reads no file for its times beyond it

    def num_before(ends: Mapping[str, int]) -> int:
        return sum(rest.num(ends[rest.name]) for stream in rests for rest in stream)

    if len(rests) < 2 or num_before({rest.name: rest.end for stream in rests for rest in stream}) <= max_events:
        return {}
    low_ms, high_ms, step_ms = lowest.get(MERGED, 0), MAX_MS, FIRST_STEP_MS
    if num_before(ends := ends_at(rests, low_ms, ask)) > max_events:  # positions went back, or nothing has a time
        low_ms = 0
        if num_before(ends := ends_at(rests, low_ms, ask)) > max_events:
            return {}
    while low_ms + 1 < high_ms:
        middle_ms = min(low_ms + step_ms, MAX_MS - 1) if high_ms == MAX_MS else (low_ms + high_ms) // 2
        step_ms *= 2
        found = ends_at(rests, middle_ms, ask)
        if num_before(found) > max_events:
            high_ms = middle_ms
        else:
            low_ms, ends = middle_ms, found
    lowest[MERGED] = low_ms
    left = max_events - num_before(ends)
    latest = ends_at(rests, high_ms, ask)  # the events of the last millisecond do not all fit
    for rest in (rest for stream in rests for rest in stream):
        taken = min(left, rest.num(latest[rest.name]) - rest.num(ends[rest.name]))
        ends[rest.name] = rest.end_of(rest.num(ends[rest.name]) + taken) if taken else ends[rest.name]
        left -= taken
    return caps | ends


def _beginning(stream: Sequence["Rest"], max_events: int) -> list["Rest"]:
    """The first partitions of a stream that have more than `max_events` positions together, or all."""
    num_before = accumulate((rest.num(rest.end) for rest in stream), initial=0)
    return [rest for rest, num in zip(stream, num_before, strict=False) if num <= max_events]


def ends_at(rests: Sequence[Sequence["Rest"]], time_ms: int, ask: Ask) -> dict[str, int]:
    """By partition: the end of the events before `time_ms`, for what is left of each stream, in order: after the first
    partition that is not read to its end comes nothing."""
    ends = {rest.name: rest.position for stream in rests for rest in stream}
    left = [iter(stream) for stream in rests]
    while asked := [(rest, stream) for stream in left if (rest := next(stream, None)) is not None]:
        found = ask({rest.name: time_ms for rest, _ in asked})
        for rest, _ in asked:
            ends[rest.name] = max(rest.position, min(found.get(rest.name, rest.end), rest.end))
        left = [stream for rest, stream in asked if ends[rest.name] == rest.end]
    return ends


class Rest(NamedTuple):
    """The unread rest of a partition."""

    name: str
    position: int
    end: int
    skips: Collection[SkippedRange]

    def num(self, end: int) -> int:
        """Number of positions before `end`, without skipped ranges."""
        return sum(stop - begin for begin, stop in open_ranges(self.name, self.position, end, self.skips))

    def end_of(self, num: int) -> int:
        """The position after the first `num` positions without skipped ranges."""
        for begin, stop in open_ranges(self.name, self.position, self.end, self.skips):
            if num <= stop - begin:
                return begin + num
            num -= stop - begin
        return self.end


def rests_of(
    partitions: Sequence[Partition], positions: Mapping[str, int], skips: Collection[SkippedRange]
) -> list[list[Rest]]:
    """The unread rest of each stream that has a backlog, in order."""
    found = [
        [Rest(each.name, positions.get(each.name, each.start), each.end, skips) for each in stream]
        for stream in streams(partitions)
    ]
    unread = [[rest for rest in stream if rest.num(rest.end)] for stream in found]
    return [stream for stream in unread if stream]


def first_cells(at: Mapping[str, int], cell_ms: int, ask: Ask, lowest: Mapping[str, int]) -> dict[str, int]:
    """The cell of time of the first record at or after a position, by partition.

    Cell c begins at c * `cell_ms`. `lowest` is a cell at or before the result. Steps double until they are past it, and
    then halve; each step is one query, for all partitions without a result yet.
    """
    low = {name: lowest.get(name, 0) for name in at}  # the record is in this cell or a later one
    high: dict[str, int] = {}  # it is in a cell before this one
    step, last = CELLS, MAX_MS // cell_ms
    while asked := {
        name: _between(low[name], high.get(name), step, last) for name in at if high.get(name) != low[name] + 1
    }:
        found = ask({name: cell * cell_ms for name, cell in asked.items()})
        for name, cell in asked.items():
            if cell == last or found.get(name, at[name] + 1) > at[name]:
                high[name] = cell
            else:
                low[name] = cell
        step *= 2
    return low


def _between(low: int, high: int | None, step: int, last: int) -> int:
    """The next cell to query."""
    return min(low + step, last) if high is None else (low + high) // 2


def _period(partition: Partition) -> StreamPlace:
    return place(partition.period, "")
