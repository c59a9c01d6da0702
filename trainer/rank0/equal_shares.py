"""The cut for jobs that began before streams were read in order: each pass takes an equal share of every partition.

Such a job continues as it began. All other jobs are cut by trainer.journal.pass_plan.
"""

from collections.abc import Collection, Mapping, Sequence

from headrace.dataset.stream.source import Partition, Segment
from headrace.trainer.journal.partitions import SkippedRange, open_ranges
from headrace.trainer.journal.pass_plan import RankSegments, backlog


def equal_counts(waiting: Sequence[int], max_events: int) -> list[int]:
    """Number of positions to take of each partition: equal shares; the others divide what a short one leaves.

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


def cut_equally(
    partitions: Sequence[Partition],
    positions: Mapping[str, int],
    max_events: int,
    num_ranks: int,
    skips: Collection[SkippedRange] = (),
) -> RankSegments:
    """The segments of the pass that begins at `positions`; none without backlog.

    A partition belongs to the rank of its number modulo the number of ranks. A single partition is divided among all
    ranks, in contiguous parts of equal length, the longer ones first.
    """
    taken = equal_counts(backlog(partitions, positions, skips), max_events)
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
    return tuple(map(tuple, ranks))


def take(partition: Partition, begin: int, count: int, skips: Collection[SkippedRange]) -> list[Segment]:
    """The next `count` positions from `begin` on, without skipped ones; fewer at the partition's end."""
    found: list[Segment] = []
    for first, end in open_ranges(partition.name, begin, partition.end, skips):
        end = min(end, first + count)
        if first < end:
            found.append(Segment(partition.name, partition.number, first, end, partition.identity))
            count -= end - first
    return found
