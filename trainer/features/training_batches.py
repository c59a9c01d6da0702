"""Batches, with everything that the loader's thread can prepare ahead: lookups, row numbers, labels and weights.

Shapes: B samples of the batch.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from headrace.dataset.samples.batch import F32, I64, Samples, batch_ends
from headrace.pserver.consistency.policy import StepFigures
from headrace.pserver.protocol.shards import Keys, Prepared, Shards
from headrace.timeline import Span, span
from headrace.trainer.config import TaskSection
from headrace.trainer.features.deduplication import I32, Deduplicator, EmbeddingTable, TableLookup

NO_SLICES: Mapping[str, Keys] = MappingProxyType({})
"""The dense parameters are not on the shards."""


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """Samples that are ready for a step."""

    samples: Samples
    lookups: tuple[TableLookup, ...]
    prepared: Prepared
    label_B: Mapping[str, F32]
    """By task; 0 where the weight is 0."""
    weight_B: Mapping[str, F32]
    """By task: the sample's weight, 0 where masked."""
    ends: tuple[int, ...]
    """One past the last sample of each micro-batch."""


def prepared(
    shards: Shards, batch: TrainingBatch, *, learn: bool, slices: Mapping[str, Keys] = NO_SLICES
) -> TrainingBatch:
    """The batch with its keys announced to the shards; with `learn`, those of the dense `slices`, too."""
    keys = keys_of_batch(batch, slices if learn else NO_SLICES)
    return replace(batch, prepared=shards.prepare(keys, learn=learn))


def keys_of_batch(batch: TrainingBatch, slices: Mapping[str, Keys]) -> dict[str, Keys]:
    """The keys of a batch by table, with those of the dense `slices`."""
    return {look.table.name: look.keys for look in batch.lookups} | dict(slices)


def targets(samples: Samples, tasks: Sequence[TaskSection], weight_slot: str | None) -> tuple[dict[str, F32], ...]:
    """Labels and weights of a batch by task; with loss "softmax" the label is 1: that its class is the right one."""
    label_B, weight_B = {}, {}
    ones_B = np.ones(len(samples), np.float32)
    for task in tasks:
        weight = ones_B if weight_slot is None else samples.meta[weight_slot].astype(np.float32)
        label = ones_B if task.loss == "softmax" else samples.meta[task.label].astype(np.float32)
        if task.mask is not None:
            weight = np.where(samples.meta[task.mask] != 0, weight, np.float32(0))
            label = np.where(weight != 0, label, np.float32(0))
        label_B[task.name], weight_B[task.name] = label, weight
    return label_B, weight_B


NOT_YET: Prepared = object()
"""Placeholder in a batch whose keys are not announced to the shards yet."""


class BatchMaker:
    """Makes batches from samples. `expect` is called on the loop's thread, `make` on the loader's."""

    def __init__(
        self,
        tables: Sequence[EmbeddingTable],
        tasks: Sequence[TaskSection],
        weight_slot: str | None,
        shards: Shards,
        *,
        prepares: bool = True,
        slices: Mapping[str, Keys] = NO_SLICES,
        waits: bool = False,
        micro_batch: int | None = None,
    ) -> None:
        """`prepares`: announce the keys to the shards; if not, the loop does so (trainer.train.infer_first and
        geo_exchanges). `slices`: keys of the dense part, which batches to learn from read, too (DenseStrategy).
        `waits`: announce nothing before `begin`. `micro_batch`: samples of a micro-batch; None: a batch has one."""
        self._prepares, self._slices = prepares, slices
        self._begun = threading.Event()
        if not waits:
            self._begun.set()
        self._deduplicators = [Deduplicator(table) for table in tables]
        self._tasks, self._weight_slot, self._shards, self._micro_batch = tasks, weight_slot, shards, micro_batch
        self._learn: dict[int, bool] = {}

    def expect(self, pass_number: int, learn: bool) -> None:
        """Record whether a pass is learnt from. Must be called before its samples come."""
        self._learn = {**dict([*self._learn.items()][-2:]), pass_number: learn}

    def begin(self) -> None:
        """The shards have their rows and settings, or this trainer ends. Any thread."""
        self._begun.set()

    def make(self, pass_number: int, samples: Samples) -> TrainingBatch:
        """A batch of samples of a pass."""
        with span(Span.LOOKUP):
            lookups = tuple(each.lookup(samples) for each in self._deduplicators)
        ends = (len(samples),) if self._micro_batch is None else batch_ends(samples.event_B, self._micro_batch)
        label_B, weight_B = targets(samples, self._tasks, self._weight_slot)
        batch = TrainingBatch(samples, lookups, NOT_YET, label_B, weight_B, ends)
        if not self._prepares:
            return batch
        self._begun.wait()
        return prepared(self._shards, batch, learn=self._learn[pass_number], slices=self._slices)


def own_figures(batch: TrainingBatch | None, tasks: Sequence[TaskSection], *, average: bool) -> StepFigures:
    """The figures of this rank for a step: weights by task and, without `average`, its number of micro-batches."""
    if batch is None:
        return StepFigures([0.0] * (len(tasks) + (not average)), num_samples=0, num_batches=0)
    weights = [float(batch.weight_B[task.name].sum(dtype=np.float64)) for task in tasks]
    more = [] if average else [float(len(batch.ends))]
    return StepFigures([*weights, *more], len(batch.samples), num_batches=1)


def step_weights(figures: StepFigures, tasks: Sequence[TaskSection], *, average: bool) -> dict[str, float]:
    """By task, the number by which the sum of all losses is divided.

    With `average` it is the weight of all samples. Without, it is that of one micro-batch in the mean: the step then
    learns from the sum of as many means as each rank has micro-batches.
    """
    num_merged = 1.0 if average or not figures.num_batches else figures.weights[-1] / figures.num_batches
    return {task.name: figures.weights[i] / num_merged for i, task in enumerate(tasks)}


# The micro-batches of a step: with `dense.accumulate`, a step learns from several batches, one after another.
#
# To shards, ranks and metrics the step is one batch: its keys are unique over all micro-batches, its rows are pulled
# once, its gradients are pushed once. Only the model sees the micro-batches, so it needs memory for one at a time.
#
# Shapes: as in trainer.features.lookup_kernels.

NO_ORDER = np.empty(0, np.int32)


def micro_batches(batch: TrainingBatch) -> Iterator[TrainingBatch]:
    """The micro-batches of a step, in order; the batch itself where it is one. Their lookups are parts: TableLookup."""
    if len(batch.ends) == 1:
        yield batch
        return
    starts = [first_occurrences(batch, look) for look in batch.lookups]
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


def first_occurrences(batch: TrainingBatch, look: TableLookup) -> I64:
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
