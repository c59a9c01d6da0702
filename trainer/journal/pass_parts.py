"""The parts of a pass, one for each rank: pure functions of the pass's segments and the ranks' shares."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from headrace.dataset.stream.source import Segment


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
