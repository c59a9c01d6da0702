"""What one record counts: its shows, or its score, as a whole number of units.

Whole numbers make sums independent of their order. A record's score is rounded up to units, so that records which
reach a threshold by their true scores reach it here, too; one of score 0 or less counts nothing.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from pserver.config import CountEntry, ShowClickEntry

SCORE_BITS = 15
"""A score's threshold is between 2**14 and 2**15 units."""
LEAST_EXPONENT = -1000
"""Smaller units would make scores in units infinite."""
Rates = tuple[float, float, int, int]


@dataclass(frozen=True, slots=True)
class Measure:
    """How an entry counts."""

    exponent: int
    """A unit is 2**exponent shows, or of score: a power of two, so that dividing by it is exact."""
    per_nonclick: float
    """Units of a show without a click."""
    per_click: float
    """Units of a click."""
    threshold: int
    """Units at which a key is admitted."""

    @classmethod
    def of(cls, entry: CountEntry | ShowClickEntry, nonclk_coeff: float, click_coeff: float) -> "Measure":
        """Whole shows; or units of a power of two in which the score's threshold has SCORE_BITS bits."""
        if isinstance(entry, CountEntry):
            return cls(0, 1.0, 1.0, entry.n)
        exponent = max(math.frexp(entry.score)[1] - SCORE_BITS, LEAST_EXPONENT)
        unit = math.ldexp(1.0, exponent)
        return cls(exponent, nonclk_coeff / unit, click_coeff / unit, math.ceil(entry.score / unit))

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest kind of counter that holds the threshold; counters stop at its highest number."""
        return next(np.dtype(f"u{size}") for size in (1, 2, 4) if self.threshold < 1 << 8 * size)

    @property
    def most(self) -> int:
        """What a full counter holds: this, or more."""
        return (1 << 8 * self.dtype.itemsize) - 1

    @property
    def rates(self) -> Rates:
        """As kernels take it: units of a show without click, of a click, most, threshold."""
        return self.per_nonclick, self.per_click, self.most, self.threshold

    def value_of(self, units: int) -> float:
        """Units as shows or as a score."""
        return math.ldexp(float(units), self.exponent)


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
    """Counts of units of 2**old_exponent in units of 2**new_exponent: rounded up, at most what their kind holds."""
    most = min(np.iinfo(counts.dtype).max, 1 << 53)  # floats hold whole numbers up to there
    return np.minimum(np.ceil(np.ldexp(counts.astype(np.float64), old_exponent - new_exponent)), most).astype(
        counts.dtype
    )
