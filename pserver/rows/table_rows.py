"""The rows of one table in memory: an index, their floats, and a column for each statistic.

Floats are in a pserver.rows.slab or, if vectors join later, a pserver.rows.split_slab. A key has a row number from its
reservation on, at its initial value. `RowArrays` grows and never evicts; pserver.rows.row_cache holds the rows of a
table with bounded memory. pserver.tables.table updates rows, pserver.rows.dirty_rows tracks uncommitted changes.

Threads: any number may reserve and find. `moving` separates growth, which may move arrays, from writers. Readers use
the array they find, which holds every row number given out before.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.pserver.errors import InvalidShardCall
from headrace.pserver.protocol.shards import F32, U16, U64
from headrace.pserver.rows import kernels
from headrace.pserver.rows.arrays import FreeNumbers, grown
from headrace.pserver.rows.arrays import allocate as allocate
from headrace.pserver.rows.arrays import frozen as frozen
from headrace.pserver.rows.initial_values import table_seed_of
from headrace.pserver.rows.row_format import HEAD
from headrace.pserver.rows.row_settings import RowSettings
from headrace.pserver.rows.slab import RowFloats, Slab, SlabMaker
from headrace.pserver.rows.split_slab import SplitSlab
from headrace.pserver.rows.stored_rows import StoredRows

I32 = NDArray[np.int32]
U32 = NDArray[np.uint32]

MAX_LOAD = 0.65
"""Load of the index at which it doubles."""
START_ROWS = 1 << 16
MAX_ROWS = (1 << 31) - 2
"""Row numbers are int32; a table at this bound refuses more keys."""
NO_VERSION = 0xFFFFFFFF
"""In place of the version of the open pass before its first step."""
COLUMNS = {
    "keys": np.uint64,
    "show": np.float32,
    "click": np.float32,
    "delta_score": np.float32,
    "last_seen_day": np.int16,
    "changed_version": np.uint32,
    "group": np.uint16,
}
"""The columns of a row, beside its floats."""
STATISTICS = ("show", "click", "delta_score", "last_seen_day", "changed_version")
"""Columns that are 0 in a row without a push."""


class RowArrays:
    """Arrays of R rows, and the numbers in use."""

    max_dirty: int | None = None
    """Most rows that may wait for a commit; None: no bound."""

    def __init__(
        self,
        name: str,
        settings: RowSettings,
        seed: int,
        room: int | None = None,
        *,
        bounded: bool = False,
        slab: SlabMaker = Slab,
    ) -> None:
        """`room` is the initial capacity in rows; with `bounded` it never grows. `slab` makes the array of floats where
        no vector joins later."""
        self._name, self.settings = name, settings
        """How rows are initialised and learn."""
        self.num_weights = settings.num_weights
        """D: floats of a row that a model reads."""
        self.seed = table_seed_of(name, seed)
        self.stored = StoredRows(HEAD + self.width, _none_is_deleted)
        """The rows that are not in memory."""
        self._numbering = threading.Lock()
        self.moving = threading.RLock()
        self.still = threading.Lock()
        """Held while rows are evicted or loaded."""
        self.open_version = NO_VERSION
        """Rows changed at this version belong to the open pass and stay in memory."""
        self.num_numbers = 0
        self._free = FreeNumbers(room if room is not None and bounded else 0)
        self._held: dict[int, I32] = {}
        room = room or START_ROWS
        self.index_I = empty_index(room)
        self.floats: RowFloats = (
            SplitSlab(room, settings, self.seed, self.moving, bounded=bounded)
            if settings.extends
            else slab(room, settings, self.seed)
        )
        """Weights and optimizer state."""
        self.columns: dict[str, NDArray[Any]] = {column: allocate((room,), dtype) for column, dtype in COLUMNS.items()}
        self.marks_R = allocate((room,), np.uint8)
        """The mark of each row: see pserver.rows.dirty_rows."""

    @property
    def width(self) -> int:
        """W: floats of a row in commits."""
        return len(self.settings.start_W)

    @property
    def row_bytes(self) -> int:
        """Memory of a row, without its share of the index and without a vector that joins later."""
        return row_bytes_of(0) + self.floats.row_bytes

    @property
    def num_bytes(self) -> int:
        """Memory of numbered rows and of the index."""
        return self.num_numbers * self.row_bytes + self.floats.more_bytes + self.index_I.nbytes

    def set(self, settings: RowSettings) -> None:
        """Between steps: use other settings from here on."""
        self.settings = settings
        self.floats.set(settings)

    def bits(self) -> tuple[NDArray[Any], ...]:
        """The columns for digests and row words: floats as their bits."""
        return column_bits_of(self.columns)

    def resident(self, keys_U: U64) -> I32:
        """Row number of each key in memory, else EMPTY."""
        with self._numbering:
            return self.look_up(keys_U)

    def look_up(self, keys_U: U64) -> I32:
        """As `resident`, within `removing`."""
        rows_U = np.empty(len(keys_U), np.int32)
        kernels.find(self.index_I, self.columns["keys"], frozen(keys_U), rows_U)
        return rows_U

    def find(self, keys_U: U64) -> I32:
        """Row number of each key, valid until `release`; EMPTY for a key without a row."""
        with self._numbering:
            return self._hold(self.look_up(keys_U))

    def find_ahead(self, keys_U: U64) -> I32:
        """As `find`; also EMPTY if other prepared batches leave no room for the rows of the present step."""
        return self.find(keys_U)

    def reserve(self, keys_U: U64, group_U: U16, *, start: bool = True) -> I32:
        """Row number of each key, valid until `release`; a key without one gets one.

        A new row starts at its initial value; without `start` the caller must write it at once.
        """
        keys_U, group_U = frozen(keys_U), frozen(group_U)
        with self._numbering:
            if self._free.count:
                rows_U = self.look_up(keys_U)
                missing_U = np.flatnonzero(rows_U == kernels.EMPTY)
                rows_U[missing_U] = self._numbered(keys_U[missing_U])
                self._start_at(rows_U[missing_U], keys_U[missing_U], group_U[missing_U])
            else:
                rows_U = self._appended(keys_U, group_U, start=start)
            return self._hold(rows_U)

    def _appended(self, keys_U: U64, group_U: U16, *, start: bool) -> I32:
        """Row numbers; new ones come after all others."""
        rows_U, done = np.empty(len(keys_U), np.int32), 0
        while True:
            begin = self.num_numbers
            room = min(self.floats.room, int(MAX_LOAD * len(self.index_I)))
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
        """Numbers for keys without one, entered in the index: freed numbers first, then new ones."""
        end = self.num_numbers + max(0, len(keys_U) - self._free.count)
        if end > min(self.floats.room, int(MAX_LOAD * len(self.index_I))):
            self._grow(end)
        again_U = self._free.take(len(keys_U))
        rows_U = np.concatenate([again_U, np.arange(self.num_numbers, end, dtype=np.int32)])
        self.num_numbers = end
        self.columns["keys"][rows_U] = keys_U
        self.marks_R[rows_U] = 0
        kernels.enter(self.index_I, self.columns["keys"], rows_U)
        return rows_U

    def _start_at(self, rows_U: I32, keys_U: U64, group_U: U16) -> None:
        """Initialise rows, anywhere."""
        self.floats.start_at(rows_U, keys_U, group_U)
        for column in STATISTICS:
            self.columns[column][rows_U] = 0
        self.columns["group"][rows_U] = group_U

    def _hold(self, rows_U: I32) -> I32:
        """Hold numbers for a batch: they belong to these keys until released."""
        if len(rows_U):
            self._held[rows_U.ctypes.data] = rows_U
        return rows_U

    def release(self, rows_U: I32) -> None:
        """Release the numbers that a batch got in this array from `find` or `reserve`, EMPTY ones included."""
        if len(rows_U):
            with self._numbering:
                self._held.pop(rows_U.ctypes.data, None)

    def hand_over(self, found_U: I32, rows_U: I32) -> None:
        """Note that a batch will release the numbers of `found_U` as part of `rows_U`."""
        RowArrays.release(self, found_U)

    @contextmanager
    def removing(self) -> Iterator[None]:
        """Exclude finding, adding and learning meanwhile."""
        with self._numbering, self.moving:
            yield

    def remove(self, rows_U: I32) -> None:
        """Remove rows. Their numbers are free; a number that a batch holds starts anew.

        Within `removing`.
        """
        if not len(rows_U):
            return
        begin, end = int(rows_U.min()), int(rows_U.max()) + 1
        held_R = np.zeros(end - begin, np.bool_)  # of the range in between, which is short in a sweep
        for held_U in self._held.values():
            held_R[held_U[(begin <= held_U) & (held_U < end)] - begin] = True
        self._remove(rows_U, held_R[rows_U - begin])

    def _remove(self, rows_U: I32, held_U: NDArray[np.bool_]) -> None:
        self.floats.free(rows_U)
        kept_U = rows_U[held_U]
        self._start_at(kept_U, self.columns["keys"][kept_U], self.columns["group"][kept_U])
        gone_U = rows_U[~held_U]
        kernels.take_out(self.index_I, self.columns["keys"], frozen(gone_U))
        self.columns["changed_version"][gone_U] = 0
        self._free.put(gone_U)

    def made_room(self) -> None:
        """Note that rows became clean."""

    def gather_present(self, keys_U: U64, out_UD: F32, purge: Callable[[I32], None]) -> None:
        """Write the present weights of keys; zeros for absent rows.

        First `purge` is called with row numbers, within `removing`: it removes rows that a shrink deleted.
        """
        with self.removing():
            purge(self.look_up(keys_U))
            rows_U = frozen(self.look_up(keys_U))
            self.floats.gather_present(self.columns["changed_version"], rows_U, out_UD)

    def away(self) -> Iterator[tuple[U64, U32]]:
        """Keys and words of the rows that are not in memory; while `still` is held."""
        for keys_U, words_UW in self.stored.scan() if self.stored.num_away else ():
            away_U = self.resident(keys_U) == kernels.EMPTY
            away_U &= ~self.stored.is_deleted(keys_U, words_UW, found_out=False)
            yield keys_U[away_U], words_UW[away_U]

    def make_room(self, num_rows: int) -> None:
        """Grow to `num_rows` rows in all, at once rather than by doubling."""
        with self._numbering:
            self._grow(num_rows)

    def _start(self, begin: int, end: int) -> None:
        """Initialise rows begin .. end - 1."""
        if begin == end:
            return
        self.floats.start(begin, end, self.columns["keys"], self.columns["group"])
        for column in STATISTICS:
            self.columns[column][begin:end] = 0

    def _grow(self, num_rows: int) -> None:
        """Double the arrays that are too small for `num_rows`. Spare rows take no memory yet."""
        if num_rows > MAX_ROWS:
            raise InvalidShardCall(f"table {self._name!r} holds {MAX_ROWS:,} rows on one shard; use more shards")
        if num_rows > int(MAX_LOAD * len(self.index_I)):
            index_I = empty_index(num_rows)
            kernels.rebuild_index(index_I, self.columns["keys"], self.num_numbers)
            self.index_I = index_I
        if num_rows > self.floats.room:
            with self.moving:
                used, room = self.num_numbers, min(max(num_rows, 2 * self.floats.room), MAX_ROWS)
                self.floats.grow(used, room)
                self.marks_R = grown(self.marks_R, used, room)
                for column in COLUMNS:
                    self.columns[column] = grown(self.columns[column], used, room)


def _none_is_deleted(keys_U: U64, words_UW: U32, *, found_out: bool) -> NDArray[np.bool_]:
    return np.zeros(len(keys_U), np.bool_)


def row_bytes_of(width: int) -> int:
    """Memory of a row of `width` floats, its columns and its mark."""
    return 4 * width + sum(np.dtype(dtype).itemsize for dtype in COLUMNS.values()) + 1


def index_slots(num_rows: int) -> int:
    """Places of an index with room for `num_rows`; each is an int32."""
    num_slots = 2
    while num_rows > int(MAX_LOAD * num_slots):
        num_slots *= 2
    return num_slots


def empty_index(num_rows: int) -> I32:
    """An index with room for `num_rows`."""
    index_I = allocate((index_slots(num_rows),), np.int32)
    index_I.fill(kernels.EMPTY)
    return index_I


def column_bits_of(columns: Mapping[str, NDArray[Any]]) -> tuple[NDArray[Any], ...]:
    """The columns in the order of COLUMNS, floats as their bits."""
    arrays = (columns[column] for column in COLUMNS)
    return tuple(array.view(np.uint32) if array.dtype == np.float32 else array for array in arrays)


def bits_of(slab_RW: F32, columns: Mapping[str, NDArray[Any]]) -> tuple[U32, tuple[NDArray[Any], ...]]:
    """The floats of whole rows as bits, and `column_bits_of`."""
    return slab_RW.view(np.uint32), column_bits_of(columns)
