"""Counting for admission: the units of one record, and the protocol of a counter.

pserver.admission_entries says what a unit is. pserver.admission.sketch and pserver.admission.exact_counts implement the
protocol `KeyCounter`.

Shapes: U unique keys of a step, B buckets of this shard.
"""

import math
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.kernel_cache import njit
from headrace.pserver.admission_entries import Rates

F32 = NDArray[np.float32]
U64 = NDArray[np.uint64]
Flags = NDArray[np.bool_]


class KeyCounter(Protocol):
    """Counts of keys in the buckets of one shard. One thread at a time.

    Counts are stored by virtual bucket (the lowest bits of a key), each with an equal part of the memory. So a key
    depends only on the records of its bucket, and not on the distribution of buckets over shards.
    """

    @property
    def arrays(self) -> Mapping[str, NDArray[Any]]:
        """All state, by name; the first axis of each array is B."""

    units: tuple[str, ...]
    """Names of the arrays that hold units."""

    def record(
        self, keys_U: U64, show_U: F32, click_U: F32, rates: Rates, day: int, open_U: Flags, admitted_U: Flags
    ) -> None:
        """Count the records of open keys, in order; clear `admitted_U` for keys below the threshold."""

    def estimate(self, key: int, day: int) -> int:
        """Units counted for a key as of a day; changes nothing."""

    def quality(self, key: int, day: int) -> dict[str, Any]:
        """The possible error of the estimate, in units, and its cause; JSON-able."""

    def forget(self, keys_U: U64) -> None:
        """Remove the counts of these keys, where that is possible."""

    def digest(self) -> tuple[int, int]:
        """Two sums over buckets, each modulo 2**64."""


@njit(nogil=True, cache=True, inline="always")
def amount_of(show, click, rates):  # type: ignore[no-untyped-def]
    """Units of a record, 0 .. most: score = (show - click) * per_nonclick + click * per_click, rounded up."""
    shows, clicks = np.float64(show), np.float64(click)
    score = (shows - clicks) * rates[0] + clicks * rates[1]
    if not score > 0.0:
        return np.int64(0)
    if score >= rates[2]:
        return np.int64(rates[2])
    return np.int64(math.ceil(score))


def amount_of_reference(show: float, click: float, rates: Rates) -> int:
    """The twin of `amount_of`; show and click are numbers that float32 holds."""
    score = (show - click) * rates[0] + click * rates[1]
    return min(math.ceil(score), rates[2]) if score > 0 else 0


def in_units_of(counts: NDArray[Any], old_exponent: int, new_exponent: int) -> NDArray[Any]:
    """Counts of units of 2**old_exponent in units of 2**new_exponent: rounded up, at most the maximum of their type."""
    most = min(np.iinfo(counts.dtype).max, 1 << 53)  # floats hold whole numbers up to there
    return np.minimum(np.ceil(np.ldexp(counts.astype(np.float64), old_exponent - new_exponent)), most).astype(
        counts.dtype
    )
