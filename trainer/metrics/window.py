"""The sliding window of the metrics: at most 24 packed parts. Parts too old for the newest one are dropped.

With event time, a part is a 24th of the window's length, and a pass belongs to the part of its samples' median time.
Without event time, each pass is a part of its own. This module does not look into the parts.
"""

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from headrace.trainer.metrics.scope import PackedScope, Scope

NUM_PARTS = 24
MAX_PARTS_COUNTED = 65_536
"""Most distinct parts that a rank counts in a pass; samples of further parts are ignored for the median."""


class TimeCounts:
    """Samples of a pass by part, on one rank."""

    def __init__(self, window_s: float) -> None:
        self.part_s = window_s / NUM_PARTS
        self._counts: dict[int, int] = {}

    def add(self, time_s_B: NDArray[np.float64]) -> None:
        """Count samples; those without a time (NaN) are left out."""
        part_B = np.floor(time_s_B / self.part_s)
        part_B = part_B[np.isfinite(part_B)]
        if not len(part_B):
            return
        if part_B[0] == part_B.min() == part_B.max():
            parts, counts = part_B[:1], np.array([len(part_B)])
        else:
            parts, counts = np.unique(part_B, return_counts=True)
        for part, count in zip(parts.astype(np.int64).tolist(), counts.tolist(), strict=True):
            if part in self._counts or len(self._counts) < MAX_PARTS_COUNTED:
                self._counts[part] = self._counts.get(part, 0) + count

    def take(self) -> dict[int, int]:
        """Return the counts by part, and forget them."""
        counts, self._counts = self._counts, {}
        return counts


def median_part(counts: Mapping[int, int]) -> int | None:
    """The part of the lower median sample; None if no sample has a time."""
    middle, seen = math.ceil(sum(counts.values()) / 2), 0
    for part in sorted(counts):
        seen += counts[part]
        if seen >= middle:
            return part
    return None


class Window:
    """Packed parts by number."""

    def __init__(self) -> None:
        self.parts: dict[int, PackedScope] = {}

    def add(self, part: int | None, scope: Scope) -> None:
        """Add a pass to `part`; a pass without a time (None) joins the newest part. A too old pass is ignored."""
        newest = max(self.parts, default=0 if part is None else part)
        part = newest if part is None else part
        newest = max(newest, part)
        if part <= newest - NUM_PARTS:
            return
        if part in self.parts:
            joined = Scope.like(scope)
            self.parts[part].add_to(joined)
            joined.merge(scope)
            scope = joined
        self.parts[part] = PackedScope.of(scope)
        for old in [number for number in self.parts if number <= newest - NUM_PARTS]:
            del self.parts[old]

    def total(self, like: Scope) -> Scope:
        """The sum of all parts."""
        total = Scope.like(like)
        for part in self.parts.values():
            part.add_to(total)
        return total
