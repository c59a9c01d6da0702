"""The shuffled order of a pass, and the part of it that one trainer reads. Pure.

The order is a permutation of the pass's positions by a hash of (seed, pass, partition, position); passes of later
epochs have other numbers. It does not depend on the number of trainers: each takes a contiguous part of the order.
Positions are known when the pass is planned, so no samples travel: every trainer reads the segments of the whole pass
from the source, and gives only its own events to the pipe.

Shapes: N positions of a segment, B samples.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.samples.batch import I64, Samples, cut_batches
from headrace.dataset.stream.source import Segment
from headrace.key_kernels import keys_of
from headrace.seeds import derive

BLOCK_SAMPLES = 8_192
"""Samples of a block, more or less: the bound of the loader's queue then holds."""


@dataclass(frozen=True, slots=True)
class RankShare:
    """The part of each shuffled pass that a trainer reads."""

    seed: int
    """The job's."""
    rank: int
    world: int


def joined(segments: Sequence[Segment]) -> list[Segment]:
    """Segments in order of partition and position; those that follow each other are one, however ranks divided them."""
    found: list[Segment] = []
    for segment in sorted(segments, key=lambda each: (each.number, each.partition, each.begin)):
        if found and found[-1].partition == segment.partition and found[-1].end == segment.begin:
            found[-1] = replace(found[-1], end=segment.end)
        else:
            found.append(segment)
    return found


def shuffled_places(segments: Sequence[Segment], seed: int) -> list[I64]:
    """For each segment (N,) the place of its positions in the shuffled order of all; `segments` are joined."""
    hashes = [np.empty(0, np.uint64)]
    for segment in segments:
        first = np.uint64(derive(seed, segment.partition))
        hash_N = np.empty(segment.end - segment.begin, np.uint64)
        keys_of(first + np.arange(segment.begin, segment.end, dtype=np.uint64), 0, hash_N)
        hashes.append(hash_N)
    order = np.argsort(np.concatenate(hashes), kind="stable")
    places = np.empty(len(order), np.int64)
    places[order] = np.arange(len(order))
    return np.split(places, np.cumsum([len(each) for each in hashes[1:-1]]))[: len(segments)]


class PassShuffle:
    """The part of one trainer of one pass."""

    def __init__(self, share: RankShare, pass_number: int, segments: Sequence[Segment]) -> None:
        """`segments`: those of all trainers."""
        self.segments = joined(segments)
        """In the order in which every trainer reads them."""
        places = shuffled_places(self.segments, derive(share.seed, "shuffle", pass_number))
        num = sum(len(place_N) for place_N in places)
        self._first, self._end = (num * rank // share.world for rank in (share.rank, share.rank + 1))
        self._places: dict[str, list[tuple[Segment, I64]]] = {}
        for segment, place_N in zip(self.segments, places, strict=True):
            self._places.setdefault(segment.partition, []).append((segment, place_N))
        self.is_whole = self._end - self._first == num
        """Whether this trainer has all events of the pass."""

    def own(self, segment: Segment) -> NDArray[np.bool_] | None:
        """(N,) the trainer's positions among those of a segment, or of a part of it; None: it has all."""
        if self.is_whole:
            return None
        place_N = self._places_of(segment, np.arange(segment.begin, segment.end))
        return (place_N >= self._first) & (place_N < self._end)

    def placed(self, segment: Segment, samples: Samples) -> Samples:
        """Samples of a segment with their events' places in the shuffled order, in place of positions."""
        return replace(samples, event_B=self._places_of(segment, samples.event_B))

    def in_order(self, placed: Sequence[Samples]) -> Iterator[Samples]:
        """All samples of the trainer in shuffled order, in blocks that split no event."""
        if not placed:
            return
        whole = Samples.concat(placed)
        yield from cut_batches(iter([whole.take(np.argsort(whole.event_B, kind="stable"))]), BLOCK_SAMPLES)

    def _places_of(self, segment: Segment, position: NDArray[np.int64]) -> I64:
        for whole, place_N in self._places[segment.partition]:
            if whole.begin <= segment.begin and segment.end <= whole.end:
                return place_N[position - whole.begin]
        raise AssertionError(f"{segment} is not of this pass")
