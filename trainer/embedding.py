"""From a batch's signs to the tensors a model sees, and from their gradients back to gradients of keys.

Deduplication runs ahead on the loader's thread (`Lookup.of`); pooling and the sum of gradients run in the step, by
Numba kernels on the CPU, by torch on a GPU. Rows live in pserver; which rows a step sees is the exchange's matter.

Shapes: as in trainer.lookup. The cells of a table are its pooled slots first, cell b * F + f, then one cell for
each sign of its sequence slots.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataset.batch import F32, Ragged, Samples
from dataset.schema import Schema, Slot
from pserver.client import Keys
from pserver.config import TableSection
from trainer import lookup
from trainer.models.contract import Inputs, SequenceInput, Shape, SlotShape

I32 = NDArray[np.int32]


@dataclass(frozen=True)
class TableSlots:
    """The slots of one table, and the width of its rows."""

    name: str
    pooled: tuple[Slot, ...]
    sequences: tuple[Slot, ...]
    width: int
    """D: first-order weight, if any, then the vector."""
    first_order: bool
    show: str | None
    """Meta slot with shows; None: 1 a sample."""
    click: str | None
    """Meta slot with clicks; None: none."""

    @property
    def slots(self) -> tuple[Slot, ...]:
        """All, in the order of cells."""
        return self.pooled + self.sequences


def tables_of(schema: Schema, tables: Mapping[str, TableSection], click: str | None) -> tuple[TableSlots, ...]:
    """The tables that slots use, in the order of the spec; `click` is the label that counts as a click."""
    found = []
    for name, table in tables.items():
        slots = [slot for slot in schema.sparse if slot.sparse.table == name]
        if slots:
            pooled = tuple(slot for slot in slots if slot.sparse.pooling != "none")
            sequences = tuple(slot for slot in slots if slot.sparse.pooling == "none")
            width = table.dim + int(table.first_order)
            found.append(
                TableSlots(name, pooled, sequences, width, table.first_order, table.show, table.click or click)
            )
    return tuple(found)


def shape_of(schema: Schema, tables: Mapping[str, TableSection], tasks: Sequence[str]) -> Shape:
    """What a model is built from."""

    def shape(slot: Slot) -> SlotShape:
        table = tables[slot.sparse.table]
        return SlotShape(slot.name, table.dim, table.first_order, slot.sparse.max_len or 1)

    return Shape(
        pooled=tuple(shape(slot) for slot in schema.sparse if slot.sparse.pooling != "none"),
        sequences=tuple(shape(slot) for slot in schema.sparse if slot.sparse.pooling == "none"),
        dense=tuple((slot.name, getattr(slot.entry, "size", 1)) for slot in schema.dense),
        tasks=tuple(tasks),
    )


@dataclass(frozen=True, slots=True)
class Lookup:
    """What one table is asked for by one batch."""

    table: TableSlots
    keys: Keys
    num_samples: int
    inverse_N: I32
    order_N: I32
    start_U1: I32
    cell_N: I32 | None
    """Cell of each occurrence; None where occurrence n is cell n and scales are 1."""
    scale_N: F32 | None
    num_cells: int
    lengths: Mapping[str, NDArray[np.int64]]
    """(B,) by sequence slot."""
    show_U: F32
    """Shows of each key: 1 an occurrence, unless the spec names a slot."""
    click_U: F32
    """Clicks of each key."""


class Deduplicator:
    """Makes lookups; keeps one hash table from batch to batch. One thread."""

    def __init__(self, table: TableSlots) -> None:
        self._table = table
        self._group_F = np.array([slot.group for slot in table.slots], np.int64)
        self._number_H = np.empty(1 << 10, np.int32)
        self._sample_N = np.empty(0, np.int32)

    def lookup(self, samples: Samples) -> Lookup:
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
            lookup.flatten_single(np.stack([c.values_N for c in columns]), self._group_F, key_N)
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
        lookup.group_occurrences(inverse_N, start_U1, order_N)
        keys = Keys(key_U, self._group_F[slot_U].astype(np.uint16))
        num_cells = num_samples * len(table.pooled) + sum(int(length_B.sum()) for length_B in lengths.values())
        click_U = self._sums(samples, table.click, sample_N, order_N, start_U1)
        show_U = self._sums(samples, table.show, sample_N, order_N, start_U1)
        if show_U is None:
            show_U = np.diff(start_U1).astype(np.float32)
        if click_U is None:
            click_U = np.zeros(len(key_U), np.float32)
        return Lookup(
            table, keys, num_samples, inverse_N, order_N, start_U1, cell_N, scale_N, num_cells, lengths, show_U, click_U
        )

    def _plain_samples(self, num_signs: int) -> I32:
        """Sample of each occurrence where every slot has one sign a sample: the same in every batch."""
        if len(self._sample_N) < num_signs:
            num_slots = len(self._table.slots)
            self._sample_N = np.repeat(np.arange(-(-num_signs // num_slots), dtype=np.int32), num_slots)
        return self._sample_N[:num_signs]

    def _sums(self, samples: Samples, slot: str | None, sample_N: I32, order_N: I32, start_U1: I32) -> F32 | None:
        """A meta slot's values, summed over each key's occurrences; an absent value counts 0."""
        if slot is None:
            return None
        out_U = np.empty(len(start_U1) - 1, np.float32)
        value_B = np.nan_to_num(samples.meta[slot].astype(np.float32), nan=0.0)
        lookup.sum_by_key(value_B, sample_N, order_N, start_U1, out_U)
        return out_U

    def _unique(self, key_N: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], I32, I32]:
        key_U, first_U = np.empty(len(key_N), np.uint64), np.empty(len(key_N), np.int32)
        inverse_N = np.empty(len(key_N), np.int32)
        while True:
            self._number_H.fill(-1)
            num_unique = lookup.unique(key_N, self._number_H, key_U, first_U, inverse_N)
            if num_unique >= 0:
                return key_U[:num_unique].copy(), first_U[:num_unique], inverse_N
            self._number_H = np.empty(2 * len(self._number_H), np.int32)

    def _flatten(self, columns: Sequence[Ragged], num_samples: int, key_N: NDArray[np.uint64]) -> tuple[I32, I32]:
        value_M = np.concatenate([c.values_N for c in columns]) if columns else np.empty(0, np.uint64)
        offset_F = np.cumsum([0] + [len(c.values_N) for c in columns])[:-1]
        offset_FB1 = np.stack([c.offset_B1 for c in columns])
        slot_N, start_B1 = np.empty(len(key_N), np.int32), np.empty(num_samples + 1, np.int64)
        lookup.flatten(value_M, offset_F, offset_FB1, self._group_F, key_N, slot_N, start_B1)
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
    """Whether every sample has exactly one sign."""
    return bool(lookup.one_each(column.offset_B1))


class Pooling(Protocol):
    """Rows to cells and back, on one device."""

    def cells(self, look: Lookup, rows_UD: F32) -> Tensor:
        """(C, D) leaf that autograd fills."""
        ...

    def gradients(self, look: Lookup, leaf: Tensor) -> tuple[F32, bool]:
        """(U, D) sums by key, and whether all are finite."""
        ...


class KernelPooling:
    """By Numba kernels, on ranges over a few threads; results do not depend on how many."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="pooling")

    def cells(self, look: Lookup, rows_UD: F32) -> Tensor:
        """See Pooling."""
        shape = (look.num_cells, look.table.width)
        if look.cell_N is None:
            leaf = torch.empty(shape)
            array_CD = leaf.numpy()
            self._ranges(shape[0], lambda a, b: lookup.expand(rows_UD, look.inverse_N, a, b, array_CD))
        else:
            leaf = torch.zeros(shape)
            array_CD = leaf.numpy()
            lookup.pool(rows_UD, look.inverse_N, look.cell_N, look.scale_N, 0, len(look.inverse_N), array_CD)
        return leaf.requires_grad_()

    def gradients(self, look: Lookup, leaf: Tensor) -> tuple[F32, bool]:
        """See Pooling."""
        num_unique = len(look.keys.keys_U)
        grads_UD = np.zeros((num_unique, look.table.width), np.float32)
        if leaf.grad is None:  # the model did not use this table
            return grads_UD, True
        grad_CD = leaf.grad.contiguous().numpy()
        if look.cell_N is None:
            finite = self._ranges(
                num_unique, lambda a, b: lookup.sum_single(grad_CD, look.order_N, look.start_U1, a, b, grads_UD)
            )
        else:
            cell_N, scale_N = look.cell_N, look.scale_N
            finite = self._ranges(
                num_unique,
                lambda a, b: lookup.sum_pooled(grad_CD, look.order_N, look.start_U1, cell_N, scale_N, a, b, grads_UD),
            )
        return grads_UD, all(finite)

    def _ranges(self, total: int, work: Callable[[int, int], bool]) -> list[bool]:
        if self._num_threads == 1 or total < 4096:
            return [work(0, total)]
        bounds = np.linspace(0, total, self._num_threads + 1).astype(np.int64)
        futures = [self._pool.submit(work, int(a), int(b)) for a, b in zip(bounds[1:-1], bounds[2:], strict=True)]
        return [work(int(bounds[0]), int(bounds[1])), *(future.result() for future in futures)]


