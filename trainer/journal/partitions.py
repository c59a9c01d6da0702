"""The registry of known partitions, and skipped ranges. Pure functions.

The facts about a partition are fixed when it is first seen, and logged: its number, its start and, for a bounded
stream, its end. So a restart plans as the first start did, whatever the source has by then. Source queries and the log
are left to trainer.rank0.planner.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import msgspec

from headrace.dataset.spec.path_pattern import natural_key
from headrace.dataset.stream.errors import SourceGap
from headrace.dataset.stream.source import Partition, check_identity, is_same

MAX_NAMED = 12
"""Most partitions or keys named on a line of the log page; the line counts the others."""

Word = tuple[tuple[int, int, str], ...]
StreamPlace = tuple[tuple[Word, ...], Word]
"""The order of partitions in a stream: by period, then by name; runs of digits count as numbers."""


@lru_cache(1 << 16)
def place(period: tuple[str, ...], name: str) -> StreamPlace:
    """The place of a partition in its stream."""
    return tuple(natural_key(part) for part in period), natural_key(name)


class KnownPartition(msgspec.Struct, frozen=True, omit_defaults=True):
    """The facts about a partition that never change during a job's life."""

    name: str
    number: int
    """0, 1, ... in the order in which they were first seen."""
    start: int
    """First position that the job reads."""
    end: int | None
    """Position after its last event; None for an unbounded stream."""
    identity: str
    """See `dataset.stream.source.Partition`."""
    stream: str | None = None
    """See `dataset.stream.source.Partition`; None: the job began before streams were in order."""
    period: tuple[str, ...] | None = None
    """See `dataset.stream.source.Partition`; None as for `stream`."""

    @property
    def place(self) -> StreamPlace:
        """Its place in its stream."""
        return place(self.period or (), self.name)

    def __str__(self) -> str:
        end = "" if self.end is None else f" to {self.end}"
        return f"{self.number} is {self.name} from {self.start}{end}"


def enumerated(parts: Sequence[str]) -> str:
    """The first parts of a line of the log page, and the number of the others."""
    more = [f"and {len(parts) - MAX_NAMED:,} more"] if len(parts) > MAX_NAMED else []
    return ", ".join([*parts[:MAX_NAMED], *more]) or "nothing"


class SkippedRange(NamedTuple):
    """Positions that the job skips: at an operator's request, or because they are no longer retained."""

    partition: str
    begin: int
    end: int


def in_order(known: Mapping[str, KnownPartition]) -> bool:
    """True if streams are read in order; False for a job that began before streams were in order."""
    return all(each.stream is not None for each in known.values())


def with_new_partitions(
    known: Mapping[str, KnownPartition], seen: Sequence[Partition], bounded: bool
) -> tuple[Mapping[str, KnownPartition], Sequence[KnownPartition]]:
    """The registry with the new partitions among `seen` (in the source's order), and those alone.

    A partition found after the first poll is read from its beginning. A bounded stream is complete at the first poll:
    later partitions are ignored.
    """
    if bounded and known:
        return known, []
    new = _new(known, seen, bounded)
    return {**known, **{each.name: each for each in new}}, new


def _new(known: Mapping[str, KnownPartition], seen: Sequence[Partition], bounded: bool) -> list[KnownPartition]:
    unknown = [partition for partition in seen if partition.name not in known]
    ordered = in_order(known)
    return [
        KnownPartition(
            p.name,
            number,
            p.begin if known else p.start,
            p.end if _ends(p, bounded) and p.final else None,
            p.identity,
            p.stream if ordered else None,
            p.period if ordered else None,
        )
        for number, p in enumerate(unknown, start=len(known))
    ]


def _ends(partition: Partition, bounded: bool) -> bool:
    """Whether the source of a partition ends."""
    return bounded if partition.bounded is None else partition.bounded


