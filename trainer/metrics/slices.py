"""Metrics for each value of a slot with few values.

At a close the ranks decide together which values have their own metrics: the most frequent ones of the pass (ties:
lower id), until `max_values` are known; these then stay. All others are "other". Until the close a rank measures
candidates: at most `max_candidates`, those whose ids have the lowest hashes. A value that one rank drops by this rule
would be dropped by all ranks together, so the result does not depend on the number of ranks or on order, and a chosen
value has been measured from its first sample of the pass.

Shapes: B samples, U distinct ids, R rows (0 is "other"), W length of a vector.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.key_kernels import keys_of
from headrace.keys import MASK, mix_reference
from headrace.trainer.metrics.samples import F32, U64, ids_of
from headrace.trainer.metrics.totals import HEADER, I64, add_samples, carry, empty

NUM_BUCKETS = 4096
WIDTH = HEADER + 2 * NUM_BUCKETS


def max_candidates(max_values: int) -> int:
    """Most candidates of a rank and slot; each takes 64 KiB for each task."""
    return min(4 * max_values, max_values + 128)


def hash_of(ids_U: U64) -> U64:
    """Hashes of ids: an order that does not depend on their meaning."""
    hash_U = np.empty_like(ids_U)
    keys_of(ids_U, -1, hash_U)
    return hash_U


@dataclass(frozen=True, slots=True)
class Candidates:
    """Values of a rank that are not known yet, with their numbers of samples and texts; sent to rank 0 at a close."""

    count: Mapping[int, int]
    text: Mapping[int, str]


def choose(known: Sequence[int], heard: Sequence[Candidates], max_values: int) -> list[int]:
    """Ids with their own metrics from now on: the known ones in their order, then new ones."""
    count: dict[int, int] = {}
    for candidates in heard:
        for value, samples in candidates.count.items():
            count[value] = count.get(value, 0) + samples
    lowest = sorted(set(count) - set(known), key=mix_reference)[: max_candidates(max_values)]
    chosen = sorted(lowest, key=lambda value: (-count[value], value))
    return [*known, *chosen[: max_values - len(known)]]


class SliceRows:
    """The rows of one slot on one rank during a pass."""

    def __init__(self, tasks: Sequence[tuple[str, bool]], max_values: int) -> None:
        """`tasks`: name, and whether the predictions are probabilities."""
        self._tasks, self._max_values = tuple(tasks), max_values
        self.known: list[int] = []
        """Row r + 1 of the result of `take` belongs to id `known[r]`."""
        self.texts: dict[int, str] = {}
        """Their texts, on rank 0."""
        self._reset()

    def _reset(self) -> None:
        self._row_of = {value: row for row, value in enumerate(self.known, 1)}
        self._count: dict[int, int] = {}
        self._text: dict[int, str] = {}
        self._totals = {name: empty(len(self.known) + 1, NUM_BUCKETS) for name, _ in self._tasks}
        self._free: list[int] = []
        self._num_rows = len(self.known) + 1
        self._highest = (0, 0)
        """Highest hash among the candidates, and its id."""

    def add(
        self,
        values_B: NDArray[Any],
        prediction_B: Mapping[str, F32],
        label_B: Mapping[str, F32],
        weight_B: Mapping[str, F32],
    ) -> None:
        """Add a batch."""
        ids_U, first_U, inverse_B, count_U = np.unique(
            ids_of(values_B), return_index=True, return_inverse=True, return_counts=True
        )
        if len(self.known) < self._max_values:
            self._find_candidates(ids_U, values_B[first_U], count_U)
        row_U = np.fromiter((self._row_of.get(value, 0) for value in ids_U.tolist()), np.int64, len(ids_U))
        row_B = row_U[inverse_B]
        for name, is_bce in self._tasks:
            add_samples(prediction_B[name], label_B[name], weight_B[name], row_B, is_bce, self._totals[name])

    def _find_candidates(self, ids_U: U64, values_U: NDArray[Any], count_U: I64) -> None:
        limit = max_candidates(self._max_values)
        hash_U = hash_of(ids_U)
        # Once full, only ids with a hash below the highest one can still become candidates.
        low_U = np.flatnonzero(hash_U <= np.uint64(self._highest[0] if len(self._count) == limit else MASK))
        for u in low_U.tolist():
            value, hashed = int(ids_U[u]), int(hash_U[u])
            if value in self._count:
                self._count[value] += int(count_U[u])
            elif value not in self._row_of and (len(self._count) < limit or hashed < self._highest[0]):
                if len(self._count) == limit:
                    self._drop(self._highest[1])
                self._count[value], self._text[value] = int(count_U[u]), str(values_U[u])
                self._row_of[value] = self._new_row()
                self._highest = max((mix_reference(kept), kept) for kept in self._count)

    def _new_row(self) -> int:
        if self._free:
            return self._free.pop()
        row = self._num_rows
        self._num_rows += 1
        for name, totals_RW in self._totals.items():
            if row >= len(totals_RW):
                self._totals[name] = np.concatenate([totals_RW, np.zeros_like(totals_RW)])
        return row

    def _drop(self, value: int) -> None:
        row = self._row_of.pop(value)
        del self._count[value], self._text[value]
        for totals_RW in self._totals.values():
            totals_RW[0] += totals_RW[row]
            totals_RW[row] = 0
        self._free.append(row)

    def know(self, known: Sequence[int]) -> None:
        """Reset, with these values as the known ones."""
        self.known = list(known)
        self._reset()

    def candidates(self) -> Candidates:
        """The candidates, for rank 0 at a close."""
        return Candidates(dict(self._count), dict(self._text))

    def take(self, known: Sequence[int]) -> dict[str, I64]:
        """Return (max_values + 1, W) totals of the pass by task for the values known now, and reset."""
        found: dict[str, I64] = {}
        for name, totals_RW in self._totals.items():
            rows_RW = empty(self._max_values + 1, NUM_BUCKETS)
            rows_RW[0] = totals_RW.sum(0)
            for row, value in enumerate(known, 1):
                if value in self._row_of:
                    rows_RW[row] = totals_RW[self._row_of[value]]
                    rows_RW[0] -= rows_RW[row]
            carry(rows_RW)
            found[name] = rows_RW
        self.know(known)
        return found
