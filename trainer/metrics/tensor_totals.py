"""Sum, max, min and mean of the tensors a model names, and of the loss.

Sums are integers as in `trainer.metrics.totals`, so they do not depend on order. Values that are not finite are
counted and left out. Values beyond +-2**40 are clamped in the sum.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.trainer.metrics.totals import FRACTION_ONE, MAX_VALUE


@dataclass(slots=True)
class TensorTotal:
    """All values of one tensor so far."""

    count: int = 0
    not_finite: int = 0
    units: int = 0
    """Sum in units of 2**-32: a Python integer, which does not overflow."""
    max: float = -math.inf
    min: float = math.inf

    def add(self, values: NDArray[Any]) -> None:
        """Add the values of one batch, of any shape."""
        flat = values.reshape(-1).astype(np.float64)
        finite = flat[np.isfinite(flat)]
        self.not_finite += len(flat) - len(finite)
        if not len(finite):
            return
        held = np.clip(finite, -MAX_VALUE, MAX_VALUE)
        wholes = np.floor(held)
        fractions = np.rint((held - wholes) * FRACTION_ONE)
        self.count += len(finite)
        self.units += int(wholes.astype(np.int64).sum()) * FRACTION_ONE + int(fractions.astype(np.int64).sum())
        self.max = max(self.max, float(finite.max()))
        self.min = min(self.min, float(finite.min()))

    def merge(self, other: "TensorTotal") -> None:
        """Add the values of another."""
        self.count += other.count
        self.not_finite += other.not_finite
        self.units += other.units
        self.max, self.min = max(self.max, other.max), min(self.min, other.min)

    def measures(self) -> dict[str, float | int | None]:
        """The reported measures."""
        found: dict[str, float | int | None] = {"sum": None, "mean": None, "max": None, "min": None}
        if self.count:
            total = self.units / FRACTION_ONE
            found = {"sum": total, "mean": total / self.count, "max": self.max, "min": self.min}
        if self.not_finite:
            found["not_finite"] = self.not_finite
        return found

    def to_json(self) -> list[Any]:
        """Exact, as JSON. The range is null if there were no values."""
        seen = self.count > 0
        return [
            self.count,
            self.not_finite,
            str(self.units),
            self.max if seen else None,
            self.min if seen else None,
        ]

    @classmethod
    def of_json(cls, row: list[Any]) -> "TensorTotal":
        """The inverse of `to_json`."""
        count, not_finite, units, high, low = row
        return cls(
            int(count),
            int(not_finite),
            int(units),
            -math.inf if high is None else float(high),
            math.inf if low is None else float(low),
        )
