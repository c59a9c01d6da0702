"""Totals of one stretch of the stream: a pass, a part of the window, or the life of the job.

A scope holds vectors of integers by name (see `trainer.metrics.totals`) and totals of tensors. Scopes are merged by
addition. `PackedScope` is the compact form for storage: only the numbers that are not 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from headrace.trainer.metrics.tensor_totals import TensorTotal
from headrace.trainer.metrics.totals import I64, carry


@dataclass(slots=True)
class Scope:
    """Totals of one stretch."""

    totals: dict[str, I64]
    """(R, W) by name. The size of an entry never changes."""
    carried: frozenset[str]
    """Names of the entries with the layout of `trainer.metrics.totals`."""
    tensors: dict[str, TensorTotal] = field(default_factory=dict)

    @classmethod
    def like(cls, other: "Scope") -> "Scope":
        """An empty scope with the sizes of another."""
        return cls({name: np.zeros_like(rows_RW) for name, rows_RW in other.totals.items()}, other.carried)

    def sizes(self) -> dict[str, list[int]]:
        """Shapes of the entries by name, as JSON."""
        return {name: list(rows_RW.shape) for name, rows_RW in self.totals.items()}

    def clear(self) -> None:
        """Set everything to 0."""
        for rows_RW in self.totals.values():
            rows_RW.fill(0)
        self.tensors.clear()

    def merge(self, other: "Scope") -> None:
        """Add another scope of the same sizes."""
        for name, rows_RW in other.totals.items():
            self.totals[name] += rows_RW
        self.merge_tensors(other.tensors)
        self.carry()

    def merge_tensors(self, tensors: Mapping[str, TensorTotal]) -> None:
        """Add totals of tensors."""
        for name, total in tensors.items():
            self.tensors.setdefault(name, TensorTotal()).merge(total)

    def carry(self) -> None:
        """Carry what exceeds a digit of the totals."""
        for name in self.carried:
            carry(self.totals[name])


@dataclass(frozen=True, slots=True)
class PackedScope:
    """A scope without its zeros."""

    entries: Mapping[str, tuple[I64, I64]]
    """By name: positions and values."""
    tensors: Mapping[str, TensorTotal]

    @classmethod
    def of(cls, scope: Scope) -> "PackedScope":
        """Pack a copy of `scope`."""
        entries = {}
        for name, rows_RW in scope.totals.items():
            flat = rows_RW.reshape(-1)
            at = np.flatnonzero(flat)
            entries[name] = (at.astype(np.int64), flat[at])
        tensors = {name: TensorTotal.of_json(total.to_json()) for name, total in scope.tensors.items()}
        return cls(entries, tensors)

    def add_to(self, scope: Scope) -> None:
        """Add to a scope of the same sizes as the packed one."""
        for name, (at, values) in self.entries.items():
            scope.totals[name].reshape(-1)[at] += values
        scope.merge_tensors(self.tensors)
        scope.carry()
