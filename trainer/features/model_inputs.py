"""The inputs of a model for a batch: pooled cells and padded sequences by slot.

Shapes: as in trainer.models.contract.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataset.samples.batch import Samples
from dataset.spec.schema import Schema
from trainer.features.deduplication import TableLookup
from trainer.models.contract import Inputs, SequenceInput


def inputs_of(
    schema: Schema, samples: Samples, lookups: Sequence[TableLookup], leaves: Mapping[str, Tensor], device: torch.device
) -> Inputs:
    """The inputs of a model. `leaves`: the cells by table."""
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
    if len(lookups) == 1 and not lookups[0].table.sequences:  # the cells of one table are stacked already
        table = lookups[0].table
        cells_BFD = leaves[table.name].view(num_samples, len(table.pooled), table.width)
        vectors_BFD: Tensor | None = cells_BFD[:, :, int(table.first_order) :]
        first_order_BF = cells_BFD[:, :, 0] if table.first_order else torch.zeros((num_samples, 0), device=device)
    else:
        same = len({int(v.shape[1]) for v in by_slot.values()}) <= 1
        vectors_BFD = _stack([by_slot[slot.name] for slot in pooled_slots], num_samples, device) if same else None
        columns = [first_order[name] for name in order]
        first_order_BF = torch.stack(columns, 1) if columns else torch.zeros((num_samples, 0), device=device)
    dense = [torch.from_numpy(writable(samples.dense[slot.name])) for slot in schema.dense]
    dense_BC = torch.cat(dense, 1).to(device) if dense else torch.zeros((num_samples, 0), device=device)
    return Inputs(
        {slot.name: by_slot[slot.name] for slot in pooled_slots}, vectors_BFD, first_order_BF, sequences, dense_BC
    )


def writable(values: NDArray[Any]) -> NDArray[Any]:
    """`values`, or a copy if they are read-only, as in a batch from Arrow; torch warns about read-only arrays."""
    return values if values.flags.writeable else values.copy()


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
        mask_BL = torch.from_numpy(np.arange(max_len)[None, :] < length_B[:, None]).to(device)
        padded = torch.zeros((look.num_samples * max_len, look.table.width), device=device)
        place = torch.nonzero(mask_BL.flatten(), as_tuple=True)[0]
        padded_BLD = padded.index_copy(0, place, leaf[begin : begin + count]).view(look.num_samples, max_len, -1)
        begin += count
        first_order_BL = padded_BLD[:, :, 0] if skip else padded_BLD.new_zeros((look.num_samples, max_len))
        found[slot.name] = SequenceInput(padded_BLD[:, :, skip:], first_order_BL, mask_BL)
    return found
