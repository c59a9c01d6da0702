"""What is known of a partition is fixed when it is first seen, and belongs to the log: pure functions of it.

A source says what is there now; the registry of known partitions says which of it is the job's, under which number,
from where and, of a bounded stream, up to where. So a restart plans as the first start did, whatever the source says
by then. Also here: ranges that the job goes past. Asking the source and writing the log is planner's work.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from dataset.errors import SourceGap
from dataset.source import Partition, check_identity


@dataclass(frozen=True, slots=True)
class Known:
    """What stays true of a partition for as long as the job lives."""

    name: str
    number: int
    """0, 1, ... in the order of first sight; decides the rank."""
    start: int
    """Position where the job began to read it."""
    end: int | None
    """Position after its last event, of a bounded stream."""
    identity: str
    """See `dataset.source.Partition`."""

    def message(self) -> dict[str, Any]:
        """As JSON-able data."""
        return asdict(self)

    @classmethod
    def of_message(cls, message: Mapping[str, Any]) -> "Known":
        """The inverse of `message`."""
        return cls(**message)


class Skip(NamedTuple):
    """Positions that the job goes past: an operator said so, or they were no longer retained."""

    partition: str
    begin: int
    end: int


def meet(
    known: Mapping[str, Known], seen: Sequence[Partition], bounded: bool
) -> tuple[Mapping[str, Known], Sequence[Known]]:
    """The registry with the new ones among `seen` (in the source's order), and these.

    One found after the first look starts at its beginning; of a bounded stream it is not taken, since that stream was
    whole at the first look.
    """
    if bounded and known:
        return known, []
    unknown = [partition for partition in seen if partition.name not in known]
    new = [
        Known(p.name, number, p.begin if known else p.start, p.end if bounded and p.final else None, p.identity)
        for number, p in enumerate(unknown, start=len(known))
    ]
    return {**known, **{each.name: each for each in new}}, new


def present(
    known: Mapping[str, Known], seen: Sequence[Partition], positions: Mapping[str, int], skips: Collection[Skip]
) -> list[Partition]:
    """The job's partitions by number, as they are now. `positions` are where the job stands.

    Raises SourceGap where a partition that is not yet read to its known end is gone, is another one by now, or is
    shorter than it was. One of an unbounded stream that is gone is final where the job stands.
    """
    now = {partition.name: partition for partition in seen}
    return [
        _present(each, now.get(each.name), positions.get(each.name, each.start), skips)
        for each in sorted(known.values(), key=lambda each: each.number)
    ]


def _present(known: Known, now: Partition | None, position: int, skips: Collection[Skip]) -> Partition:
    if known.end is not None and past(known.name, position, skips) >= known.end:
        return _over(known, known.end)
    if now is None and known.end is None:
        return _over(known, position)
    if now is None:
        raise SourceGap(
            f"{known.name} is gone, and its positions {position} to {known.end} are not yet read; put it back, "
            f"or go past them with `millrace skip`"
        )
    check_identity(known.name, known.identity, now.identity)
    least = position if known.end is None else known.end
    if now.end < least:
        raise SourceGap(
            f"{known.name} ends at position {now.end}, but it once reached {least}: it was truncated, or deleted and "
            f"made anew. Bring the old one back; or `millrace rewind` to a version that stands within it, and what is "
            f"there now is read on from there; or start anew with --fresh"
        )
    end, final = (now.end, now.final) if known.end is None else (known.end, True)
    return replace(now, number=known.number, start=known.start, end=end, final=final, identity=known.identity)


def _over(known: Known, end: int) -> Partition:
    """One of which nothing more is read, whatever became of it."""
    return Partition(known.name, known.number, known.start, known.start, end, True, known.identity)


def open_ranges(partition: str, begin: int, end: int, skips: Collection[Skip]) -> list[tuple[int, int]]:
    """What of the positions `begin` to `end` is not skipped, in order."""
    found = []
    for skip in sorted(skip for skip in skips if skip.partition == partition and skip.begin < skip.end):
        if begin >= end:
            break
        if begin < skip.begin:
            found.append((begin, min(skip.begin, end)))
        begin = max(begin, skip.end)
    return [*found, (begin, end)] if begin < end else found


def past(partition: str, position: int, skips: Collection[Skip]) -> int:
    """The first position from `position` on that is not skipped."""
    return open_ranges(partition, position, 1 << 63, skips)[0][0]
