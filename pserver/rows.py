"""The rows of one table that are in memory: an index, a slab, and a column for each statistic.

A key has a row number from its reservation on, at its initial value. `Rows` grow and keep every row for good;
pserver.residency has those of a table whose memory is bounded. What rows learn and when they count is pserver.table's
work, which changes are not committed yet pserver.dirty's.

Threads: any number may reserve and find. `moving` keeps growth, which moves arrays, apart from writers; readers take
the array they find, which holds every row number given out before.
"""

import mmap
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.keys import GOLDEN, MASK, mix_reference, sign_of_text
from pserver import kernels
from pserver.client import F32, U16, U64
from pserver.config import TableSection
from pserver.errors import BadRequest
from pserver.optim import RowOptimizer, ftrl_start

I32 = NDArray[np.int32]
U32 = NDArray[np.uint32]

MAX_LOAD = 0.65
"""Share of the index that may be in use before it doubles."""
START_ROWS = 1 << 16
MAX_ROWS = (1 << 31) - 2
"""Row numbers are int32; a table at this bound refuses more keys."""
NO_VERSION = 0xFFFFFFFF
"""Stands for the version of the open pass while none has learnt."""
COLUMNS = {
    "keys": np.uint64,
    "show": np.float32,
    "click": np.float32,
    "delta_score": np.float32,
    "last_seen_day": np.int16,
    "changed_version": np.uint32,
    "group": np.uint16,
}
"""A row's columns beside its slab."""
MIN_MAPPED_BYTES = 1 << 20
"""Smaller arrays come from the heap."""


