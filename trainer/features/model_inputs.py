"""The inputs of a model for a batch: pooled cells and padded sequences by slot.

Shapes: as in trainer.models.contract.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.dataset.samples.batch import Ragged, Samples
from headrace.dataset.spec.schema import Schema
from headrace.trainer.config import TaskSection
from headrace.trainer.device_copies import sent, writable
from headrace.trainer.features.deduplication import TableLookup
from headrace.trainer.features.training_batches import TrainingBatch
from headrace.trainer.models.contract import Inputs, SequenceInput, Targets


def inputs_of(
    schema: Schema, samples: Samples, lookups: Sequence[TableLookup], leaves: Mapping[str, Tensor], device: torch.device
) -> Inputs:
    """The inputs of a model. `leaves`: the cells by table."""
    num_samples = len(samples)
    pooled = {look.table.name: _pooled(look, leaves[look.table.name], num_samples) for look in lookups}
    found = {slot.name: (look, f) for look in lookups for f, slot in enumerate(look.table.pooled)}
    places = {slot.name: found[slot.name] for slot in schema.sparse if slot.name in found}
    vectors = SlotVectors(
        {name: (pooled[look.table.name], f, int(look.table.first_order)) for name, (look, f) in places.items()}
    )
    sequences: dict[str, SequenceInput] = {}
    for look in lookups:
        sequences |= _sequences(look, leaves[look.table.name], device)
    if len(lookups) == 1 and not lookups[0].table.sequences:  # the cells of one table are stacked already
        table = lookups[0].table
        vectors_BFD: Tensor | None = pooled[table.name][:, :, int(table.first_order) :]
        columns = [pooled[table.name][:, :, 0]] if table.first_order else []
    else:
        dims = {name: look.table.width - look.table.first_order for name, (look, _) in places.items()}
        same = len({dim for dim in dims.values() if dim}) <= 1
        stacked = [vectors[name] for name, dim in dims.items() if dim]
        vectors_BFD = _stack(stacked, num_samples, device) if same else None
        first = [pooled[look.table.name][:, f, 0] for look, f in places.values() if look.table.first_order]
        columns = [torch.stack(first, 1)] if first else []
    first_order_BF = columns[0] if columns else torch.zeros((num_samples, 0), device=device)
    dense = [torch.from_numpy(writable(samples.dense[slot.name])) for slot in schema.dense]
    dense_BC = sent(torch.cat(dense, 1).numpy(), device) if dense else torch.zeros((num_samples, 0), device=device)
    return Inputs(vectors, vectors_BFD, first_order_BF, sequences, dense_BC)


def targets_of(batch: TrainingBatch, tasks: Sequence[TaskSection], device: torch.device) -> Targets:
    """Labels, weights, signs and classes of a batch, for the losses of a model's own."""

    def moved(values: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
        return {name: sent(values_B, device) for name, values_B in values.items()}

    signs = FirstSigns(batch.samples.sparse, device)
    classes = {each.name: batch.samples.meta[each.label].astype(np.int64) for each in tasks if each.loss == "softmax"}
    return Targets(moved(batch.label_B), moved(batch.weight_B), signs, moved(classes))


def class_targets(
    samples: Samples,
    tasks: Sequence[TaskSection],
    label_B: Mapping[str, NDArray[Any]],
    weight_B: Mapping[str, NDArray[Any]],
) -> Targets:
    """Targets on the CPU of samples with labels and weights; the class of a sample without a weight is 0."""

    def moved(values: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
        return {name: torch.from_numpy(values_B) for name, values_B in values.items()}

    classes = {
        task.name: np.where(weight_B[task.name] > 0, samples.meta[task.label], 0).astype(np.int64)
        for task in tasks
        if task.loss == "softmax"
    }
    return Targets(moved(label_B), moved(weight_B), FirstSigns(samples.sparse, torch.device("cpu")), moved(classes))


class FirstSigns(Mapping[str, Tensor]):
    """(B,) the bits of each sample's first sign by sparse slot, made when a model asks."""

    def __init__(self, columns: Mapping[str, Ragged], device: torch.device) -> None:
        self._columns, self._device = columns, device

    def __getitem__(self, name: str) -> Tensor:
        return sent(self._columns[name].first_B().view(np.int64), self._device)

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


class SlotVectors(Mapping[str, Tensor]):
    """(B, D) by pooled slot, cut out of the cells when a model first asks: most models take all of them stacked."""

    def __init__(self, places: Mapping[str, tuple[Tensor, int, int]]) -> None:
        """By slot: cells (B, F, W), the slot's number among them, and where its vector begins."""
        self._places = places
        self._cut: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._cut:
            cells_BFW, slot, begin = self._places[name]
            self._cut[name] = cells_BFW[:, slot, begin:]
        return self._cut[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _pooled(look: TableLookup, leaf: Tensor, num_samples: int) -> Tensor:
    """(B, F, W) cells of the pooled slots."""
    num_pooled = len(look.table.pooled)
    cells = leaf[: num_samples * num_pooled] if look.table.sequences else leaf  # a slice copies the gradient
    return cells.view(num_samples, num_pooled, look.table.width)


def _stack(vectors: Sequence[Tensor], num_samples: int, device: torch.device) -> Tensor:
    return torch.stack(list(vectors), 1) if vectors else torch.zeros((num_samples, 0, 0), device=device)


def _sequences(look: TableLookup, leaf: Tensor, device: torch.device) -> dict[str, SequenceInput]:
    """Padded sequences of a table's unpooled slots."""
    found: dict[str, SequenceInput] = {}
    begin = look.num_samples * len(look.table.pooled)
    skip = int(look.table.first_order)
    for slot in look.table.sequences:
        length_B = look.lengths[slot.name]
        max_len, count = slot.sparse.max_len or 1, int(length_B.sum())
        is_there_BL = np.arange(max_len)[None, :] < length_B[:, None]
        mask_BL = sent(is_there_BL, device)
        padded = torch.zeros((look.num_samples * max_len, look.table.width), device=device)
        place = sent(np.flatnonzero(is_there_BL), device)
        padded_BLD = padded.index_copy(0, place, leaf[begin : begin + count]).view(look.num_samples, max_len, -1)
        begin += count
        first_order_BL = padded_BLD[:, :, 0] if skip else padded_BLD.new_zeros((look.num_samples, max_len))
        found[slot.name] = SequenceInput(padded_BLD[:, :, skip:], first_order_BL, mask_BL)
    return found
