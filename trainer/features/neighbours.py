"""Equal neighbours in a column, such as the samples of one event: where they begin, and which ones belong together.

Shapes: K values in their order.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]


def differs(value_K: NDArray[Any]) -> NDArray[np.bool_]:
    """(K,) whether each value differs from the one before; the first does."""
    differs_K = np.ones(len(value_K), np.bool_)
    np.not_equal(value_K[1:], value_K[:-1], out=differs_K[1:])
    return differs_K


def numbered(value_K: NDArray[Any]) -> I64:
    """(K,) equal neighbours numbered through, from 0."""
    number_K: I64 = np.cumsum(differs(value_K)) - 1
    return number_K