class TorchPooling:
    """By torch operations with autograd, on any device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def cells(self, look: Lookup, rows_UD: F32) -> Tensor:
        """See Pooling. The leaf is made of occurrences' cells; its gradient is summed by `gradients`."""
        rows = torch.from_numpy(rows_UD).to(self._device)
        inverse = torch.from_numpy(look.inverse_N).to(self._device)
        expanded = rows.index_select(0, inverse)
        if look.cell_N is not None and look.scale_N is not None:
            scale = torch.from_numpy(look.scale_N).to(self._device)
            cell = torch.from_numpy(look.cell_N).to(self._device)
            cells = torch.zeros((look.num_cells, look.table.width), device=self._device)
            expanded = cells.index_add_(0, cell, expanded * scale[:, None])
        return expanded.requires_grad_()

    def gradients(self, look: Lookup, leaf: Tensor) -> tuple[F32, bool]:
        """See Pooling."""
        grads = torch.zeros((len(look.keys.keys_U), look.table.width), device=self._device)
        if leaf.grad is not None:
            by_occurrence = leaf.grad
            if look.cell_N is not None and look.scale_N is not None:
                cell = torch.from_numpy(look.cell_N).to(self._device)
                by_occurrence = leaf.grad.index_select(0, cell)
                by_occurrence = by_occurrence * torch.from_numpy(look.scale_N).to(self._device)[:, None]
            grads.index_add_(0, torch.from_numpy(look.inverse_N).to(self._device), by_occurrence)
        return grads.cpu().numpy(), bool(torch.isfinite(grads).all())


