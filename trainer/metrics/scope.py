"""What is summed over one stretch of the stream: a pass, a part of the window, the job's life.

A scope holds vectors of integers by name (see `trainer.metrics.totals`) and totals of tensors. Scopes merge by
addition. `Packed` is the form in which many of them are kept: the numbers that are not 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from trainer.metrics.tensors import TensorTotal
from trainer.metrics.totals import I64, carry


@dataclass(slots=True)
class Scope:
    """Totals of one stretch."""

    totals: dict[str, I64]
    """(R, W) by name; the sizes of a name never change."""
    carried: frozenset[str]
    """Names of those with the layout of `trainer.metrics.totals`."""
    tensors: dict[str, TensorTotal] = field(default_factory=dict)

    @classmethod
    def like(cls, other: "Scope") -> "Scope":
        """Nothing yet, in the sizes of another."""
        return cls({name: np.zeros_like(rows_RW) for name, rows_RW in other.totals.items()}, other.carried)

    def clear(self) -> None:
        """Back to nothing."""
        for rows_RW in self.totals.values():
            rows_RW.fill(0)
        self.tensors.clear()

    def merge(self, other: "Scope") -> None:
        """Add another of the same sizes."""
        for name, rows_RW in other.totals.items():
            self.totals[name] += rows_RW
        self.merge_tensors(other.tensors)
        self.carry()

    def merge_tensors(self, tensors: Mapping[str, TensorTotal]) -> None:
        """Add totals of tensors."""
        for name, total in tensors.items():
            self.tensors.setdefault(name, TensorTotal()).merge(total)

    def carry(self) -> None:
        """See `trainer.metrics.totals.carry`."""
        for name in self.carried:
            carry(self.totals[name])


@dataclass(frozen=True, slots=True)
class Packed:
    """A scope without its zeros."""

    entries: Mapping[str, tuple[I64, I64]]
    """By name: where, and what."""
    tensors: Mapping[str, TensorTotal]

    @classmethod
    def of(cls, scope: Scope) -> "Packed":
        """Pack; later changes of `scope` do not show."""
        entries = {}
        for name, rows_RW in scope.totals.items():
            flat = rows_RW.reshape(-1)
            at = np.flatnonzero(flat)
            entries[name] = (at.astype(np.int64), flat[at])
        tensors = {name: TensorTotal.of_json(total.to_json()) for name, total in scope.tensors.items()}
        return cls(entries, tensors)

    def add_to(self, scope: Scope) -> None:
        """Add to a scope of the sizes it was packed from."""
        for name, (at, values) in self.entries.items():
            scope.totals[name].reshape(-1)[at] += values
        scope.merge_tensors(self.tensors)
        scope.carry()