def with_growth(
    known: Mapping[str, KnownPartition], seen: Sequence[Partition], bounded: bool
) -> tuple[Mapping[str, KnownPartition], Sequence[KnownPartition], Sequence[str]]:
    """A bounded stream, read completely and polled again: the registry, its new or longer partitions, and messages
    about partitions that were replaced or truncated, which are not read.

    Partitions whose source is not bounded any more lose their ends. Where only some of the job's sources are bounded,
    their partitions keep the ends of the first look.
    """
    now = {partition.name: partition for partition in seen}
    longer, words = list[KnownPartition](), list[str]()
    for each in sorted(known.values(), key=lambda each: each.number):
        there = now.get(each.name)
        if there is None or each.end is None:
            continue
        if not is_same(each.identity, there.identity):
            words.append(f"{each.name} was replaced (identity {each.identity} then, {there.identity} now)")
        elif there.end < each.end:
            words.append(f"{each.name} ends at position {there.end} now, and was read up to {each.end}")
        elif not _ends(there, bounded):
            longer.append(msgspec.structs.replace(each, end=None))
        elif bounded and there.end > each.end:
            longer.append(msgspec.structs.replace(each, end=there.end))
    fresh = [*longer, *_new(known, seen, bounded)]
    return {**known, **{each.name: each for each in fresh}}, fresh, words


def late_partitions(
    known: Mapping[str, KnownPartition], new: Sequence[KnownPartition], positions: Mapping[str, int]
) -> list[str]:
    """Names of those among `new` whose place in their stream is before one that the job has begun to read."""
    begun: dict[str, StreamPlace] = {}
    for each in known.values():
        if each.stream and positions.get(each.name, each.start) > each.start:
            begun[each.stream] = max(begun.get(each.stream, each.place), each.place)
    return [each.name for each in new if each.stream in begun and each.place < begun[each.stream]]


def present_partitions(
    known: Mapping[str, KnownPartition],
    seen: Sequence[Partition],
    positions: Mapping[str, int],
    skips: Collection[SkippedRange],
) -> list[Partition]:
    """The job's partitions by number, as they are now. `positions` are the job's.

    Raises SourceGap if a partition that is not read to its known end is gone, replaced or truncated. A partition of an
    unbounded stream that is gone ends at the job's position.
    """
    now = {partition.name: partition for partition in seen}
    return [
        _present(each, now.get(each.name), positions.get(each.name, each.start), skips)
        for each in sorted(known.values(), key=lambda each: each.number)
    ]


def _present(known: KnownPartition, now: Partition | None, position: int, skips: Collection[SkippedRange]) -> Partition:
    if known.end is not None and after_skips(known.name, position, skips) >= known.end:
        return _over(known, known.end)
    if now is None and known.end is None:
        return _over(known, position)
    if now is None:
        raise SourceGap(
            f"{known.name} is gone, and its positions {position} to {known.end} are not read yet; restore it, "
            f"or skip them with `headrace skip`"
        )
    check_identity(known.name, known.identity, now.identity)
    least = position if known.end is None else known.end
    if now.end < least:
        raise SourceGap(
            f"{known.name} ends at position {now.end}, but it once reached {least}: it was truncated, or deleted and "
            f"recreated. Restore the old one; or `headrace rewind` to a version whose position is within the new one; "
            f"or start over with --fresh"
        )
    end, final = (now.end, now.final) if known.end is None else (known.end, True)
    return replace(_as_known(known), begin=now.begin, end=end, final=final)


def _as_known(known: KnownPartition) -> Partition:
    """A partition without readable positions."""
    at = known.start
    stream, period = known.stream or "", known.period or ()
    return Partition(known.name, known.number, at, at, at, True, known.identity, stream, period)


def _over(known: KnownPartition, end: int) -> Partition:
    """A partition that is not read any further, whatever its state now."""
    return replace(_as_known(known), end=end)


def open_ranges(partition: str, begin: int, end: int, skips: Collection[SkippedRange]) -> list[tuple[int, int]]:
    """The ranges within `begin` to `end` that are not skipped, in order."""
    found = []
    for skip in sorted(skip for skip in skips if skip.partition == partition and skip.begin < skip.end):
        if begin >= end:
            break
        if begin < skip.begin:
            found.append((begin, min(skip.begin, end)))
        begin = max(begin, skip.end)
    return [*found, (begin, end)] if begin < end else found


def after_skips(partition: str, position: int, skips: Collection[SkippedRange]) -> int:
    """The first position at or after `position` that is not skipped."""
    return open_ranges(partition, position, 1 << 63, skips)[0][0]
