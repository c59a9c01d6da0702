"""The floats of rows that may get their vector later: heads of all rows, and vectors of those that have one.

A head is a row's first-order weight with its part of the optimizer's state. The rest is the row's vector, with a number
of its own. A missing vector takes no memory and reads zeros. Commits, digests and gradients see whole rows, whose last
float says whether the vector is there; vector numbers are not visible outside.

Vectors are numbered, and their array moves, within `moving`, which excludes writers of vectors. Readers use the arrays
they find, which hold every vector given out before. pserver.rows.row_settings says when a row gets its vector.

Shapes: U rows chosen, R rows of a table, V vectors, H floats of a head, X of a vector, W of a whole row, D weights.
"""

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.kernel_cache import njit
from headrace.pserver.protocol.shards import F32, U16, U64
from headrace.pserver.rows import row_format
from headrace.pserver.rows.arrays import FreeNumbers, allocate, frozen, grown
from headrace.pserver.rows.digest import add, digest_rows, join
from headrace.pserver.rows.kernels import EMPTY
from headrace.pserver.rows.row_format import HEAD
from headrace.pserver.rows.row_settings import RowSettings
from headrace.pserver.rows.slab import Columns

I32 = NDArray[np.int32]
U32 = NDArray[np.uint32]

START_VECTORS = 1 << 12
ROWS_AT_ONCE = 1024
"""Whole rows built at a time, to learn or to be hashed: they fit into the processor's cache."""
NO_FLOATS = np.empty((0, 0), np.uint32)


