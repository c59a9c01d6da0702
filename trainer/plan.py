"""How a stream is cut into passes: pure functions of positions, ends and settings; no clock, no network.

`trainer.planner` asks the source and the clock; what a plan says is trained exactly so, in this order.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any

from dataset.source import Partition, Segment
from trainer.partitions import Skip, open_ranges, place


@dataclass(frozen=True, slots=True)
class Plan:
    """One pass."""

    number: int
    """From 1; also the version at its close."""
    segments: tuple[tuple[Segment, ...], ...]
    """By rank, in the order they are read."""
    learn: bool = True
    """False: the pass is only predicted (`train.learn`, `train.learn_until`), and nothing of the model changes."""
    last: bool = False
    """Whether the stream is at its end: the pass has no events, and none but such follow."""

    @property
    def num_positions(self) -> int:
        """Positions of all segments."""
        return num_positions(segment for rank in self.segments for segment in rank)

    def positions(self) -> dict[str, int]:
        """Where each partition stands after this pass."""
        ends: dict[str, int] = {}
        for rank in self.segments:
            for segment in rank:
                ends[segment.partition] = max(segment.end, ends.get(segment.partition, 0))
        return ends

    def message(self) -> dict[str, Any]:
        """As JSON-able data."""
        segments = [[asdict(segment) for segment in rank] for rank in self.segments]
        message = {"number": self.number, "segments": segments, "learn": self.learn}
        return message | ({"last": True} if self.last else {})

    @classmethod
    def of_message(cls, message: Mapping[str, Any]) -> "Plan":
        """The inverse of `message`."""
        segments = tuple(tuple(Segment(**segment) for segment in rank) for rank in message["segments"])
        return cls(message["number"], segments, message["learn"], message.get("last", False))


@dataclass(frozen=True, slots=True)
class Gap:
    """Positions of a partition that are no longer retained, and where to go on."""

    partition: str
    position: int
    go_on: int

    def __str__(self) -> str:
        lost = self.go_on - self.position
        return f"{self.partition}: {lost:,} positions from {self.position} on are jumped over; going on at {self.go_on}"


def gaps(partitions: Sequence[Partition], positions: Mapping[str, int], to_latest: bool) -> list[Gap]:
    """Where the job stands before what a source still holds."""
    return [
        Gap(p.name, position, p.end if to_latest else p.begin)
        for p in partitions
        if (position := positions.get(p.name, p.start)) < p.begin
    ]


def backlog(partitions: Sequence[Partition], positions: Mapping[str, int], skips: Collection[Skip] = ()) -> list[int]:
    """Positions that wait in each partition, without those skipped."""
    return [
        sum(end - begin for begin, end in open_ranges(p.name, positions.get(p.name, p.start), p.end, skips))
        for p in partitions
    ]


def streams(partitions: Sequence[Partition]) -> list[list[Partition]]:
    """The partitions of each stream in the order in which they are read; streams by their lowest number."""
    found: dict[str, list[Partition]] = {}
    for partition in sorted(partitions, key=lambda each: each.number):
        found.setdefault(partition.stream_name, []).append(partition)
    return [sorted(members, key=lambda each: place(each.period, each.name)) for members in found.values()]


def in_proportion(waiting: Sequence[int], max_events: int) -> list[int]:
    """How many positions to take of each stream: as each has its part in what waits, so that all end together."""
    upto, total = [0, *accumulate(waiting)], max(1, sum(waiting))
    marks = [min(max_events, total) * count // total for count in upto]
    return [after - before for before, after in pairwise(marks)]


def cut(
    number: int,
    partitions: Sequence[Partition],
    positions: Mapping[str, int],
    max_events: int,
    num_ranks: int,
    learn: bool,
    skips: Collection[Skip] = (),
    caps: Mapping[str, int] = MappingProxyType({}),
) -> Plan:
    """The pass that begins at `positions`; without backlog it holds no segment.

    Of each stream it takes what comes next, up to the positions that `caps` says (`trainer.skew`). All that it takes is
    shared by the ranks in contiguous parts of equal length, the longer ones first, so that no rank waits for others.
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
    counts = in_proportion([num_positions(segments) for segments in waiting], max_events)
    taken = [
        segment for segments, count in zip(waiting, counts, strict=True) for segment in divide(segments, [count])[0]
    ]
    size, remainder = divmod(sum(counts), num_ranks)
    ranks = divide(taken, [size + (rank < remainder) for rank in range(num_ranks)])
    return Plan(number, tuple(map(tuple, ranks)), learn)


def divide(segments: Sequence[Segment], sizes: Sequence[int]) -> list[list[Segment]]:
    """The positions of `segments` in order, in parts of these sizes; a segment is cut where a part ends within it."""
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


def num_positions(segments: Iterable[Segment]) -> int:
    """Positions of all segments."""
    return sum(segment.end - segment.begin for segment in segments)


def drained(partitions: Sequence[Partition], positions: Mapping[str, int], skips: Collection[Skip] = ()) -> bool:
    """Whether nothing waits and nothing will come."""
    return all(p.final for p in partitions) and not any(backlog(partitions, positions, skips))
