"""One table's rows in this process: an index, a slab, and a column for each statistic.

A row number is found or reserved ahead of time; the row *is* from its first push on, which gives it a
`changed_version` above 0. A reserved row holds its initial value and is otherwise absent: not counted, hashed or
saved. Reservations that never see a push (keys of skipped or abandoned batches) keep their memory until the process
ends; a key is reserved once however often it comes, so they are at most the keys of those batches.

Threads: any number may reserve and find; gather and apply are the step's. A lock keeps growth, which moves arrays,
apart from writers; readers take the array they find, which holds every row number given out before.
"""

import mmap
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.keys import GOLDEN, MASK, mix_reference, sign_of_text
from pserver import kernels
from pserver.client import F32, U16, U64, Gradients, TableStats
from pserver.config import TableSection
from pserver.digest import digest_rows, join, multipliers_of
from pserver.errors import BadRequest
from pserver.optim import ftrl_start, optimizer_of

I32 = NDArray[np.int32]

MAX_LOAD = 0.65
"""Share of the index that may be in use before it doubles."""
START_ROWS = 1 << 16
MAX_ROWS = (1 << 31) - 2
"""Row numbers are int32; a table at this bound refuses more keys."""
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
CHUNK_ROWS = 1 << 16
"""Rows that a scan takes at a time."""
MIN_MAPPED_BYTES = 1 << 20
"""Smaller arrays come from the heap."""
MIN_ROWS_A_THREAD = 4096
"""Fewer are done sooner than another thread wakes."""