class SplitSlab:
    """Both RowSlab and RowFloats (pserver.rows.slab)."""

    def __init__(
        self, room: int, settings: RowSettings, table_seed: np.uint64, moving: threading.RLock, *, bounded: bool
    ) -> None:
        """With `bounded` there are never more rows, so vectors never move; spare ones take no memory."""
        assert settings.extends and settings.first_order
        self._seed, self._moving = table_seed, moving
        self._settings = settings
        self._head_H, self._vector_X = (np.flatnonzero(settings.parts_W == part) for part in (0, 1))
        self._width = len(settings.start_W)
        self.room, self.row_bytes = room, 4 * (len(self._head_H) + 1)
        self.heads_RH = allocate((room, len(self._head_H)), np.float32)
        self.vector_R = allocate((room,), np.int32)
        """Number of each row's vector, or EMPTY."""
        self.vectors_VX = allocate((room if bounded else START_VECTORS, len(self._vector_X)), np.float32)
        self._free, self._num_numbers = FreeNumbers(), 0

    @property
    def num_vectors(self) -> int:
        """Number of rows with a vector."""
        return self._num_numbers - self._free.count

    @property
    def more_bytes(self) -> int:
        return self._num_numbers * 4 * len(self._vector_X)

    def set(self, settings: RowSettings) -> None:
        self._settings = settings

    def grow(self, used: int, room: int) -> None:
        self.heads_RH = grown(self.heads_RH, used, room)
        self.vector_R = grown(self.vector_R, used, room)
        self.room = room

    # --- creation and removal of rows and vectors --------------------------------------------------------------------

    def start(self, begin: int, end: int, keys_R: U64, group_R: U16) -> None:
        self.start_at(np.arange(begin, end, dtype=np.int32), keys_R[begin:end], group_R[begin:end])

    def start_at(self, rows_U: I32, keys_U: U64, group_U: U16) -> None:
        self.heads_RH[rows_U] = self._settings.start_W[self._head_H]
        self.vector_R[rows_U] = EMPTY
        whole_U = np.flatnonzero(np.isneginf(self._settings.extend_G[group_U]))
        if len(whole_U):
            self._give(rows_U[whole_U], keys_U[whole_U], group_U[whole_U])

    def free(self, rows_U: I32) -> None:
        with self._moving:
            numbers_U = self.vector_R[rows_U]
            self._free.put(numbers_U[numbers_U != EMPTY])
            self.vector_R[rows_U] = EMPTY

    def _give(self, rows_U: I32, keys_U: U64, group_U: U16) -> None:
        """Give rows their vectors, at initial values."""
        floats_UW = np.empty((len(rows_U), self._width), np.float32)
        self._settings.initialise(floats_UW, np.array(keys_U), np.array(group_U), 0, len(rows_U), self._seed)
        with self._moving:
            numbers_U = self._numbered(len(rows_U))
            self.vectors_VX[numbers_U] = floats_UW[:, self._vector_X]
            self.vector_R[rows_U] = numbers_U

    def _numbered(self, num_vectors: int) -> I32:
        """Numbers of new vectors; within `moving`."""
        again_U = self._free.take(num_vectors)
        begin, end = self._num_numbers, self._num_numbers + num_vectors - len(again_U)
        if end > len(self.vectors_VX):
            self.vectors_VX = grown(self.vectors_VX, begin, max(end, 2 * len(self.vectors_VX)))
        self._num_numbers = end
        return np.concatenate([again_U, np.arange(begin, end, dtype=np.int32)])

    def join(self, rows_U: I32, columns: dict[str, NDArray[Any]], nonclk: np.float32, clk: np.float32) -> None:
        joining_U = np.empty(len(rows_U), np.int32)
        statistics = columns["show"], columns["click"], columns["group"]
        count = joining(self.vector_R, statistics, rows_U, self._settings.extend_G, nonclk, clk, joining_U)
        if count:
            joining_U = joining_U[:count]
            self._give(joining_U, columns["keys"][joining_U], columns["group"][joining_U])

    # --- steps -------------------------------------------------------------------------------------------------------

    def gather(self, rows_U: I32, begin: int, end: int, out_UD: F32) -> None:
        gather(self.heads_RH, self.vector_R, self.vectors_VX, rows_U, begin, end, out_UD)

    def gather_present(self, changed_R: U32, rows_U: I32, out_UD: F32) -> None:
        present_U = rows_U != EMPTY
        present_U[present_U] = changed_R[rows_U[present_U]] != 0
        there_U = frozen(rows_U[present_U])
        there_UD = np.empty((len(there_U), out_UD.shape[1]), np.float32)
        self.gather(there_U, 0, len(there_U), there_UD)
        out_UD[:] = self._settings.absent
        out_UD[present_U] = there_UD

    def learn(
        self, rows_U: I32, grads_UD: F32, group_R: U16, begin: int, end: int, passes_U: U32 | None = None
    ) -> None:
        floats_UW = np.empty((min(ROWS_AT_ONCE, end - begin), self._width), np.float32)
        places_U = frozen(np.arange(len(floats_UW), dtype=np.int32))
        for first in range(begin, end, ROWS_AT_ONCE):
            last = min(first + ROWS_AT_ONCE, end)
            self._taken(rows_U, first, last, floats_UW)
            group_U = group_R[rows_U[first:last]]
            passes = None if passes_U is None else passes_U[first:last]
            self._settings.learn(floats_UW, places_U, grads_UD[first:last], group_U, 0, last - first, passes)
            put(*self._arrays(), rows_U, first, last, floats_UW)

    def _arrays(self) -> tuple[F32, I32, F32, NDArray[np.int64], NDArray[np.int64]]:
        return self.heads_RH, self.vector_R, self.vectors_VX, self._head_H, self._vector_X

    def _taken(self, rows_U: I32, begin: int, end: int, floats_UW: F32) -> None:
        """Write whole rows rows_U[begin:end] to the first rows of `floats_UW`."""
        take(*self._arrays(), rows_U, begin, end, floats_UW)

    # --- commits and digests -----------------------------------------------------------------------------------------

    def pack(self, columns: Columns, rows_U: I32, begin: int, end: int, keys_U: U64, words_UW: U32) -> None:
        row_format.pack(NO_FLOATS, columns, rows_U, begin, end, keys_U, words_UW)
        for first in range(begin, end, ROWS_AT_ONCE):
            last = min(first + ROWS_AT_ONCE, end)
            floats_UW = np.empty((last - first, self._width), np.float32)
            self._taken(rows_U, first, last, floats_UW)
            words_UW[first:last, HEAD:] = floats_UW.view(np.uint32)

    def hold(self, words_UW: U32, rows_U: I32) -> None:
        whole_U = words_UW[:, -1] != 0
        with self._moving:
            self.vector_R[rows_U] = EMPTY
            self.vector_R[rows_U[whole_U]] = self._numbered(int(whole_U.sum()))

    def unpack(self, words_UW: U32, rows_U: I32, begin: int, end: int, columns: Columns) -> None:
        row_format.unpack(words_UW, rows_U, begin, end, NO_FLOATS, columns)
        for first in range(begin, end, ROWS_AT_ONCE):
            last = min(first + ROWS_AT_ONCE, end)
            floats_UW = np.ascontiguousarray(words_UW[first:last, HEAD:]).view(np.float32)
            put(*self._arrays(), rows_U, first, last, floats_UW)

    def digest(self, columns: Columns, rows_U: I32, multipliers: U64) -> int:
        floats_UW = np.empty((min(ROWS_AT_ONCE, len(rows_U)), self._width), np.float32)
        places_U, parts = np.arange(len(floats_UW), dtype=np.int32), list[int]()
        for first in range(0, len(rows_U), ROWS_AT_ONCE):
            last = min(first + ROWS_AT_ONCE, len(rows_U))
            self._taken(rows_U, first, last, floats_UW)
            chosen = tuple(column[rows_U[first:last]] for column in columns)
            bits_UW, places = floats_UW.view(np.uint32), places_U[: last - first]
            parts.append(join(*digest_rows(bits_UW, chosen, frozen(places), multipliers)))
        return add(parts)


