"""Samples of W1's shape made from their positions, for jobs that need a table of a given size and touch a part of it.

Keys come in 26 fields of one table, a multiple of 26 rows of it; what they are is the `signs` of a workload.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from headrace.dataset.loader.batch_loader import PassTally
from headrace.dataset.samples.batch import Ragged, Samples
from headrace.dataset.stream.source import Segment
from tests.bench.w1 import BLOCK, NUM_DENSE, NUM_FIELDS

Signs = Callable[[int, int], np.ndarray]
"""Of a range of positions: (26, positions) ids, uint64."""


class MadeReader:
    """A `dataset.loader.batch_loader.PassReader` of samples that are a function of their positions."""

    def __init__(self, signs: Signs, block: int = BLOCK) -> None:
        draw = np.random.default_rng(1)
        self._signs, self._block = signs, block
        self._dense = draw.normal(size=(block, NUM_DENSE)).astype(np.float32)
        self._label = (draw.random(block) < 0.25).astype(np.float32)
        self._offset_B1 = np.arange(block + 1)

    def read(self, pass_number: int, segments: Sequence[Segment], tally: PassTally) -> Iterator[Samples]:
        """Blocks of at most `block` samples."""
        for segment in segments:
            for begin in range(segment.begin, segment.end, self._block):
                end = min(begin + self._block, segment.end)
                size = end - begin
                tally.num_events += size
                tally.num_samples += size
                signs_FB = self._signs(begin, end)
                yield Samples(
                    {f"C{f + 1}": Ragged(signs_FB[f], self._offset_B1[: size + 1]) for f in range(NUM_FIELDS)},
                    {"dense": self._dense[:size]},
                    {"label": self._label[:size]},
                    np.arange(begin, end),
                    np.full(size, np.nan),
                )

    def close(self) -> None:
        """Nothing to let go of."""


def in_turn(num_rows: int) -> Signs:
    """Every row once, then again from the first."""

    def signs(begin: int, end: int) -> np.ndarray:
        ids = np.arange(begin * NUM_FIELDS, end * NUM_FIELDS, dtype=np.uint64) % np.uint64(num_rows)
        return np.ascontiguousarray(ids.reshape(-1, NUM_FIELDS).T) + np.uint64(1)

    return signs
