"""One table on one shard: rows found, read, learnt, committed and restored.

A row number is found or reserved ahead of time; the row *is* from its first push on, which gives it a
`changed_version` above 0. A reserved row holds its initial value and is otherwise absent: not counted, hashed or
saved. Where memory is not bounded, reservations that never see a push (keys of skipped or abandoned batches) keep
theirs until the process ends; a key is reserved once however often it comes, so they are at most those batches' keys.

Where rows lie is pserver.rows' work, which of them are in memory pserver.residency's: nothing here depends on it.
Threads: any number may reserve, find and release; gather, apply, close and snapshot are the step's; any may settle.
"""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pserver import kernels
from pserver.client import F32, U16, U64, Gradients, TableStats
from pserver.config import TableSection
from pserver.digest import add, digest_rows, join, multipliers_of
from pserver.dirty import Dirty
from pserver.errors import StoreDamaged
from pserver.optim import optimizer_of
from pserver.residency import BoundedRows
from pserver.row_words import HEAD, groups_of, pack, unpack
from pserver.rows import COLUMNS, I32, NO_VERSION, U32, Rows, bits_of, frozen, roomy
from pserver.store.base import RowStore

MIN_ROWS_A_THREAD = 4096
"""Fewer are done sooner than another thread wakes."""


class Table:
    """The rows of one table on one shard."""

    def __init__(self, name: str, section: TableSection, seed: int, pool: ThreadPoolExecutor | None = None) -> None:
        self.name, self.section = name, section
        self._pool = pool
        self._optimizer = optimizer_of(section)
        self._dirty = Dirty()
        self._rows = (
            Rows(name, section, self._optimizer, seed)
            if section.memory is None
            else BoundedRows(name, section, self._optimizer, seed, self._num_waiting, lambda: self._num_touched)
        )
        self._multipliers = multipliers_of(self.width)
        self._rows_by_group = np.zeros(1 << 16, np.int64)
        self._touched = np.empty(0, np.int32)
        self._num_touched = 0
        self._new_rows = 0

    @property
    def width(self) -> int:
        """W: floats of a row in the slab."""
        return self._rows.width

    @property
    def num_weights(self) -> int:
        """D: floats of a row that a model sees."""
        return self._rows.num_weights

    @property
    def num_words(self) -> int:
        """Words of a row in snapshots and stores."""
        return HEAD + self.width

    # --- keys to row numbers -------------------------------------------------------------------------------------

    def find(self, keys_U: U64) -> I32:
        """Row number of each key, until `release`; EMPTY for a key without one."""
        return self._rows.find(keys_U)

    def reserve(self, keys_U: U64, group_U: U16) -> I32:
        """Row number of each key, until `release`; reserved at its initial value for a key without one.

        Raises OutOfMemory where memory is bounded and rows that wait for a commit, or for a step, fill it.
        """
        return self._rows.reserve(keys_U, group_U)

    def release(self, rows_U: I32) -> None:
        """The batch that got these numbers from `find` or `reserve` needs them no longer. Once a batch."""
        self._rows.release(rows_U)

    # --- steps -----------------------------------------------------------------------------------------------------

    def gather(self, rows_U: I32) -> F32:
        """(U, D) weights of rows, each with a number."""
        out_UD = np.empty((len(rows_U), self.num_weights), np.float32)
        slab_RW = self._rows.slab_RW
        self._ranges(len(rows_U), lambda begin, end: kernels.gather(slab_RW, rows_U, begin, end, out_UD))
        return out_UD

    def gather_present(self, rows_U: I32, keys_U: U64 | None = None) -> F32:
        """(U, D) weights of rows; zeros for EMPTY and for rows that are only reserved.

        With `keys_U`, EMPTY ones are looked up again by key: they may have become rows since `find`.
        """
        out_UD = np.empty((len(rows_U), self.num_weights), np.float32)
        with self._rows.moving:
            kernels.gather_present(self._rows.slab_RW, self._rows.columns["changed_version"], rows_U, out_UD)
        unknown_U = np.flatnonzero(rows_U == kernels.EMPTY)
        if keys_U is not None and len(unknown_U):
            again_UD = np.empty((len(unknown_U), self.num_weights), np.float32)
            self._rows.gather_present(keys_U[unknown_U], again_UD)
            out_UD[unknown_U] = again_UD
        return out_UD

    def apply(self, rows_U: I32, push: Gradients, batch_samples: int, version: int) -> None:
        """Learn from one step's merged records of unique rows; `version` is that of the pass's close."""
        grads_UD = push.grads_UD
        if self.section.grad_scale == "show":
            scaled_UD = np.empty_like(grads_UD)
            kernels.scale_by_show(grads_UD, push.show_U, np.float32(batch_samples), scaled_UD)
            grads_UD = frozen(scaled_UD)
        kernel, settings, first_order = self._optimizer.kernel, self._optimizer.settings, int(self.section.first_order)
        with self._rows.moving:
            self._rows.open_version = version
            slab_RW = self._rows.slab_RW
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
        columns = tuple(self._rows.columns[c] for c in ("show", "click", "delta_score", "changed_version", "group"))
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
        """Give the rows touched their day; from here on they wait for a commit. The digest of those rows."""
        touched = self._touched[: self._num_touched]
        with self._rows.moving:
            self._rows.columns["last_seen_day"][touched] = day
            self._dirty.touch(self._rows.marks_R, touched)
            self._num_touched, self._rows.open_version = 0, NO_VERSION
            return self._digest_of(touched)

    def _digest_of(self, rows_U: I32) -> int:
        bits, parts = self._rows.bits(), list[int]()
        self._ranges(len(rows_U), lambda begin, end: parts.append(self._digest(*bits, rows_U[begin:end])))
        return add(parts)

    def _digest(self, slab_bits_RW: U32, columns: tuple[NDArray[Any], ...], rows_U: I32) -> int:
        return join(*digest_rows(slab_bits_RW, columns, rows_U, self._multipliers))

    # --- commits ---------------------------------------------------------------------------------------------------

    @property
    def num_dirty(self) -> int:
        """Rows changed by closed passes that are neither committed nor in flight."""
        return self._dirty.num_dirty

    def _num_waiting(self) -> int:
        """Copies that commits need: those in flight, and of all that changed since, the open pass's rows included."""
        return self._dirty.num_in_flight + self.num_dirty + self._num_touched

    def snapshot(self) -> tuple[U64, U32]:
        """Copies of the dirty rows, keys and words; they are in flight until `settle`. Between passes only."""
        keys_U = roomy((self.num_dirty,), np.uint64)
        words_UW = roomy((self.num_dirty, self.num_words), np.uint32)
        with self._rows.moving:
            rows_U = self._dirty.take(self._rows.marks_R, self._rows.num_numbers)
            bits = self._rows.bits()
            self._ranges(len(rows_U), lambda begin, end: pack(*bits, rows_U, begin, end, keys_U, words_UW))
        return keys_U, words_UW

    def settle(self, committed: bool) -> None:
        """The rows in flight are clean; or, where their commit failed, dirty again."""
        with self._rows.moving:
            self._dirty.settle(self._rows.marks_R, committed)
        self._rows.made_room()

    def attach(self, store: RowStore, rows_by_group: Mapping[int, int]) -> None:
        """After a restore, into an empty table: the committed rows are those of `store`, counted in `rows_by_group`.

        All are loaded at once, or, where memory is bounded, come on demand. Raises StoreDamaged where the store holds
        other counts.
        """
        if isinstance(self._rows, BoundedRows):
            self._rows.attach(store, sum(rows_by_group.values()))
            for group, count in rows_by_group.items():
                self._rows_by_group[group] = count
            return
        self._rows.make_room(sum(rows_by_group.values()))
        self.load(store.scan())
        if self.rows_by_group != dict(rows_by_group):
            raise StoreDamaged(f"table {self.name!r}: the store holds {self.num_rows} rows, not those of its commit")

    def load(self, chunks: Iterable[tuple[U64, U32]]) -> None:
        """Enter committed rows, keys and words, of keys without one, as clean; where memory is not bounded."""
        for keys_U, words_UW in chunks:
            group_U = groups_of(words_UW)
            rows_U = self._rows.reserve(keys_U, group_U, start=False)
            with self._rows.moving:
                self._unpack(frozen(words_UW), rows_U)
            self._rows_by_group += np.bincount(group_U, minlength=1 << 16)

    def _unpack(self, words_UW: U32, rows_U: I32) -> None:
        bits = self._rows.bits()
        self._ranges(len(rows_U), lambda begin, end: unpack(words_UW, rows_U, begin, end, *bits))

    # --- all rows -----------------------------------------------------------------------------------------------------

    @property
    def num_rows(self) -> int:
        """Rows that were pushed at least once."""
        return int(self._rows_by_group.sum())

    @property
    def rows_by_group(self) -> dict[int, int]:
        """How many rows each slot group has."""
        return {int(group): int(self._rows_by_group[group]) for group in np.flatnonzero(self._rows_by_group)}

    def digest(self) -> int:
        """128-bit hash over all rows."""
        with self._rows.still:
            resident = self._digest_of(np.flatnonzero(self._present()).astype(np.int32))
            return add([resident, *(self._digest_of_words(*chunk) for chunk in self._rows.away())])

    def _digest_of_words(self, keys_U: U64, words_UW: U32) -> int:
        slab_UW = np.empty((len(keys_U), self.width), np.float32)
        columns = {column: np.empty(len(keys_U), dtype) for column, dtype in COLUMNS.items()} | {"keys": keys_U}
        rows_U = np.arange(len(keys_U), dtype=np.int32)
        unpack(frozen(words_UW), rows_U, 0, len(rows_U), *bits_of(slab_UW, columns))
        return self._digest(*bits_of(slab_UW, columns), rows_U)

    def stats(self) -> TableStats:
        """Counts; the memory of rows with a number and of the index."""
        return TableStats(
            self.num_rows,
            self._rows.num_bytes,
            self._new_rows,
            self.rows_by_group,
            dirty_rows=self.num_dirty,
            max_dirty_rows=self._rows.max_dirty,
        )

    def _present(self) -> NDArray[np.bool_]:
        present_R: NDArray[np.bool_] = self._rows.columns["changed_version"][: self._rows.num_numbers] != 0
        return present_R
