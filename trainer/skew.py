"""Up to where each stream may be read, so that parallel streams advance together in time: pure functions.

A stream that lags holds back those ahead of it. The bound is between streams: a gap within one holds nobody, nor does a
stream where nothing waits. Time is what names say (periods of files) or, in finer steps, the time stamps of records.
Asking the source is `trainer.planner`'s work.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from dataset.source import Partition
from trainer.partitions import Place, Skip, open_ranges, place
from trainer.plan import streams

CELLS = 16
"""The time of what waits first in a partition is found to this part of the skew that is allowed."""
MAX_MS = 1 << 62
"""No record is of this time or later."""

Ask = Callable[[Mapping[str, int]], Mapping[str, int]]
"""As Source.positions_at, of a source whose records have time stamps."""


class Head(NamedTuple):
    """Where a stream goes on."""

    partition: Partition
    position: int


def heads(
    partitions: Sequence[Partition], positions: Mapping[str, int], skips: Collection[Skip] = ()
) -> dict[str, Head]:
    """What waits first in each stream, by its name; streams where nothing waits are left out."""
    found: dict[str, Head] = {}
    for members in streams(partitions):
        for each in members:
            if waiting := open_ranges(each.name, positions.get(each.name, each.start), each.end, skips):
                found[each.stream_name] = Head(each, waiting[0][0])
                break
    return found


def caps_by_period(
    partitions: Sequence[Partition], waiting: Mapping[str, Head], holders: Collection[str]
) -> dict[str, int]:
    """A cap that leaves nothing, for each partition of a later period than the pass may hold.

    The pass holds the first period in which one of `holders` (at least two streams) stands. Where only one of them
    stands in it, the pass goes on up to the period of the next one.
    """
    first, second = sorted(_period(waiting[name].partition) for name in holders)[:2]
    return {
        each.name: each.start
        for each in partitions
        if _period(each) > first and (second == first or _period(each) >= second)
    }


def caps_by_time(
    waiting: Mapping[str, Head], holders: Collection[str], max_skew_ms: int, ask: Ask, lowest: dict[str, int]
) -> dict[str, int]:
    """Up to which position each partition is read: records of less than `max_skew_ms` after the oldest that waits.

    Where only one of `holders` (at least two streams) has such old records, the pass goes on up to the oldest one of
    the next. `lowest` is kept from call to call; it saves questions, and changes no answer. Each stream is one
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
        caps[name] = max(caps[name], at[name] + 1)  # whatever the time stamps are, a pass is not empty
    return caps


def first_cells(at: Mapping[str, int], cell_ms: int, ask: Ask, lowest: Mapping[str, int]) -> dict[str, int]:
    """The number of the cell of time in which the first record lies that is at or after a position, by partition.

    Cell c begins at c * `cell_ms`. `lowest` is a cell at or before it. Steps double until they are past it, then they
    halve; each step is one question, about all partitions that are not found yet.
    """
    low = {name: lowest.get(name, 0) for name in at}  # the record is of this cell or a later one
    high: dict[str, int] = {}  # it is of an earlier cell than this one
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
    """The cell to ask about next."""
    return min(low + step, last) if high is None else (low + high) // 2


def _period(partition: Partition) -> Place:
    return place(partition.period, "")
