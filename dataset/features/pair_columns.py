"""The ids of a slot with `pairs`: crosses of slots that samples have already, so that any pipe may have them.

The id of a pair is the cross (dataset.features.feature_kernels) of the hashed text "one,other", which keeps pairs
apart, with the id of each. So a pair keeps its rows when others come or go.

Shapes: B samples, N ids of a slot, P pairs.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.features.cells import Cells, cross
from headrace.dataset.samples.batch import Ragged
from headrace.dataset.spec.schema import Slot
from headrace.keys import sign_of_text
from headrace.lists import offsets_of

MAX_CROSSED = 32
"""Most ids of a slot in one sample that are crossed: the first ones."""


def mark_of(pair: tuple[str, str]) -> int:
    """The first part of the ids of a pair."""
    return sign_of_text(",".join(pair).encode())


def pair_column(columns: Mapping[str, Ragged], slot: Slot) -> Ragged:
    """(B,) the ids of a slot with pairs, in their order; none of a pair of which a sample lacks a part."""
    crossed = [_crossed(columns, pair) for pair in slot.sparse.pairs]
    length_PB = np.stack([np.diff(each.offsets) for each in crossed])
    value_N = np.concatenate([each.value_N for each in crossed])
    if (length_PB == 1).all():
        num_pairs, num_samples = length_PB.shape
        value_N = np.ascontiguousarray(value_N.reshape(num_pairs, num_samples).T).reshape(-1)
        return Ragged(value_N, np.arange(num_samples + 1, dtype=np.int64) * num_pairs)
    sample_N = np.concatenate([np.repeat(np.arange(len(length_B)), length_B) for length_B in length_PB])
    return Ragged(value_N[np.argsort(sample_N, kind="stable")], offsets_of(length_PB.sum(0)))


def _crossed(columns: Mapping[str, Ragged], pair: tuple[str, str]) -> Cells:
    """(B,) the ids of one pair."""
    parts = [_first_ids(columns[name]) for name in pair]
    empty_B: NDArray[np.bool_] = np.logical_or.reduce([np.diff(part.offsets) == 0 for part in parts])
    marks = Cells(np.full(len(empty_B), mark_of(pair), np.uint64))
    return cross([marks.without(empty_B) if empty_B.any() else marks, *parts])


def _first_ids(column: Ragged) -> Cells:
    """The first MAX_CROSSED ids of each sample."""
    length_B = np.diff(column.offset_B1)
    if (length_B == 1).all():
        return Cells(column.values_N)
    if length_B.max(initial=0) <= MAX_CROSSED:
        return Cells(column.values_N, column.offset_B1)
    place_N = np.arange(len(column.values_N)) - np.repeat(column.offset_B1[:-1], length_B)
    return Cells(column.values_N[place_N < MAX_CROSSED], offsets_of(np.minimum(length_B, MAX_CROSSED)))
