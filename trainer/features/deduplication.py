"""From the feature ids of a batch to lookups in tables: unique keys, and the cell of each occurrence.

This runs ahead of the step, on the loader's thread. Rows live in pserver; trainer.features.pooling turns rows into
cells.

Shapes: as in trainer.features.lookup_kernels. The cells of a table are those of its pooled slots, cell b * F + f,
followed by one cell for each id of its sequence slots.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.samples.batch import F32, Ragged, Samples
from headrace.dataset.spec.schema import Schema, Slot
from headrace.pserver.config import TableSection
from headrace.pserver.protocol.shards import Keys
from headrace.trainer.features import lookup_kernels

I32 = NDArray[np.int32]


@dataclass(frozen=True)
class EmbeddingTable:
    """The slots that read one table, and the width of its rows."""

    name: str
    pooled: tuple[Slot, ...]
    sequences: tuple[Slot, ...]
    width: int
    """D: the first-order weight, if the table has one, then the vector."""
    first_order: bool
    show: str | None
    """Meta slot with shows; None: 1 for each occurrence."""
    click: str | None
    """Meta slot with clicks; None: none."""

    @property
    def slots(self) -> tuple[Slot, ...]:
        """All slots, in the order of cells."""
        return self.pooled + self.sequences


def tables_of(schema: Schema, tables: Mapping[str, TableSection], click: str | None) -> tuple[EmbeddingTable, ...]:
    """The tables that slots use, in the order of the spec. `click`: the label that counts as a click by default."""
    found = []
    for name, table in tables.items():
        slots = [slot for slot in schema.sparse if slot.sparse.table == name]
        if slots:
            pooled = tuple(slot for slot in slots if slot.sparse.pooling != "none")
            sequences = tuple(slot for slot in slots if slot.sparse.pooling == "none")
            width = table.num_weights
            found.append(
                EmbeddingTable(name, pooled, sequences, width, table.first_order, table.show, table.click or click)
            )
    return tuple(found)


@dataclass(frozen=True, slots=True)
class TableLookup:
    """The lookup of one batch in one table."""

    table: EmbeddingTable
    keys: Keys
    num_samples: int
    inverse_N: I32
    """Number of the key of each occurrence."""
    order_N: I32
    """Occurrences by key, ascending."""
    start_U1: I32
    """`order_N[start_U1[u] : start_U1[u + 1]]` are those of key u."""
    cell_N: I32 | None
    """Cell of each occurrence; None where occurrence n has cell n and all scales are 1."""
    scale_N: F32 | None
    num_cells: int
    lengths: Mapping[str, NDArray[np.int64]]
    """(B,) by sequence slot."""
    show_U: F32
    """Shows of each key: its number of occurrences, unless the spec names a slot."""
    click_U: F32
    """Clicks of each key."""
    is_part: bool = False
    """Whether this is a micro-batch: it has the keys of the whole step, and no `order_N` and `start_U1`."""


class Deduplicator:
    """Makes lookups. It reuses one hash table for all batches, so only one thread may use it."""

    def __init__(self, table: EmbeddingTable) -> None:
        self._table = table
        self._group_F = np.array([slot.group for slot in table.slots], np.int64)
        self._number_H = np.empty(1 << 10, np.int32)
        self._sample_N = np.empty(0, np.int32)

    def lookup(self, samples: Samples) -> TableLookup:
        """The lookup of a batch."""
        table, num_samples = self._table, len(samples)
        columns = [samples.sparse[slot.name] for slot in table.slots]
        num_slots = len(columns)
        num_signs = sum(len(column.values_N) for column in columns)
        key_N = np.empty(num_signs, np.uint64)
        plain = not table.sequences and all(
            len(c.values_N) == num_samples and c.weights_N is None and _one_each(c) for c in columns
        )
        cell_N = scale_N = None
        lengths: dict[str, NDArray[np.int64]] = {}
        if plain:
            lookup_kernels.flatten_single(np.stack([c.values_N for c in columns]), self._group_F, key_N)
            sample_N = self._plain_samples(num_signs)
            key_U, first_U, inverse_N = self._unique(key_N)
            slot_U = first_U % np.int32(num_slots)
        else:
            slot_N, sample_N = self._flatten(columns, num_samples, key_N)
            key_U, first_U, inverse_N = self._unique(key_N)
            slot_U = slot_N[first_U]
            cell_N, scale_N = self._cells(columns, num_samples, slot_N, sample_N)
            lengths = {slot.name: np.diff(samples.sparse[slot.name].offset_B1) for slot in table.sequences}
        order_N, start_U1 = np.empty(num_signs, np.int32), np.empty(len(key_U) + 1, np.int32)
        lookup_kernels.group_occurrences(inverse_N, start_U1, order_N)
        keys = Keys(key_U, self._group_F[slot_U].astype(np.uint16))
        num_cells = num_samples * len(table.pooled) + sum(int(length_B.sum()) for length_B in lengths.values())
        click_U = self._sums(samples, table.click, sample_N, inverse_N, len(key_U))
        show_U = self._sums(samples, table.show, sample_N, inverse_N, len(key_U))
        if show_U is None:
            show_U = np.diff(start_U1).astype(np.float32)
        if click_U is None:
            click_U = np.zeros(len(key_U), np.float32)
        return TableLookup(
            table, keys, num_samples, inverse_N, order_N, start_U1, cell_N, scale_N, num_cells, lengths, show_U, click_U
        )

    def _plain_samples(self, num_signs: int) -> I32:
        """Sample of each occurrence where every slot has one id in each sample; the same in every batch."""
        if len(self._sample_N) < num_signs:
            num_slots = len(self._table.slots)
            self._sample_N = np.repeat(np.arange(-(-num_signs // num_slots), dtype=np.int32), num_slots)
        return self._sample_N[:num_signs]

    def _sums(self, samples: Samples, slot: str | None, sample_N: I32, inverse_N: I32, num_unique: int) -> F32 | None:
        """The values of a meta slot, summed over the occurrences of each key; a missing value counts as 0."""
        if slot is None:
            return None
        out_U = np.empty(num_unique, np.float32)
        value_B = np.nan_to_num(samples.meta[slot].astype(np.float32), nan=0.0)
        lookup_kernels.sum_by_key(value_B, sample_N, inverse_N, out_U)
        return out_U

    def _unique(self, key_N: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], I32, I32]:
        key_U, first_U = np.empty(len(key_N), np.uint64), np.empty(len(key_N), np.int32)
        inverse_N = np.empty(len(key_N), np.int32)
        while True:
            self._number_H.fill(-1)
            num_unique = lookup_kernels.unique(key_N, self._number_H, key_U, first_U, inverse_N)
            if num_unique >= 0:
                return key_U[:num_unique].copy(), first_U[:num_unique], inverse_N
            self._number_H = np.empty(2 * len(self._number_H), np.int32)

    def _flatten(self, columns: Sequence[Ragged], num_samples: int, key_N: NDArray[np.uint64]) -> tuple[I32, I32]:
        value_M = np.concatenate([c.values_N for c in columns]) if columns else np.empty(0, np.uint64)
        offset_F = np.cumsum([0] + [len(c.values_N) for c in columns])[:-1]
        offset_FB1 = np.stack([c.offset_B1 for c in columns])
        slot_N, start_B1 = np.empty(len(key_N), np.int32), np.empty(num_samples + 1, np.int64)
        lookup_kernels.flatten(value_M, offset_F, offset_FB1, self._group_F, key_N, slot_N, start_B1)
        sample_N = np.repeat(np.arange(num_samples, dtype=np.int32), np.diff(start_B1))
        return slot_N, sample_N

    def _cells(self, columns: Sequence[Ragged], num_samples: int, slot_N: I32, sample_N: I32) -> tuple[I32, F32]:
        """Cell and scale of each occurrence."""
        num_pooled = len(self._table.pooled)
        cell_N = sample_N * np.int32(num_pooled) + slot_N
        scale_N = np.ones(len(slot_N), np.float32)
        next_cell = num_samples * num_pooled
        for number, (slot, column) in enumerate(zip(self._table.slots, columns, strict=True)):
            mine_M = np.flatnonzero(slot_N == number)
            if column.weights_N is not None:
                scale_N[mine_M] = column.weights_N
            if number >= num_pooled:
                cell_N[mine_M] = np.arange(next_cell, next_cell + len(mine_M), dtype=np.int32)
                next_cell += len(mine_M)
            elif slot.sparse.pooling != "sum":
                length_B = np.maximum(np.diff(column.offset_B1), 1).astype(np.float32)
                divisor_B = length_B if slot.sparse.pooling == "mean" else np.sqrt(length_B)
                scale_N[mine_M] /= divisor_B[sample_N[mine_M]]
        return cell_N, scale_N


def _one_each(column: Ragged) -> bool:
    """Whether every sample has exactly one id."""
    return bool(lookup_kernels.one_each(column.offset_B1))
