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
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.keys import GOLDEN, MASK, mix_reference, sign_of_text
from pserver import kernels
from pserver.client import F32, U16, U64
from pserver.errors import BadRequest
from pserver.optim import ftrl_start
from pserver.settings import RowSettings

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
STATISTICS = ("show", "click", "delta_score", "last_seen_day", "changed_version")
"""Columns that are 0 of a row that never learnt."""
MIN_MAPPED_BYTES = 1 << 20
"""Smaller arrays come from the heap."""


class Rows:
    """Arrays of R rows and the numbers of those in use."""

    max_dirty: int | None = None
    """Rows that may wait for a commit; None: as many as like."""

    def __init__(self, name: str, settings: RowSettings, seed: int, room: int | None = None) -> None:
        """`room` is how many rows there is room for at first."""
        self._name, self.settings = name, settings
        """How rows start and learn; another one may take its place between passes."""
        self.num_weights = settings.num_weights
        """D: floats of a row that a model sees."""
        self.seed = np.uint64(mix_reference((mix_reference(seed & MASK) + sign_of_text(name.encode()) + GOLDEN) & MASK))
        self._numbering = threading.Lock()
        self.moving = threading.Lock()
        self.still = threading.Lock()
        """Held while rows leave memory or come back."""
        self.open_version = NO_VERSION
        """Rows that changed at this version are touched by the open pass: they stay in memory."""
        self.num_numbers = 0
        self._free = np.empty(0, np.int32)
        self._num_free = 0
        self._held: dict[int, I32] = {}
        room = room or START_ROWS
        self.index_I = empty_index(room)
        self.slab_RW = roomy((room, self.width), np.float32)
        self.columns: dict[str, NDArray[Any]] = {column: roomy((room,), dtype) for column, dtype in COLUMNS.items()}
        self.marks_R = roomy((room,), np.uint8)
        """What pserver.dirty notes of each row."""

    @property
    def width(self) -> int:
        """W: floats of a row in the slab."""
        return len(self.settings.start_W)

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
            return self.look_up(keys_U)

    def look_up(self, keys_U: U64) -> I32:
        """As `resident`, within `removing`."""
        rows_U = np.empty(len(keys_U), np.int32)
        kernels.find(self.index_I, self.columns["keys"], frozen(keys_U), rows_U)
        return rows_U

    def find(self, keys_U: U64) -> I32:
        """Row number of each key, until `release`; EMPTY for a key without a row."""
        with self._numbering:
            return self._hold(self.look_up(keys_U))

    def reserve(self, keys_U: U64, group_U: U16, *, start: bool = True) -> I32:
        """Row number of each key, until `release`; it is given one where it has none.

        A new row starts at its initial value, or, without `start`, must be written by the caller at once.
        """
        keys_U, group_U = frozen(keys_U), frozen(group_U)
        with self._numbering:
            if self._num_free:
                rows_U = self.look_up(keys_U)
                missing_U = np.flatnonzero(rows_U == kernels.EMPTY)
                rows_U[missing_U] = self._numbered(keys_U[missing_U])
                self._start_at(rows_U[missing_U], keys_U[missing_U], group_U[missing_U])
            else:
                rows_U = self._appended(keys_U, group_U, start=start)
            return self._hold(rows_U)

    def _appended(self, keys_U: U64, group_U: U16, *, start: bool) -> I32:
        """Row numbers; new ones lie behind all others."""
        rows_U, done = np.empty(len(keys_U), np.int32), 0
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

    def _numbered(self, keys_U: U64) -> I32:
        """Numbers for keys without one, in the index: free ones, then fresh ones."""
        reused = min(len(keys_U), self._num_free)
        end = self.num_numbers + len(keys_U) - reused
        if end > min(len(self.slab_RW), int(MAX_LOAD * len(self.index_I))):
            self._grow(end)
        self._num_free -= reused
        again_U = self._free[self._num_free : self._num_free + reused]
        rows_U = np.concatenate([again_U, np.arange(self.num_numbers, end, dtype=np.int32)])
        self.num_numbers = end
        self.columns["keys"][rows_U] = keys_U
        self.marks_R[rows_U] = 0
        kernels.enter(self.index_I, self.columns["keys"], rows_U)
        return rows_U

    def _start_at(self, rows_U: I32, keys_U: U64, group_U: U16) -> None:
        """Rows, anywhere, get their initial values."""
        slab_UW = np.empty((len(keys_U), self.width), np.float32)
        self.initialise(slab_UW, np.array(keys_U), np.array(group_U), 0, len(keys_U))
        self.slab_RW[rows_U] = slab_UW
        for column in STATISTICS:
            self.columns[column][rows_U] = 0
        self.columns["group"][rows_U] = group_U

    def _hold(self, rows_U: I32) -> I32:
        """A batch has these numbers until it releases them: they mean these keys for so long."""
        if len(rows_U):
            self._held[rows_U.ctypes.data] = rows_U
        return rows_U

    def release(self, rows_U: I32) -> None:
        """A batch needs the numbers no longer that `find` or `reserve` gave it in this array, EMPTY ones among them."""
        if len(rows_U):
            with self._numbering:
                self._held.pop(rows_U.ctypes.data, None)

    def hand_over(self, found_U: I32, rows_U: I32) -> None:
        """Numbers that a batch got in `found_U` are among those that it will release in `rows_U`."""
        Rows.release(self, found_U)

    @contextmanager
    def removing(self) -> Iterator[None]:
        """Nobody finds, adds or learns meanwhile."""
        with self._numbering, self.moving:
            yield

    def remove(self, rows_U: I32) -> None:
        """Rows are no longer. Their numbers are free, but for those that a batch holds: they start anew.

        Within `removing`.
        """
        held_R = np.zeros(self.num_numbers, np.bool_)
        for held_U in self._held.values():
            held_R[held_U[held_U != kernels.EMPTY]] = True
        self._remove(rows_U, held_R[rows_U])

    def _remove(self, rows_U: I32, held_U: NDArray[np.bool_]) -> None:
        kept_U = rows_U[held_U]
        self._start_at(kept_U, self.columns["keys"][kept_U], self.columns["group"][kept_U])
        gone_U = rows_U[~held_U]
        kernels.take_out(self.index_I, self.columns["keys"], frozen(gone_U))
        self.columns["changed_version"][gone_U] = 0
        self._give_back(gone_U)

    def _give_back(self, rows_U: I32) -> None:
        """Numbers without a row."""
        end = self._num_free + len(rows_U)
        if end > len(self._free):
            larger = np.empty(max(end, 2 * len(self._free)), np.int32)
            larger[: self._num_free] = self._free[: self._num_free]
            self._free = larger
        self._free[self._num_free : end] = rows_U
        self._num_free = end

    def made_room(self) -> None:
        """Rows became clean."""

    def gather_present(self, keys_U: U64, out_UD: F32) -> I32:
        """Write the weights of keys as they are now; zeros for absent rows. -> the numbers of those that have one."""
        with self._numbering, self.moving:
            rows_U = frozen(self.look_up(keys_U))
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
        """Rows begin .. end - 1 get their initial values."""
        if begin == end:
            return
        self.initialise(self.slab_RW, self.columns["keys"], self.columns["group"], begin, end)
        for column in STATISTICS:
            self.columns[column][begin:end] = 0

    def initialise(self, slab_RW: F32, keys_R: U64, group_R: U16, begin: int, end: int) -> None:
        """Write what the rows of keys begin .. end - 1 hold before they learn."""
        own = self.settings
        first_order, num_weights = own.first_order, own.num_weights
        kernels.initialise(
            slab_RW, keys_R, group_R, begin, end, first_order, num_weights, own.start_W, own.range_G, self.seed
        )
        if own.ftrl:
            ftrl_start(slab_RW, group_R, begin, end, first_order, num_weights, own.settings_C, own.class_G)

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
