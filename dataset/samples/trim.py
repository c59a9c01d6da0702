"""Drops signs: padding, and those beyond max_len.

Shapes: B samples, N signs.
"""

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.samples.batch import Ragged, Samples
from headrace.dataset.samples.slot_counters import SlotCounters, SlotSum
from headrace.dataset.spec.schema import Schema
from headrace.lists import offsets_of


def trim(samples: Samples, schema: Schema, counters: SlotCounters) -> Samples:
    """Drop padding signs, then cut each slot to its max_len; both are counted."""
    sparse = dict(samples.sparse)
    for slot in schema.sparse:
        entry, column = slot.sparse, sparse[slot.name]
        if entry.padding is not None:
            kept = column.values_N != np.uint64(entry.padding)
            counters.add(slot.name, SlotSum.PADDING, len(kept) - int(np.count_nonzero(kept)))
            column = keep_signs(column, kept)
        if entry.max_len is not None and len(column.values_N):
            kept = _within(column, entry.max_len, entry.keep == "tail")
            counters.add(slot.name, SlotSum.CUT, len(kept) - int(np.count_nonzero(kept)))
            column = keep_signs(column, kept)
        sparse[slot.name] = column
    return Samples(sparse, samples.dense, samples.meta, samples.event_B, samples.time_s_B)


def keep_signs(column: Ragged, kept_N: NDArray[np.bool_]) -> Ragged:
    """Only the signs with `kept_N`."""
    if kept_N.all():
        return column
    num_kept_N1 = np.zeros(len(kept_N) + 1, np.int64)
    np.cumsum(kept_N, out=num_kept_N1[1:])
    weights_N = None if column.weights_N is None else column.weights_N[kept_N]
    return Ragged(column.values_N[kept_N], num_kept_N1[column.offset_B1], weights_N)


def keep_samples(samples: Samples, kept_B: NDArray[np.bool_]) -> Samples:
    """Only the samples with `kept_B`."""
    if kept_B.all():
        return samples
    sparse = {}
    for name, column in samples.sparse.items():
        length_B = np.diff(column.offset_B1)
        kept_N = np.repeat(kept_B, length_B)
        weights_N = None if column.weights_N is None else column.weights_N[kept_N]
        offset_B1 = offsets_of(length_B[kept_B])
        sparse[name] = Ragged(column.values_N[kept_N], offset_B1, weights_N)
    return Samples(
        sparse,
        {name: column[kept_B] for name, column in samples.dense.items()},
        {name: column[kept_B] for name, column in samples.meta.items()},
        samples.event_B[kept_B],
        samples.time_s_B[kept_B],
    )


def _within(column: Ragged, max_len: int, tail: bool) -> NDArray[np.bool_]:
    """(N,) whether a sign is among the first (`tail`: last) `max_len` of its sample."""
    length_B = np.diff(column.offset_B1)
    index_N = np.arange(len(column.values_N))
    if tail:
        return np.asarray(np.repeat(column.offset_B1[1:], length_B) - index_N <= max_len)
    return np.asarray(index_N - np.repeat(column.offset_B1[:-1], length_B) < max_len)
