"""Cuts samples into batches of one fixed size, so that the prediction of a sample depends on its segment alone.

Kernels of matrix products may round differently for another number of rows. So an incomplete batch is padded with empty
samples, whose predictions are dropped.

Shapes: B samples of a batch before padding, P after it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headrace.dataset.samples.batch import Ragged, Samples
from headrace.dataset.spec.config import SlotKind
from headrace.dataset.spec.schema import Schema
from headrace.errors import SpecError
from headrace.pserver.protocol.shards import Keys
from headrace.seeds import derive
from headrace.trainer.features.deduplication import Deduplicator, EmbeddingTable, TableLookup
from headrace.validation import nearest


@dataclass(frozen=True, slots=True)
class FixedBatch:
    """Samples of one batch, and the keys to look up."""

    num_samples: int
    """Samples without the padding."""
    samples: Samples
    """P samples, with the padding."""
    lookups: tuple[TableLookup, ...]

    @property
    def keys(self) -> dict[str, Keys]:
        """Keys by table."""
        return {look.table.name: look.keys for look in self.lookups}


@dataclass(frozen=True, slots=True)
class Block:
    """Some samples of a segment, in order, with their batches."""

    samples: Samples
    batches: tuple[FixedBatch, ...]
    clicks: pa.Table | None = None
    """Of a job with a join: the clicks among the events, which are no samples (trainer.predict.joined_labels)."""


class FixedBatches:
    """Makes blocks; one thread."""

    def __init__(self, tables: Sequence[EmbeddingTable], batch_size: int) -> None:
        self._deduplicators = [Deduplicator(table) for table in tables]
        self._batch_size = batch_size

    def block(self, samples: Samples, seen: Samples | None = None) -> Block:
        """Cut samples into batches, also in the middle of an event, and pad the last one.

        `seen`: what the model gets of them; unset: the same.
        """
        return Block(samples, tuple(self._batches(samples if seen is None else seen)))

    def _batches(self, samples: Samples) -> Iterator[FixedBatch]:
        for begin in range(0, len(samples), self._batch_size):
            end = min(begin + self._batch_size, len(samples))
            filled = filled_up(samples.slice(begin, end), self._batch_size)
            yield FixedBatch(end - begin, filled, tuple(each.lookup(filled) for each in self._deduplicators))


def filled_up(samples: Samples, size: int) -> Samples:
    """`samples`, padded with empty ones to `size`."""
    more = size - len(samples)
    if not more:
        return samples
    return Samples(
        {name: _with_empty(column, more) for name, column in samples.sparse.items()},
        {name: np.concatenate([v, np.zeros((more, v.shape[1]), v.dtype)]) for name, v in samples.dense.items()},
        {name: np.concatenate([values, np.zeros(more, values.dtype)]) for name, values in samples.meta.items()},
        np.concatenate([samples.event_B, np.full(more, -1, np.int64)]),
        np.concatenate([samples.time_s_B, np.full(more, np.nan)]),
    )


def _with_empty(column: Ragged, more: int) -> Ragged:
    end: NDArray[np.int64] = np.full(more, column.offset_B1[-1], np.int64)
    return Ragged(column.values_N, np.concatenate([column.offset_B1, end]), column.weights_N)


def no_samples(schema: Schema) -> Samples:
    """Zero samples of a schema."""
    weights = {slot.name: np.zeros(0, np.float32) if slot.sparse.weighted else None for slot in schema.sparse}
    nothing = np.zeros(0, np.uint64)
    return Samples(
        {name: Ragged(nothing, np.zeros(1, np.int64), weight) for name, weight in weights.items()},
        {slot.name: np.zeros((0, getattr(slot.entry, "size", 1)), np.float32) for slot in schema.dense},
        {slot.name: np.zeros(0, META_TYPES[getattr(slot.entry, "type", "float")]) for slot in schema.meta},
        np.zeros(0, np.int64),
        np.zeros(0),
    )


META_TYPES: dict[str, type] = {"float": np.float32, "uint64": np.uint64, "int64": np.int64, "string": object}
"""Type of a meta slot's values, by the type in the spec."""


# Gives samples the values of other samples in some slots: what the metrics then lose is what those slots are worth.
#
# Shapes: B samples.


def shuffled_slots(schema: Schema) -> list[str]:
    """The slots that can be shuffled: those that the model gets."""
    return [slot.name for slot in schema.slots if slot.kind is not SlotKind.META]


def check_shuffled(schema: Schema, names: Sequence[str]) -> None:
    """Raise SpecError unless each name is that of a sparse or dense slot."""
    known = shuffled_slots(schema)
    for name in names:
        if name not in known:
            raise SpecError(f"{name!r} is no slot that the model gets; {nearest(name, known)}", "shuffle")


def shuffled(samples: Samples, names: Sequence[str], seed: int) -> Samples:
    """The samples, with the values of each slot of `names` among them moved to others.

    A function of its arguments alone. Each slot has a permutation of its own, so slots also lose what links them.
    """
    if not names:
        return samples
    sparse, dense = dict(samples.sparse), dict(samples.dense)
    for name in names:
        order_B = np.random.default_rng(derive(seed, "shuffle", name)).permutation(len(samples))
        if name in dense:
            dense[name] = dense[name][order_B]
        else:
            sparse[name] = sparse[name].take(order_B)
    return Samples(sparse, dense, samples.meta, samples.event_B, samples.time_s_B)