@njit(nogil=True, cache=True)
def take(heads_RH, vector_R, vectors_VX, head_H, vector_X, rows_U, begin, end, floats_UW):  # type: ignore[no-untyped-def]
    """Write whole rows rows_U[begin:end] to the first of `floats_UW`: floats `head_H`, `vector_X`, and the flag."""
    last = floats_UW.shape[1] - 1
    for u in range(begin, end):
        row, out = np.uint32(rows_U[u]), u - begin
        number = vector_R[row]
        for h in range(len(head_H)):
            floats_UW[out, head_H[h]] = heads_RH[row, h]
        for x in range(len(vector_X)):
            floats_UW[out, vector_X[x]] = vectors_VX[np.uint32(number), x] if number != EMPTY else np.float32(0)
        floats_UW[out, last] = np.float32(number != EMPTY)


@njit(nogil=True, cache=True)
def put(heads_RH, vector_R, vectors_VX, head_H, vector_X, rows_U, begin, end, floats_UW):  # type: ignore[no-untyped-def]
    """The inverse of `take`, for heads and existing vectors."""
    for u in range(begin, end):
        row, source = np.uint32(rows_U[u]), u - begin
        number = vector_R[row]
        for h in range(len(head_H)):
            heads_RH[row, h] = floats_UW[source, head_H[h]]
        if number != EMPTY:
            for x in range(len(vector_X)):
                vectors_VX[np.uint32(number), x] = floats_UW[source, vector_X[x]]


@njit(nogil=True, cache=True)
def gather(heads_RH, vector_R, vectors_VX, rows_U, begin, end, out_UD):  # type: ignore[no-untyped-def]
    """Copy the weights of rows_U[begin:end]: a head's first float, then the first of its vector's, or zeros."""
    for u in range(begin, end):
        row = np.uint32(rows_U[u])
        number = vector_R[row]
        out_UD[u, 0] = heads_RH[row, 0]
        for d in range(out_UD.shape[1] - 1):
            out_UD[u, d + 1] = vectors_VX[np.uint32(number), d] if number != EMPTY else np.float32(0)


@njit(nogil=True, cache=True)
def joining(vector_R, statistics, rows_U, extend_G, nonclk, clk, joining_U):  # type: ignore[no-untyped-def]
    """Write the rows without a vector whose score is high enough for one. -> their number.

    `statistics` = (show, click, group), as of today.
    """
    show_R, click_R, group_R = statistics
    count = 0
    for u in range(len(rows_U)):
        row = np.uint32(rows_U[u])
        if vector_R[row] == EMPTY:
            score = (show_R[row] - click_R[row]) * nonclk + click_R[row] * clk
            if score >= extend_G[group_R[row]]:
                joining_U[count] = rows_U[u]
                count += 1
    return count


def take_reference(head_H: F32, vector_X: F32 | None, parts_W: NDArray[np.int8]) -> F32:
    """The twin of `take` on one row, and so of `put` and `gather`: `parts_W` is the part of each float."""
    floats_W = np.zeros(len(parts_W), np.float32)
    floats_W[parts_W == 0] = head_H
    if vector_X is not None:
        floats_W[parts_W == 1] = vector_X
    floats_W[parts_W == 2] = vector_X is not None
    return floats_W


def joining_reference(
    rows: list[int], without: list[bool], score_R: list[np.float32], extend_R: list[float]
) -> list[int]:
    """The twin of `joining`, on scores."""
    return [row for row in rows if without[row] and score_R[row] >= extend_R[row]]