class Table:
    """The rows of one table on one shard."""

    def __init__(self, name: str, section: TableSection, seed: int, pool: ThreadPoolExecutor | None = None) -> None:
        self.name, self.section = name, section
        self._pool = pool
        self._first_order = int(section.first_order)
        self.num_weights = self._first_order + section.dim
        """D: floats of a row that a model sees."""
        self._optimizer = optimizer_of(section)
        self._start_W = np.concatenate([np.zeros(self.num_weights, np.float32), self._optimizer.start_state])
        self._seed = np.uint64(
            mix_reference((mix_reference(seed & MASK) + sign_of_text(name.encode()) + GOLDEN) & MASK)
        )
        self._multipliers = multipliers_of(self.width)
        self._reserving = threading.Lock()
        self._moving = threading.Lock()
        self._num_numbers = 0
        self._index_I = np.full(2 * START_ROWS, kernels.EMPTY, np.int32)
        self._slab_RW = np.empty((START_ROWS, self.width), np.float32)
        self._columns = {column: np.empty(START_ROWS, dtype) for column, dtype in COLUMNS.items()}
        self._rows_by_group = np.zeros(1 << 16, np.int64)
        self._touched = np.empty(START_ROWS, np.int32)
        self._num_touched = 0
        self._new_rows = 0

    @property
    def width(self) -> int:
        """W: floats of a row in the slab."""
        return len(self._start_W)

    # --- keys to row numbers -------------------------------------------------------------------------------------

    def find(self, keys_U: U64) -> I32:
        """Row number of each key; EMPTY for a key without one."""
        rows_U = np.empty(len(keys_U), np.int32)
        with self._reserving:
            kernels.find(self._index_I, self._columns["keys"], frozen(keys_U), rows_U)
        return rows_U

    def reserve(self, keys_U: U64, group_U: U16) -> I32:
        """Row number of each key, reserved at its initial value for a key without one."""
        rows_U, keys_U, group_U = np.empty(len(keys_U), np.int32), frozen(keys_U), frozen(group_U)
        done = 0
        with self._reserving:
            while True:
                begin = self._num_numbers
                room = min(len(self._slab_RW), int(MAX_LOAD * len(self._index_I)))
                keys_R, group_R = self._columns["keys"], self._columns["group"]
                done, end = kernels.find_or_reserve(
                    self._index_I, keys_R, group_R, keys_U, group_U, rows_U, done, begin, room
                )
                self._start(begin, end)
                self._num_numbers = end
                if done == len(keys_U):
                    return rows_U
                self._grow()

    def _start(self, begin: int, end: int) -> None:
        """Give rows begin .. end - 1 their initial values."""
        if begin == end:
            return
        slab_RW, keys_R, init_range = self._slab_RW, self._columns["keys"], np.float32(self.section.init_range)
        kernels.initialise(
            slab_RW, keys_R, begin, end, self._first_order, self.num_weights, self._start_W, init_range, self._seed
        )
        if self._optimizer.ftrl:
            ftrl_start(slab_RW, begin, end, self._first_order, self.num_weights, self._optimizer.settings)
        for column in ("show", "click", "delta_score", "last_seen_day", "changed_version"):
            self._columns[column][begin:end] = 0

    def _grow(self) -> None:
        """Make room: double the slab and columns, or the index, whichever is full. Spare rows take no memory yet."""
        if self._num_numbers >= int(MAX_LOAD * len(self._index_I)):
            index_I = roomy((2 * len(self._index_I),), np.int32)
            index_I.fill(kernels.EMPTY)
            kernels.rebuild_index(index_I, self._columns["keys"], self._num_numbers)
            self._index_I = index_I
        if self._num_numbers >= len(self._slab_RW):
            if self._num_numbers >= MAX_ROWS:
                raise BadRequest(f"table {self.name!r} holds {MAX_ROWS:,} rows on one shard; use more shards")
            with self._moving:
                self._slab_RW = self._moved(self._slab_RW)
                for column in COLUMNS:
                    self._columns[column] = self._moved(self._columns[column])

    def _moved(self, array: NDArray[Any]) -> NDArray[Any]:
        larger = roomy((min(2 * len(array), MAX_ROWS), *array.shape[1:]), array.dtype)
        larger[: self._num_numbers] = array[: self._num_numbers]
        return larger

    # --- steps -----------------------------------------------------------------------------------------------------

    def gather(self, rows_U: I32) -> F32:
        """(U, D) weights of rows, each with a number."""
        out_UD = np.empty((len(rows_U), self.num_weights), np.float32)
        slab_RW = self._slab_RW
        self._ranges(len(rows_U), lambda begin, end: kernels.gather(slab_RW, rows_U, begin, end, out_UD))
        return out_UD

    def gather_present(self, rows_U: I32) -> F32:
        """(U, D) weights of rows; zeros for EMPTY and for rows that are only reserved."""
        out_UD = np.empty((len(rows_U), self.num_weights), np.float32)
        with self._moving:
            kernels.gather_present(self._slab_RW, self._columns["changed_version"], rows_U, out_UD)
        return out_UD

    def apply(self, rows_U: I32, push: Gradients, batch_samples: int, version: int) -> None:
        """Learn from one step's merged records of unique rows; `version` is that of the pass's close."""
        grads_UD = push.grads_UD
        if self.section.grad_scale == "show":
            scaled_UD = np.empty_like(grads_UD)
            kernels.scale_by_show(grads_UD, push.show_U, np.float32(batch_samples), scaled_UD)
            grads_UD = frozen(scaled_UD)
        kernel, settings, first_order = self._optimizer.kernel, self._optimizer.settings, self._first_order
        with self._moving:
            slab_RW = self._slab_RW
            self._ranges(
                len(rows_U), lambda begin, end: kernel(slab_RW, rows_U, grads_UD, begin, end, first_order, settings)
            )
            self._record(rows_U, push, version)

    def _record(self, rows_U: I32, push: Gradients, version: int) -> None:
        room = self._num_touched + len(rows_U)
        if room > len(self._touched):
            larger = roomy((max(room, 2 * len(self._touched)),), np.int32)
            larger[: self._num_touched] = self._touched[: self._num_touched]
            self._touched = larger
        columns = tuple(self._columns[c] for c in ("show", "click", "delta_score", "changed_version", "group"))
        coefficients = np.float32(self.section.nonclk_coeff), np.float32(self.section.click_coeff)
        self._num_touched, made = kernels.record(
            rows_U,
            push.show_U,
            push.click_U,
            *coefficients,
            np.uint32(version),
            columns,
            self._rows_by_group,
            self._touched,
            self._num_touched,
        )
        self._new_rows += made

    def _ranges(self, total: int, work: Callable[[int, int], object]) -> None:
        """Do `work` on 0 .. total - 1, the second half in the pool where there is one."""
        if self._pool is None or total < 2 * MIN_ROWS_A_THREAD:
            work(0, total)
            return
        half = total // 2
        second = self._pool.submit(work, half, total)
        work(0, half)
        second.result()

    # --- passes ------------------------------------------------------------------------------------------------------

    def open_pass(self) -> None:
        """Begin a pass: nothing touched, nothing new."""
        self._num_touched = self._new_rows = 0

    def close_pass(self, day: int) -> int:
        """Give the rows touched their day; the digest of those rows."""
        touched = self._touched[: self._num_touched]
        with self._moving:
            self._columns["last_seen_day"][touched] = day
            return self._digest_of(touched)

    def _digest_of(self, rows_U: I32) -> int:
        return self._digest(self._slab_RW, self._columns, rows_U)

    def _digest(self, slab_RW: F32, columns: Mapping[str, NDArray[Any]], rows_U: I32) -> int:
        bits = tuple(
            array.view(np.uint32) if array.dtype == np.float32 else array
            for array in (columns[column] for column in COLUMNS)
        )
        return join(*digest_rows(slab_RW.view(np.uint32), bits, rows_U, self._multipliers))

    def digest_of(self, chunk: Mapping[str, NDArray[Any]]) -> int:
        """The digest of rows of `chunks`, whether they are in the table or not."""
        return self._digest(chunk["slab"], chunk, np.arange(len(chunk["keys"]), dtype=np.int32))

    # --- all rows -----------------------------------------------------------------------------------------------------

    @property
    def num_rows(self) -> int:
        """Rows that were pushed at least once."""
        return int(self._rows_by_group.sum())

    def digest(self) -> int:
        """128-bit hash over all rows."""
        return self._digest_of(np.flatnonzero(self._present()).astype(np.int32))

    def stats(self) -> TableStats:
        """Counts; the memory of rows with a number and of the index."""
        row_bytes = 4 * self.width + sum(array.itemsize for array in self._columns.values())
        num_bytes = self._num_numbers * row_bytes + self._index_I.nbytes
        groups = np.flatnonzero(self._rows_by_group)
        by_group = {int(group): int(self._rows_by_group[group]) for group in groups}
        return TableStats(self.num_rows, num_bytes, self._new_rows, by_group)

    def _present(self) -> NDArray[np.bool_]:
        present_R: NDArray[np.bool_] = self._columns["changed_version"][: self._num_numbers] != 0
        return present_R

    def chunks(self) -> Iterator[dict[str, NDArray[Any]]]:
        """All rows, some at a time: the columns, and `slab` (n, W). Between passes only."""
        rows_R = np.flatnonzero(self._present())
        for begin in range(0, len(rows_R), CHUNK_ROWS):
            chosen = rows_R[begin : begin + CHUNK_ROWS]
            chunk = {column: array[chosen] for column, array in self._columns.items()}
            yield chunk | {"slab": self._slab_RW[chosen]}

    def insert(self, chunk: Mapping[str, NDArray[Any]]) -> None:
        """Enter rows of `chunks`, of keys that have none yet. Between passes only."""
        rows_U = self.reserve(chunk["keys"], chunk["group"])
        self._slab_RW[rows_U] = chunk["slab"]
        for column, array in self._columns.items():
            array[rows_U] = chunk[column]
        np.add.at(self._rows_by_group, chunk["group"], 1)


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
