"""Hashed counters of items, as a model counts them and as exports and replicas read them. Imports no torch.

Shapes: I items, K counters of a row, D rows of counters.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import BadInput

MIXERS = (-7046029254386353131, -4658895280553007687)
"""Odd numbers of 64 bits. Source: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators" (2014)."""
NUM_ROWS = 2
"""Rows of counters of an item: the lesser count holds, so that few items have the count of another one. Source:
Cormode and Muthukrishnan, "An Improved Data Stream Summary: The Count-Min Sketch" (2005)."""
LEAST = 0.01
"""Is added to each count, so that an item without a click has a share, too."""
PART = 1 / 16
"""The number of an item is this part of its logarithm, and that of the user so much more: a search rounds the numbers
of a vector by its largest one, and all others have a length of 1 together."""


def mixed(sign: Any) -> Any:
    """A hash of all bits of signs: int64, of numpy or of torch."""
    for mixer in MIXERS:
        sign = (sign ^ (sign >> 31)) * mixer
    return sign ^ (sign >> 31)


def counters_of(sign: Any, num_counters: int) -> tuple[Any, Any]:
    """The counter of each item in both rows. `sign`: int64, of numpy or of torch."""
    hashed = mixed(sign)
    return hashed % num_counters, (hashed >> 32) % num_counters


def log_shares(count_DK: NDArray[Any] | None, sign_I: NDArray[np.uint64]) -> NDArray[np.float32]:
    """(I,) the logarithm of the share of each item by its counters. Raises BadInput where they are none."""
    if count_DK is None or count_DK.dtype != np.float32 or count_DK.ndim != NUM_ROWS or len(count_DK) != NUM_ROWS:
        raise BadInput("the counts of items are missing, or of another shape: restart the job that made them")
    if not (np.isfinite(count_DK).all() and (count_DK >= 0).all()):
        raise BadInput("the counts of items have a number that is no count")
    first, second = counters_of(sign_I.view(np.int64), count_DK.shape[1])
    count_I = np.minimum(count_DK[0][first], count_DK[1][second]).astype(np.float64)
    total = float(count_DK[0].sum(dtype=np.float64))
    shares: NDArray[np.float32] = np.log((count_I + LEAST) / (total + LEAST)).astype(np.float32)
    return shares
