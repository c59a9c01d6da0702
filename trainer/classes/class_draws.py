"""Classes drawn for a step: each by itself, by a hash of seed, step and class, so that no rank asks another.

A class j is drawn with a known probability q_j, so 1 / q_j corrects for how often it is drawn: the sum over the drawn
classes of exp(score) / q_j is right on average (Horvitz and Thompson 1952). The sum over all is reached where every q_j
is 1.

Shapes: N classes of a rank, K of them drawn.
"""

from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from headrace.kernel_cache import njit
from headrace.key_kernels import mix
from headrace.keys import GOLDEN, MASK, mix_reference
from headrace.seeds import derive

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
Sampler = Literal["uniform", "log_uniform"]
UNIT = 2.0**-53
"""The 53 high bits of a hash times this are from 0 to 1."""


def probabilities(sampler: Sampler, num_drawn: int, num_classes: int, begin: int, end: int) -> F64:
    """(N,) the probability of each of the classes `begin` to `end`, so that about `num_drawn` of all are drawn.

    "log_uniform" draws class j in proportion to log((j + 2) / (j + 1)): for classes numbered from the most common one.
    """
    if sampler == "uniform":
        return np.full(end - begin, min(1.0, num_drawn / num_classes))
    class_N = np.arange(begin, end, dtype=np.float64)
    share_N: F64 = np.log1p(1 / (class_N + 1)) / np.log1p(num_classes)
    return np.minimum(1.0, num_drawn * share_N)


class ClassDraws:
    """The draws of one rank's classes."""

    def __init__(self, probability_N: F64, begin: int, seed: int) -> None:
        """`begin`: number of the first class."""
        self._probability_N, self._begin, self._seed = probability_N, begin, seed
        self._drawn_N = np.zeros(len(probability_N), np.bool_)

    def of_step(self, step: int, always_P: I64) -> tuple[I64, F64]:
        """(K,) the classes of a step, from 0 in this rank's, ascending; and (K,) the logarithms of their probabilities.

        `always_P`: classes that are among them in any case, with probability 1.
        """
        draw(np.uint64(derive(self._seed, "classes", step)), self._begin, self._probability_N, self._drawn_N)
        self._drawn_N[always_P] = True
        place_K = np.flatnonzero(self._drawn_N)
        log_K = np.log(self._probability_N[place_K])
        log_K[np.searchsorted(place_K, always_P)] = 0.0
        return place_K, log_K


@njit(nogil=True, cache=True)
def draw(seed, begin, probability_N, drawn_N):  # type: ignore[no-untyped-def]
    """Write which of the classes from `begin` on are drawn."""
    for n in range(len(probability_N)):
        hashed = mix(seed + np.uint64(begin + n + 1) * np.uint64(GOLDEN))
        drawn_N[n] = np.float64(hashed >> np.uint64(11)) * UNIT < probability_N[n]


def draw_reference(seed: int, begin: int, probability_N: F64) -> list[bool]:
    """The plain twin of `draw`."""
    hash_of: Callable[[int], int] = lambda number: mix_reference((seed + (number + 1) * GOLDEN) & MASK)  # noqa: E731
    return [(hash_of(begin + n) >> 11) * UNIT < share for n, share in enumerate(probability_N.tolist())]
