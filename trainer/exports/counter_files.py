"""The columns of the counters of a slot in the Parquet files of an export.

    counters-<slot>-<n>.parquet    slot, sign, key: those of the counters'; window_s, begin_s, length_s, shows, clicks

A row is one sub-window: of the window of `window_s` seconds, from the unix time `begin_s` on, `length_s` long; these
three are 0 for the counts of all time. Sub-windows without shows are left out. A half-life of h seconds is one row,
with `window_s` = -h and counts as of its newest sub-window, in 1 / 256.

Shapes: U rows of a chunk, C words of a row, P places of a window, N rows of the file.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headrace.pserver.rows.counter_kernels import MAX_COUNT, PARTS, packed, unpacked, width_of, words_of

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]

COUNTED = [
    pa.field(name, pa.int64(), nullable=False) for name in ("window_s", "begin_s", "length_s", "shows", "clicks")
]


def sub_windows(rows_UD: F32, windows_s: Sequence[int]) -> tuple[I64, list[I64]]:
    """(N,) the place of each sub-window's row in `rows_UD`, ascending; and the columns COUNTED, (N,) each."""
    word_UC, place, found = unpacked(rows_UD), 0, []
    for window_s in windows_s:
        found += list(_of_window(word_UC[:, place : place + words_of(window_s)], window_s))
        place += words_of(window_s)
    row_N, *columns = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    order_N = np.argsort(row_N, kind="stable")
    return row_N[order_N], [column_N[order_N] for column_N in columns]


def _of_window(word_UC: I64, window_s: int) -> Iterator[tuple[I64, I64, I64, I64, I64, I64]]:
    """Row, window, begin, length, shows and clicks of the sub-windows that have shows, from the oldest on."""
    part_s, newest_U = abs(window_s) // PARTS, word_UC[:, 0]
    for back in range(PARTS, -1, -1) if window_s > 0 else (0,):
        number_U = newest_U - back
        place_U = np.full(len(word_UC), int(window_s < 0), np.int64)
        if window_s > 0:
            place_U = 1 + 2 * (number_U % (PARTS + 1))
        show_U, click_U = (np.take_along_axis(word_UC, (place_U + more)[:, None], 1)[:, 0] for more in (0, 1))
        row_N = np.flatnonzero(show_U)
        same_N = np.ones(len(row_N), np.int64)
        begin_N = number_U[row_N] * part_s
        yield row_N, same_N * window_s, begin_N, same_N * part_s, show_U[row_N], click_U[row_N]


def rows_of_sub_windows(number_N: I64, counts: Sequence[I64], windows_s: Sequence[int]) -> F32:
    """The inverse of `sub_windows`: (U, C) rows of their sub-windows; `number_N`: the row of each, every one there.

    Raises ValueError for a sub-window that is of no window, not where one is, or with numbers that no row holds.
    """
    window_s_N, begin_s_N, length_s_N, show_N, click_N = counts
    num_rows = int(number_N[-1]) + 1 if len(number_N) else 0
    word_UC, place, num_taken = np.zeros((num_rows, width_of(windows_s)), np.int64), 0, 0
    for window_s in windows_s:
        of_W = np.flatnonzero(window_s_N == window_s)
        part_s, row_W, back = abs(window_s) // PARTS, number_N[of_W], PARTS if window_s > 0 else 0
        place_W = np.full(len(of_W), place)
        if window_s:
            at_W = begin_s_N[of_W] // part_s
            newest_U = np.zeros(num_rows, np.int64)
            np.maximum.at(newest_U, row_W, at_W)
            if (begin_s_N[of_W] % part_s).any() or (length_s_N[of_W] != part_s).any():
                raise ValueError(f"a window of {window_s} s has sub-windows of another length")
            if (at_W < newest_U[row_W] - back).any():
                raise ValueError(f"a window of {window_s} s has sub-windows from before it")
            word_UC[:, place], place_W = newest_U, place + 1 + 2 * (at_W % (back + 1))
        word_UC[row_W, place_W], word_UC[row_W, place_W + 1] = show_N[of_W], click_N[of_W]
        place, num_taken = place + words_of(window_s), num_taken + len(of_W)
    if num_taken < len(number_N):
        raise ValueError("a sub-window is of no window that model.json names")
    if (word_UC < 0).any() or (word_UC > MAX_COUNT).any():
        raise ValueError("a sub-window has a count or a time below 0, or above what a row holds")
    return packed(word_UC)
