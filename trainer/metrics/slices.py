"""Metrics for each value of a slot with few values.

Which values are measured apart is decided at a close, over all ranks: the most frequent ones of the pass (ties: lower
id), until `max_values` are known; then that stays. All others are "other". Until the close a rank keeps candidates
apart: at most `max_candidates` of them, those whose ids have the lowest hashes. What one rank drops by that rule the
ranks together would have dropped too, so the outcome is the same for any number of ranks and any order, and a value
that is chosen has been measured from its first sample of the pass on.

Shapes: B samples, U distinct ids, R rows (0 is "other"), W length of a vector.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.keys import MASK, keys_of, mix_reference
from trainer.metrics.observed import F32, U64, ids_of
from trainer.metrics.totals import HEADER, I64, add_samples, carry, empty

NUM_BUCKETS = 4096
WIDTH = HEADER + 2 * NUM_BUCKETS


def max_candidates(max_values: int) -> int:
    """Candidates of a rank and slot: 64 KiB each for each task."""
    return min(4 * max_values, max_values + 128)


def hash_of(ids_U: U64) -> U64:
    """An order among ids that has nothing to do with their meaning."""
    hash_U = np.empty_like(ids_U)
    keys_of(ids_U, -1, hash_U)
    return hash_U


@dataclass(frozen=True, slots=True)
class Candidates:
    """What ranks tell the chief at a close: values not known yet, with their numbers of samples."""

    count: Mapping[int, int]
    text: Mapping[int, str]


def choose(known: Sequence[int], heard: Sequence[Candidates], max_values: int) -> list[int]:
    """Ids to measure apart from now on: the known ones in their order, then new ones."""
    count: dict[int, int] = {}
    for candidates in heard:
        for value, samples in candidates.count.items():
            count[value] = count.get(value, 0) + samples
    lowest = sorted(set(count) - set(known), key=mix_reference)[: max_candidates(max_values)]
    chosen = sorted(lowest, key=lambda value: (-count[value], value))
    return [*known, *chosen[: max_values - len(known)]]


class SliceRows:
    """One slot's rows on one rank during a pass."""

    def __init__(self, tasks: Sequence[tuple[str, bool]], max_values: int) -> None:
        """`tasks`: name, and whether its predictions are probabilities."""
        self._tasks, self._max_values = tuple(tasks), max_values
        self.known: list[int] = []
        """Row r + 1 of what `take` gives is of id `known[r]`."""
        self._reset()

    def _reset(self) -> None:
        self._row_of = {value: row for row, value in enumerate(self.known, 1)}
        self._count: dict[int, int] = {}
        self._text: dict[int, str] = {}
        self._totals = {name: empty(len(self.known) + 1, NUM_BUCKETS) for name, _ in self._tasks}
        self._free: list[int] = []
        self._num_rows = len(self.known) + 1
        self._highest = (0, 0)
        """Highest hash among the candidates, and whose it is."""

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
        # Once full, only ids with a lower hash than the highest kept one can still come in.
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
        """Begin anew with these values measured apart."""
        self.known = list(known)
        self._reset()

    def candidates(self) -> Candidates:
        """What the chief is told at a close."""
        return Candidates(dict(self._count), dict(self._text))

    def take(self, known: Sequence[int]) -> dict[str, I64]:
        """Totals of the pass by task, (max_values + 1, W) each, for the values now known; and forget them."""
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
