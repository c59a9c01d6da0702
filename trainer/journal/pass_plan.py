"""The cut of a stream into passes: pure functions of positions, ends and settings; no clock, no network.

A pass is trained exactly as planned, in the plan's order. Source and clock are read by trainer.rank0.planner.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from types import MappingProxyType

import msgspec

from headrace.codec import written
from headrace.dataset.stream.source import Partition, Segment
from headrace.trainer.journal.partitions import SkippedRange, enumerated, open_ranges, place

RankSegments = tuple[tuple[Segment, ...], ...]
"""By rank, in reading order."""


class PassPlan(msgspec.Struct, frozen=True, omit_defaults=True):
    """One pass."""

    number: int
    """From 1; also the version that its close makes."""
    segments: RankSegments
    learn: bool = written(True)
    """False: the pass is only predicted (`train.learn`, `train.learn_until`); the model does not change."""
    last: bool = False
    """True if the stream has ended: this pass has no events, nor has any later one."""
    epoch: int = 1
    """How many times its events have been read with it (`sources.*.epochs`)."""

    @property
    def num_positions(self) -> int:
        """Number of positions of all segments."""
        return num_positions(segment for rank in self.segments for segment in rank)

    def positions(self) -> dict[str, int]:
        """The position of each partition after this pass."""
        ends: dict[str, int] = {}
        for rank in self.segments:
            for segment in rank:
                ends[segment.partition] = max(segment.end, ends.get(segment.partition, 0))
        return ends

    def __str__(self) -> str:
        ranges: dict[str, list[tuple[int, int]]] = {}
        for segment in (segment for rank in self.segments for segment in rank):
            found = ranges.setdefault(segment.partition, [])
            if found and found[-1][1] == segment.begin:
                found[-1] = (found[-1][0], segment.end)
            else:
                found.append((segment.begin, segment.end))
        where = [f"{name} {begin}-{end}" for name, parts in ranges.items() for begin, end in parts]
        only = ("" if self.learn else ", only predicted") + (f", epoch {self.epoch}" if self.epoch > 1 else "")
        return f"pass {self.number}: {self.num_positions:,} events{only}: {enumerated(where)}"


@dataclass(frozen=True, slots=True)
class RetentionGap:
    """Positions of a partition that are no longer retained, and the next retained position."""

    partition: str
    position: int
    go_on: int

    def __str__(self) -> str:
        lost = self.go_on - self.position
        lost_range = f"{lost:,} positions from {self.position} on are lost"
        return f"{self.partition}: {lost_range}; the job continues at {self.go_on}"


def gaps(partitions: Sequence[Partition], positions: Mapping[str, int], to_latest: bool) -> list[RetentionGap]:
    """The partitions where the job's position is before the first retained one."""
    return [
        RetentionGap(p.name, position, p.end if to_latest else p.begin)
        for p in partitions
        if (position := positions.get(p.name, p.start)) < p.begin
    ]


def backlog(
    partitions: Sequence[Partition], positions: Mapping[str, int], skips: Collection[SkippedRange] = ()
) -> list[int]:
    """Number of waiting positions in each partition, without skipped ranges."""
    return [
        sum(end - begin for begin, end in open_ranges(p.name, positions.get(p.name, p.start), p.end, skips))
        for p in partitions
    ]


def streams(partitions: Sequence[Partition]) -> list[list[Partition]]:
    """The partitions of each stream in reading order; streams in the order of their lowest number."""
    found: dict[str, list[Partition]] = {}
    for partition in sorted(partitions, key=lambda each: each.number):
        found.setdefault(partition.stream_name, []).append(partition)
    return [sorted(members, key=lambda each: place(each.period, each.name)) for members in found.values()]


def proportional_shares(waiting: Sequence[int], max_events: int) -> list[int]:
    """Number of positions to take of each stream: in proportion to its backlog, so that all streams end together."""
    upto, total = [0, *accumulate(waiting)], max(1, sum(waiting))
    marks = [min(max_events, total) * count // total for count in upto]
    return [after - before for before, after in pairwise(marks)]


def cut(
    partitions: Sequence[Partition],
    positions: Mapping[str, int],
    max_events: int,
    num_ranks: int,
    skips: Collection[SkippedRange] = (),
    caps: Mapping[str, int] = MappingProxyType({}),
    shares: Sequence[float] = (),
) -> RankSegments:
    """The segments of the pass that begins at `positions`; none without backlog.

    It takes the next positions of each stream, up to `caps` (trainer.rank0.skew). They are divided among the ranks in
    contiguous parts, so that no rank waits for others: of equal length, or by `shares` (trainer.rank0.rank_speeds).
    """
    waiting = [
        [
            Segment(each.name, each.number, begin, end, each.identity)
            for each in members
            for begin, end in open_ranges(
                each.name,
                positions.get(each.name, each.start),
                min(each.end, caps.get(each.name, each.end)),
                skips,
            )
        ]
        for members in streams(partitions)
    ]
    counts = proportional_shares([num_positions(segments) for segments in waiting], max_events)
    taken = [
        segment for segments, count in zip(waiting, counts, strict=True) for segment in divide(segments, [count])[0]
    ]
    ranks = divide(taken, part_sizes(sum(counts), num_ranks, shares))
    return tuple(map(tuple, ranks))


def num_positions(segments: Iterable[Segment]) -> int:
    """Number of positions of all segments."""
    return sum(segment.end - segment.begin for segment in segments)


def is_drained(
    partitions: Sequence[Partition], positions: Mapping[str, int], skips: Collection[SkippedRange] = ()
) -> bool:
    """True if there is no backlog and no new events can come."""
    return all(p.final for p in partitions) and not any(backlog(partitions, positions, skips))


def part_sizes(total: int, num_ranks: int, shares: Sequence[float] = ()) -> list[int]:
    """The length of each rank's part: in proportion to `shares`; without any, equal lengths, the longer ones first."""
    if shares:
        marks = [0, *(round(total * min(1.0, upto)) for upto in accumulate(shares[:-1])), total]
        return [end - begin for begin, end in pairwise(marks)]
    size, remainder = divmod(total, num_ranks)
    return [size + (rank < remainder) for rank in range(num_ranks)]


def divide(segments: Sequence[Segment], sizes: Sequence[int]) -> list[list[Segment]]:
    """The positions of `segments` in order, in parts of these sizes; a segment is split where a part ends inside it."""
    left, parts = list(reversed(segments)), list[list[Segment]]()
    for size in sizes:
        part: list[Segment] = []
        while size:
            segment = left.pop()
            middle = min(segment.end, segment.begin + size)
            part.append(replace(segment, end=middle))
            size -= middle - segment.begin
            if middle < segment.end:
                left.append(replace(segment, begin=middle))
        parts.append(part)
    return parts
