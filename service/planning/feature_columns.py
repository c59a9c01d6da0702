"""Columns of ids of a sample of a stream: of its slots, and of features that might be added to them.

Numbers become ids of ranges with equally many samples. What earlier events tell (counters, histories) is made as the
job makes it: a sample sees no other one of its own event.

Shapes: B samples, N ids with repeats, E events, Q questions, W windows, K floats of a slot.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.features.cells import Cells, cross
from headrace.dataset.samples.batch import Ragged
from headrace.lists import offsets_of
from headrace.pserver.rows.counter_kernels import NO_TIME, count, words_of

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

NUM_RANGES = 20
MAX_FLOATS = 64
"""Floats of a dense slot that are looked at: the first ones."""
PRIOR_SHOWS = 20.0
"""Shows that the share of clicks of a new key counts as."""


@dataclass(frozen=True, slots=True)
class IdColumn:
    """Ids from 0 of each sample, of one slot."""

    start_B1: I64
    id_N: I64
    num_ids: int
    num_rows: int
    """Rows of a table that the slot needs for these samples."""
    is_mean: bool = False
    """Whether the ids of a sample share one weight of 1."""

    @property
    def is_single(self) -> bool:
        """Whether no sample has more than one id."""
        return len(self.id_N) == 0 or int(np.diff(self.start_B1).max()) <= 1

    @property
    def mean_len(self) -> float:
        """Ids a sample."""
        return len(self.id_N) / max(1, len(self.start_B1) - 1)

    def share_N(self) -> F64:
        """(N,) the share of each id in its sample's sum."""
        if not self.is_mean:
            return np.ones(len(self.id_N))
        length_B = np.diff(self.start_B1)
        return np.repeat(1.0 / np.maximum(1, length_B), length_B)

    def first_B(self) -> I64:
        """(B,) the first id of each sample; -1 where it has none."""
        ids = np.append(self.id_N, -1)
        return np.where(np.diff(self.start_B1) > 0, ids[np.minimum(self.start_B1[:-1], len(self.id_N))], -1)


def of_signs(signs: Ragged, *, is_mean: bool = False) -> IdColumn:
    """The ids of a sparse slot; weights of signs are left out."""
    different_U, id_N = np.unique(signs.values_N, return_inverse=True)
    return IdColumn(signs.offset_B1, id_N.astype(np.int64), len(different_U), len(different_U), is_mean)


def of_numbers(value_BK: NDArray[Any]) -> IdColumn:
    """The ids of ranges: one of each float."""
    value_BK = value_BK.reshape(len(value_BK), -1)[:, :MAX_FLOATS]
    id_BK: I64 = np.empty(value_BK.shape, np.int64)
    num_ids = 0
    for k, value_B in enumerate(value_BK.T):
        finite_N = value_B[np.isfinite(value_B)]
        shares = np.arange(1, NUM_RANGES) / NUM_RANGES
        bounds = np.unique(np.quantile(finite_N, shares, method="lower")) if len(finite_N) else finite_N
        id_BK[:, k] = num_ids + np.searchsorted(bounds, np.nan_to_num(value_B), side="right")
        num_ids += len(bounds) + 1
    starts = np.arange(len(value_BK) + 1, dtype=np.int64) * id_BK.shape[1]
    return IdColumn(starts, id_BK.reshape(-1), num_ids, 0)


def of_cross(first: IdColumn, second: IdColumn) -> IdColumn:
    """The ids of both together."""
    cells = [Cells(each.id_N.astype(np.uint64), each.start_B1) for each in (first, second)]
    crossed = cross(cells)
    different_U, id_N = np.unique(crossed.value_N, return_inverse=True)
    return IdColumn(crossed.offsets, id_N.astype(np.int64), len(different_U), len(different_U))


def of_history(key: IdColumn, of: IdColumn, when_B: NDArray[np.bool_], end_E: I64, last: int) -> IdColumn:
    """The last ids of `of` among the samples of earlier events with the same first id of `key`, as far as `when_B`."""
    known: defaultdict[int, deque[int]] = defaultdict(lambda: deque(maxlen=last))
    key_B, start_B1, id_N = key.first_B().tolist(), of.start_B1.tolist(), of.id_N.tolist()
    is_kept_B, found_B, begin = when_B.tolist(), list[Sequence[int]](), 0
    for end in end_E.tolist():
        found_B += [tuple(known[each]) if each in known else () for each in key_B[begin:end]]
        for b in range(begin, end):
            if is_kept_B[b] and key_B[b] >= 0:
                known[key_B[b]].extend(id_N[start_B1[b] : start_B1[b + 1]])
        begin = end
    values = np.fromiter(chain.from_iterable(found_B), np.int64)
    return IdColumn(
        offsets_of(np.array([len(found) for found in found_B], np.int64)), values, of.num_ids, len(known), is_mean=True
    )


def of_counters(
    keys: Sequence[IdColumn], click_B: NDArray[np.bool_], end_E: I64, time_s_B: F64, windows_s: I64
) -> IdColumn:
    """Ranges of shows and of the share of clicks in each window, of the first ids of `keys` together."""
    first_KB = np.array([each.first_B() for each in keys])
    has_B: NDArray[np.bool_] = np.all(first_KB >= 0, axis=0)
    _, number_Q = np.unique(first_KB[:, has_B], axis=1, return_inverse=True)
    event_B = np.repeat(np.arange(len(end_E)), np.diff(end_E, prepend=0))
    timed_B = np.isfinite(time_s_B) & (time_s_B >= 0) & (time_s_B < 2.0**32)
    time_B = np.where(timed_B, time_s_B, NO_TIME).astype(np.int64)
    num_keys = int(number_Q.max(initial=-1)) + 1
    words = np.zeros((num_keys, sum(words_of(int(each)) for each in windows_s)), np.int64)
    answer_QV = np.zeros((int(has_B.sum()), 2 * len(windows_s)), np.int64)
    asked = number_Q.reshape(-1).astype(np.int64), event_B[has_B], time_B[has_B]
    count(*asked, np.ones(len(answer_QV), np.int64), click_B[has_B].astype(np.int64), windows_s, words, answer_QV)
    count_BV = np.zeros((len(has_B), answer_QV.shape[1]))
    count_BV[has_B] = answer_QV
    prior = float(click_B.mean())
    shows_BW, clicks_BW = count_BV[:, 0::2], count_BV[:, 1::2]
    rate_BW = (clicks_BW + prior * PRIOR_SHOWS) / (shows_BW + PRIOR_SHOWS)
    found = of_numbers(np.concatenate([shows_BW, rate_BW], axis=1))
    return replace(found, num_rows=num_keys)
