"""The closed passes in sum: in a sliding window, and in the life of the job. Both are in commits.

The window is at most 24 packed parts. Parts too old for the newest one are dropped. With event time, a part is a 24th
of the window's length, and a pass belongs to the part of its samples' median time. Without event time, each pass is a
part of its own.
"""

import logging
import math
from collections.abc import Mapping, Set
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.trainer.metrics.scope import PackedScope, Scope
from headrace.trainer.metrics.tensor_totals import TensorTotal
from headrace.trainer.metrics.totals import I64

NUM_PARTS = 24
MAX_PARTS_COUNTED = 65_536
"""Most distinct parts that a rank counts in a pass; samples of further parts are ignored for the median."""

log = logging.getLogger(__name__)


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


class PastPasses:
    """Totals of the closed passes, on rank 0."""

    def __init__(self, like: Scope, part_s: float | None) -> None:
        """`like`: a scope of the same sizes. `part_s`: seconds of a part of the window; None: a part is a pass."""
        self._part_s = part_s
        self._num_passes = 0
        self.window, self.life = Window(), Scope.like(like)

    def add(self, scope: Scope, times: Mapping[int, int]) -> None:
        """Add a pass. `times`: its samples by part of the window (`TimeCounts.take`)."""
        self._num_passes += 1
        self.window.add(self._num_passes if self._part_s is None else median_part(times), scope)
        self.life.merge(scope)

    def state(self) -> tuple[dict[str, I64], dict[str, Any]]:
        """Arrays and JSON for a commit."""
        packed = {"life": PackedScope.of(self.life)}
        packed |= {f"window/{number}": part for number, part in self.window.parts.items()}
        arrays: dict[str, I64] = {}
        for scope, part in packed.items():
            for name, (at, values) in part.entries.items():
                arrays |= {f"{scope}/{name}/at": at, f"{scope}/{name}/values": values}
        facts = {
            "num_passes": self._num_passes,
            "part_s": self._part_s,
            "tensors": {s: {n: t.to_json() for n, t in part.tensors.items()} for s, part in packed.items()},
        }
        return arrays, facts

    def load(self, arrays: Mapping[str, I64], facts: Mapping[str, Any], kept: Set[str]) -> None:
        """Continue from a saved state, before any pass is added. Entries that are not in `kept` start anew."""
        self._num_passes = int(facts["num_passes"])
        same_parts = facts.get("part_s", self._part_s) == self._part_s  # older states lack it: taken as the same
        if not same_parts:
            log.warning("metrics.window or event_time changed: the window of the metrics starts anew")
        nothing = np.zeros(0, np.int64)
        for scope, tensors in facts["tensors"].items():
            entries = {
                n: (arrays[f"{scope}/{n}/at"], arrays[f"{scope}/{n}/values"]) if n in kept else (nothing, nothing)
                for n in self.life.totals
            }
            part = PackedScope(entries, {name: TensorTotal.of_json(row) for name, row in tensors.items()})
            if scope == "life":
                part.add_to(self.life)
            elif same_parts:
                self.window.parts[int(scope.removeprefix("window/"))] = part
