"""How a stream is cut into passes: pure functions of positions, ends and settings; no clock, no network.

`trainer.planner` asks the source and the clock; what a plan says is trained exactly so, in this order.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dataset.source import Partition, Segment
from trainer.partitions import Skip, open_ranges


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
        return sum(segment.end - segment.begin for rank in self.segments for segment in rank)

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


def share(waiting: Sequence[int], max_events: int) -> list[int]:
    """How many positions to take of each partition: equal parts, what one lacks shared by the others.

    The remainder goes to the lowest numbers.
    """
    level, left = 0, max_events
    for order, count in enumerate(sorted(waiting)):
        part = min(count - level, left // (len(waiting) - order))
        level, left = level + part, left - part * (len(waiting) - order)
        if level < count:
            break
    taken = [min(count, level) for count in waiting]
    for i, count in enumerate(waiting):
        if left and count > level:
            taken[i], left = level + 1, left - 1
    return taken


def cut(
    number: int,
    partitions: Sequence[Partition],
    positions: Mapping[str, int],
    max_events: int,
    num_ranks: int,
    learn: bool,
    skips: Collection[Skip] = (),
) -> Plan:
    """The pass that begins at `positions`; without backlog it holds no segment.

    A partition belongs to its number modulo the ranks; a lone one is shared by all of them, in contiguous parts of
    equal length, the longer ones first.
    """
    taken = share(backlog(partitions, positions, skips), max_events)
    ranks: list[list[Segment]] = [[] for _ in range(num_ranks)]
    for partition, count in zip(partitions, taken, strict=True):
        begin = positions.get(partition.name, partition.start)
        if len(partitions) == 1:
            size, remainder = divmod(count, num_ranks)
            for rank, segments in enumerate(ranks):
                segments += take(partition, begin, size + (rank < remainder), skips)
                begin = segments[-1].end if segments else begin
        else:
            ranks[partition.number % num_ranks] += take(partition, begin, count, skips)
    return Plan(number, tuple(map(tuple, ranks)), learn)


def take(partition: Partition, begin: int, count: int, skips: Collection[Skip]) -> list[Segment]:
    """`count` positions from `begin` on (or as many as there are), past those skipped."""
    found: list[Segment] = []
    for first, end in open_ranges(partition.name, begin, partition.end, skips):
        end = min(end, first + count)
        if first < end:
            found.append(Segment(partition.name, partition.number, first, end, partition.identity))
            count -= end - first
    return found


def drained(partitions: Sequence[Partition], positions: Mapping[str, int], skips: Collection[Skip] = ()) -> bool:
    """Whether nothing waits and nothing will come."""
    return all(p.final for p in partitions) and not any(backlog(partitions, positions, skips))