def pooling_on(device: torch.device, num_threads: int) -> Pooling:
    """The pooling for a device."""
    return KernelPooling(num_threads) if device.type == "cpu" else TorchPooling(device)


def inputs_of(
    schema: Schema, samples: Samples, lookups: Sequence[Lookup], leaves: Mapping[str, Tensor], device: torch.device
) -> Inputs:
    """The model's view of a batch; `leaves` are the cells by table."""
    num_samples = len(samples)
    by_slot: dict[str, Tensor] = {}
    first_order: dict[str, Tensor] = {}
    sequences: dict[str, SequenceInput] = {}
    for look in lookups:
        table, leaf = look.table, leaves[look.table.name]
        skip = int(table.first_order)
        num_pooled = len(table.pooled)
        pooled_BFD = leaf[: num_samples * num_pooled].view(num_samples, num_pooled, table.width)
        for f, slot in enumerate(table.pooled):
            by_slot[slot.name] = pooled_BFD[:, f, skip:]
            if skip:
                first_order[slot.name] = pooled_BFD[:, f, 0]
        sequences |= _sequences(look, leaf, device)
    pooled_slots = [slot for slot in schema.sparse if slot.name in by_slot]
    order = [slot.name for slot in pooled_slots if slot.name in first_order]
    if len(lookups) == 1 and not lookups[0].table.sequences:  # one table: its cells are the stack already
        table = lookups[0].table
        cells_BFD = leaves[table.name].view(num_samples, len(table.pooled), table.width)
        vectors_BFD: Tensor | None = cells_BFD[:, :, int(table.first_order) :]
        first_order_BF = cells_BFD[:, :, 0] if table.first_order else torch.zeros((num_samples, 0), device=device)
    else:
        same = len({int(v.shape[1]) for v in by_slot.values()}) <= 1
        vectors_BFD = _stack([by_slot[slot.name] for slot in pooled_slots], num_samples, device) if same else None
        columns = [first_order[name] for name in order]
        first_order_BF = torch.stack(columns, 1) if columns else torch.zeros((num_samples, 0), device=device)
    dense = [torch.from_numpy(samples.dense[slot.name]) for slot in schema.dense]
    dense_BC = torch.cat(dense, 1).to(device) if dense else torch.zeros((num_samples, 0), device=device)
    return Inputs(
        {slot.name: by_slot[slot.name] for slot in pooled_slots}, vectors_BFD, first_order_BF, sequences, dense_BC
    )


def _stack(vectors: Sequence[Tensor], num_samples: int, device: torch.device) -> Tensor:
    return torch.stack(list(vectors), 1) if vectors else torch.zeros((num_samples, 0, 0), device=device)


def _sequences(look: Lookup, leaf: Tensor, device: torch.device) -> dict[str, SequenceInput]:
    """Padded sequences of a table's unpooled slots."""
    found: dict[str, SequenceInput] = {}
    begin = look.num_samples * len(look.table.pooled)
    skip = int(look.table.first_order)
    for slot in look.table.sequences:
        length_B = look.lengths[slot.name]
        max_len, count = slot.sparse.max_len or 1, int(length_B.sum())
        mask_BL = torch.from_numpy(np.arange(max_len)[None, :] < length_B[:, None]).to(device)
        padded = torch.zeros((look.num_samples * max_len, look.table.width), device=device)
        place = torch.nonzero(mask_BL.flatten(), as_tuple=True)[0]
        padded_BLD = padded.index_copy(0, place, leaf[begin : begin + count]).view(look.num_samples, max_len, -1)
        begin += count
        first_order_BL = padded_BLD[:, :, 0] if skip else padded_BLD.new_zeros((look.num_samples, max_len))
        found[slot.name] = SequenceInput(padded_BLD[:, :, skip:], first_order_BL, mask_BL)
    return found
