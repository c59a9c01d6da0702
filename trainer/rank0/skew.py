"""The skew of parallel streams: up to which position each may be read, so that all advance together. Pure functions.

A stream that lags limits those ahead of it. A gap inside a stream limits nothing, nor does a stream without backlog.
Time comes from names (the periods of files) or, in finer steps, from the time stamps of records. Source queries are
left to trainer.rank0.planner.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from headrace.dataset.stream.source import Partition
from headrace.trainer.journal.partitions import SkippedRange, StreamPlace, open_ranges, place
from headrace.trainer.journal.pass_plan import streams

CELLS = 16
"""The time of a partition's next record is found up to 1/CELLS of the allowed skew."""
MAX_MS = 1 << 62
"""Upper bound of the time of all records."""

Ask = Callable[[Mapping[str, int]], Mapping[str, int]]
"""Source.positions_at, for a source whose records have time stamps."""


class StreamHead(NamedTuple):
    """The next position of a stream."""

    partition: Partition
    position: int


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
    waiting: Mapping[str, StreamHead], holders: Collection[str], max_skew_ms: int, ask: Ask, lowest: dict[str, int]
) -> dict[str, int]:
    """The position up to which each partition is read: records less than `max_skew_ms` after the oldest waiting one.

    If only one of `holders` (at least two streams) has such old records, it is read up to the oldest record of the next
    one. `lowest` is passed from call to call: it saves queries and does not change results. Each stream is one
    partition here.
    """
    cell_ms = max(1, max_skew_ms // CELLS)
    at = {head.partition.name: head.position for head in waiting.values()}
    held = {waiting[name].partition.name: waiting[name].position for name in holders}
    cells = first_cells(held, cell_ms, ask, lowest)
    lowest |= cells
    (first, name), (second, _) = sorted((cell, name) for name, cell in cells.items())[:2]
    until_ms = max(first * cell_ms + max_skew_ms, second * cell_ms)
    caps = dict(ask(dict.fromkeys(at, until_ms)))
    if name in caps:
        caps[name] = max(caps[name], at[name] + 1)  # a pass is never empty, whatever the time stamps are
    return caps


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
