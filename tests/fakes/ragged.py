"""Columns of lists for tests, made from Python lists."""

from collections.abc import Sequence

import numpy as np

from headrace.dataset.samples.batch import Ragged


def ragged(rows: Sequence[Sequence[int]], weights: Sequence[float] | None = None) -> Ragged:
    """A column with these signs of each sample, and the weights of all of them."""
    values = np.array([value for row in rows for value in row], np.uint64)
    offsets = np.cumsum([0, *map(len, rows)]).astype(np.int64)
    return Ragged(values, offsets, None if weights is None else np.array(weights, np.float32))
