"""The micro-batches of a step: with `dense.accumulate`, a step learns from several batches, one after another.

To shards, ranks and metrics the step is one batch: its keys are unique over all micro-batches, its rows are pulled
once, its gradients are pushed once. Only the model sees the micro-batches, so it needs memory for one at a time.

Shapes: as in trainer.features.lookup_kernels.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from headrace.dataset.samples.batch import I64
from headrace.trainer.features.deduplication import I32, TableLookup
from headrace.trainer.features.training_batches import TrainingBatch

NO_ORDER = np.empty(0, np.int32)


def micro_batches(batch: TrainingBatch) -> Iterator[TrainingBatch]:
    """The micro-batches of a step, in order; the batch itself where it is one. Their lookups are parts: TableLookup."""
    if len(batch.ends) == 1:
        yield batch
        return
    starts = [_first_occurrences(batch, look) for look in batch.lookups]
    begin = 0
    for end in batch.ends:
        lookups = zip(batch.lookups, starts, strict=True)
        yield TrainingBatch(
            batch.samples.slice(begin, end),
            tuple(lookup_part(look, start_B1, begin, end) for look, start_B1 in lookups),
            batch.prepared,
            {name: label_B[begin:end] for name, label_B in batch.label_B.items()},
            {name: weight_B[begin:end] for name, weight_B in batch.weight_B.items()},
            (end - begin,),
        )
        begin = end


def lookup_part(look: TableLookup, start_B1: I64, begin: int, end: int) -> TableLookup:
    """The lookup of samples `begin` to `end`, whose occurrences are numbered from `start_B1`: it has all keys."""
    first, last = int(start_B1[begin]), int(start_B1[end])
    lengths = {name: length_B[begin:end] for name, length_B in look.lengths.items()}
    num_cells = (end - begin) * len(look.table.pooled) + sum(int(length_B.sum()) for length_B in lengths.values())
    return replace(
        look,
        num_samples=end - begin,
        inverse_N=look.inverse_N[first:last],
        order_N=NO_ORDER,
        start_U1=NO_ORDER,
        cell_N=None if look.cell_N is None else _cells(look, look.cell_N[first:last], begin, end),
        scale_N=None if look.scale_N is None else look.scale_N[first:last],
        num_cells=num_cells,
        lengths=lengths,
        is_part=True,
    )


def _first_occurrences(batch: TrainingBatch, look: TableLookup) -> I64:
    """(B + 1) the number of the first occurrence of each sample."""
    offsets = [batch.samples.sparse[slot.name].offset_B1 for slot in look.table.slots]
    start_B1: I64 = np.sum(offsets, axis=0, dtype=np.int64)
    return start_B1


def _cells(look: TableLookup, cell_N: I32, begin: int, end: int) -> I32:
    """The cells of some occurrences, numbered within samples `begin` to `end`."""
    num_pooled = len(look.table.pooled)
    found_N = cell_N - np.int32(begin * num_pooled)
    at, part_at = look.num_samples * num_pooled, (end - begin) * num_pooled
    for slot in look.table.sequences:
        length_B = look.lengths[slot.name]
        mine_N = (cell_N >= at) & (cell_N < at + int(length_B.sum()))
        found_N[mine_N] = cell_N[mine_N] - np.int32(at + int(length_B[:begin].sum()) - part_at)
        at, part_at = at + int(length_B.sum()), part_at + int(length_B[begin:end].sum())
    return found_N
