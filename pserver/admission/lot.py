"""A key's lot: a number in [0, 1) drawn from (seed, key), the same for ever.

`probability(p)` admits keys whose lot is below p. Several such entries draw the same lot, so the smallest p decides;
raising p keeps every key that had been admitted.
"""

import numpy as np
from numba import njit

from millrace.keys import GOLDEN, MASK, mix, mix_reference

SCALE = 2.0**-53


def salt_of(seed: int) -> np.uint64:
    """What a job's seed adds to each key before it is mixed."""
    return np.uint64(mix_reference((seed + GOLDEN) & MASK))


@njit(nogil=True, cache=True)
def draw(keys_U, salt, p, open_U):  # type: ignore[no-untyped-def]
    """open_U = whether each key's lot is below `p`."""
    for u in range(len(keys_U)):
        open_U[u] = np.float64(mix(keys_U[u] ^ salt) >> np.uint64(11)) * SCALE < p


def lot_of(key: int, seed: int) -> float:
    """The key's lot: the top 53 bits of mix(key ^ mix(seed + GOLDEN)). With `<`, the twin of `draw`."""
    return float((mix_reference(key ^ int(salt_of(seed))) >> 11) * SCALE)