class Rows:
    """Arrays of R rows and the numbers of those in use."""

    max_dirty: int | None = None
    """Rows that may wait for a commit; None: as many as like."""

    def __init__(
        self, name: str, section: TableSection, optimizer: RowOptimizer, seed: int, room: int | None = None
    ) -> None:
        """`room` is how many rows there is room for at first."""
        self._name, self._init_range = name, np.float32(section.init_range)
        self._optimizer, self._first_order = optimizer, int(section.first_order)
        self.num_weights = self._first_order + section.dim
        """D: floats of a row that a model sees."""
        self._start_W = np.concatenate([np.zeros(self.num_weights, np.float32), optimizer.start_state])
        self._seed = np.uint64(
            mix_reference((mix_reference(seed & MASK) + sign_of_text(name.encode()) + GOLDEN) & MASK)
        )
        self._numbering = threading.Lock()
        self.moving = threading.Lock()
        self.still = threading.Lock()
        """Held while rows leave memory or come back."""
        self.open_version = NO_VERSION
        """Rows that changed at this version are touched by the open pass: they stay in memory."""
        self.num_numbers = 0
        room = room or START_ROWS
        self.index_I = empty_index(room)
        self.slab_RW = roomy((room, self.width), np.float32)
        self.columns: dict[str, NDArray[Any]] = {column: roomy((room,), dtype) for column, dtype in COLUMNS.items()}
        self.marks_R = roomy((room,), np.uint8)
        """What pserver.dirty notes of each row."""

    @property
    def width(self) -> int:
        """W: floats of a row in the slab."""
        return len(self._start_W)

    @property
    def row_bytes(self) -> int:
        """Memory of a row, its share of the index apart."""
        return row_bytes_of(self.width)

    @property
    def num_bytes(self) -> int:
        """Memory of rows with a number and of the index."""
        return self.num_numbers * self.row_bytes + self.index_I.nbytes

    def bits(self) -> tuple[U32, tuple[NDArray[Any], ...]]:
        """The slab and the columns as digests and row words take them: floats as their bits."""
        return bits_of(self.slab_RW, self.columns)

    def resident(self, keys_U: U64) -> I32:
        """Row number of each key that has one now, else EMPTY."""
        with self._numbering:
            return self._look_up(keys_U)

    def _look_up(self, keys_U: U64) -> I32:
        rows_U = np.empty(len(keys_U), np.int32)
        kernels.find(self.index_I, self.columns["keys"], frozen(keys_U), rows_U)
        return rows_U

    def find(self, keys_U: U64) -> I32:
        """Row number of each key, until `release`; EMPTY for a key without a row."""
        return self.resident(keys_U)

    def reserve(self, keys_U: U64, group_U: U16, *, start: bool = True) -> I32:
        """Row number of each key, until `release`; it is given one where it has none.

        A new row starts at its initial value, or, without `start`, must be written by the caller at once.
        """
        rows_U, keys_U, group_U = np.empty(len(keys_U), np.int32), frozen(keys_U), frozen(group_U)
        done = 0
        with self._numbering:
            while True:
                begin = self.num_numbers
                room = min(len(self.slab_RW), int(MAX_LOAD * len(self.index_I)))
                keys_R, group_R = self.columns["keys"], self.columns["group"]
                done, end = kernels.find_or_reserve(
                    self.index_I, keys_R, group_R, keys_U, group_U, rows_U, done, begin, room
                )
                if start:
                    self._start(begin, end)
                self.marks_R[begin:end] = 0
                self.num_numbers = end
                if done == len(keys_U):
                    return rows_U
                self._grow(end + 1)

    def release(self, rows_U: I32) -> None:
        """A batch needs the numbers no longer that `find` or `reserve` gave it, EMPTY ones among them."""

    def made_room(self) -> None:
        """Rows became clean."""

    def gather_present(self, keys_U: U64, out_UD: F32) -> I32:
        """Write the weights of keys as they are now; zeros for absent rows. -> the numbers of those that have one."""
        with self._numbering, self.moving:
            rows_U = frozen(self._look_up(keys_U))
            kernels.gather_present(self.slab_RW, self.columns["changed_version"], rows_U, out_UD)
            return rows_U

    def away(self) -> Iterator[tuple[U64, U32]]:
        """Rows of the table that are not in memory, keys and words; while `still` is held."""
        return iter(())

    def make_room(self, num_rows: int) -> None:
        """Have room for as many rows in all, at once rather than by doubling."""
        with self._numbering:
            self._grow(num_rows)

    def _start(self, begin: int, end: int) -> None:
        """Give rows begin .. end - 1 their initial values."""
        if begin == end:
            return
        self.initialise(self.slab_RW, self.columns["keys"], begin, end)
        for column in ("show", "click", "delta_score", "last_seen_day", "changed_version"):
            self.columns[column][begin:end] = 0

    def initialise(self, slab_RW: F32, keys_R: U64, begin: int, end: int) -> None:
        """Write what the rows of keys begin .. end - 1 hold before they learn."""
        first_order, num_weights = self._first_order, self.num_weights
        kernels.initialise(
            slab_RW, keys_R, begin, end, first_order, num_weights, self._start_W, self._init_range, self._seed
        )
        if self._optimizer.ftrl:
            ftrl_start(slab_RW, begin, end, first_order, num_weights, self._optimizer.settings)

    def _grow(self, num_rows: int) -> None:
        """Double what is too small for `num_rows`: the index, the slab and columns. Spare rows take no memory yet."""
        if num_rows > MAX_ROWS:
            raise BadRequest(f"table {self._name!r} holds {MAX_ROWS:,} rows on one shard; use more shards")
        if num_rows > int(MAX_LOAD * len(self.index_I)):
            index_I = empty_index(num_rows)
            kernels.rebuild_index(index_I, self.columns["keys"], self.num_numbers)
            self.index_I = index_I
        if num_rows > len(self.slab_RW):
            with self.moving:
                new_rows = min(max(num_rows, 2 * len(self.slab_RW)), MAX_ROWS)
                self.slab_RW = self._moved(self.slab_RW, new_rows)
                self.marks_R = self._moved(self.marks_R, new_rows)
                for column in COLUMNS:
                    self.columns[column] = self._moved(self.columns[column], new_rows)

    def _moved(self, array: NDArray[Any], num_rows: int) -> NDArray[Any]:
        larger = roomy((num_rows, *array.shape[1:]), array.dtype)
        larger[: self.num_numbers] = array[: self.num_numbers]
        return larger


def row_bytes_of(width: int) -> int:
    """Memory of a row of `width` floats with its columns and its mark."""
    return 4 * width + sum(np.dtype(dtype).itemsize for dtype in COLUMNS.values()) + 1


def empty_index(num_rows: int) -> I32:
    """An index with room for `num_rows`."""
    num_slots = 2
    while num_rows > int(MAX_LOAD * num_slots):
        num_slots *= 2
    index_I = roomy((num_slots,), np.int32)
    index_I.fill(kernels.EMPTY)
    return index_I


def bits_of(slab_RW: F32, columns: Any) -> tuple[U32, tuple[NDArray[Any], ...]]:
    """Floats as their bits: the slab, and the columns in the order of COLUMNS."""
    arrays = (columns[column] for column in COLUMNS)
    bits = tuple(array.view(np.uint32) if array.dtype == np.float32 else array for array in arrays)
    return slab_RW.view(np.uint32), bits


def roomy(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """An array, not initialised, whose memory is taken page by page as it is written and given back when it is freed.

    Large arrays of NumPy's own come from the C library's heap once some were freed, and leave holes in it there.
    """
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if num_bytes < MIN_MAPPED_BYTES:
        return np.empty(shape, dtype)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)  # rows are read at random: fewer, larger pages are found sooner
    return np.frombuffer(pages, dtype).reshape(shape)


def frozen(array: NDArray[Any]) -> NDArray[Any]:
    """A read-only, contiguous view: what comes off the wire is read-only, so kernels need one signature only."""
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view
