"""Deletion of rows of one table: by a request, or by a shrink, whose rows are removed later; and row counts.

A deleted row is in `gone` until a commit has deleted it in the store. Its number is free at once; if a batch still
holds the number, the row starts anew. pserver.lifecycle.aging decides which rows a shrink deletes,
pserver.tables.sweeping when they are removed.

Threads: any may forget, sweep and survey; `removing` of pserver.rows.table_rows keeps steps away from rows being
removed.

Shapes: U keys or rows chosen, G slot groups.
"""

import threading
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from headrace.errors import Unavailable
from headrace.pserver.lifecycle.aging import BELOW, STAYS, UNSEEN, RowStatistics, TableAging
from headrace.pserver.lifecycle.tombstones import Tombstones
from headrace.pserver.protocol.shards import U16, U64
from headrace.pserver.protocol.table_operations import ShrinkRows, ShrinkSurvey
from headrace.pserver.rows import kernels
from headrace.pserver.rows.arrays import frozen
from headrace.pserver.rows.dirty_rows import DirtyRows
from headrace.pserver.rows.row_format import groups_of
from headrace.pserver.rows.slot_classes import NUM_GROUPS
from headrace.pserver.rows.table_rows import I32, U32, RowArrays

PIECE_ROWS = 1 << 12
"""Rows examined while steps wait: about a millisecond if all are deleted."""
STORED_PIECE_ROWS = 1 << 14
"""Rows of a store examined at a time: steps wait only while those that are also in memory are removed."""


class Deletions:
    rows: RowArrays
    """The rows in memory; set before any call."""

    def __init__(self, life: TableAging, dirty: DirtyRows) -> None:
        self._life, self._dirty = life, dirty
        self.gone = Tombstones()
        self.counting = threading.Lock()
        """Held while `gone` and the counts of deleted rows differ."""
        self.made_G = np.zeros(NUM_GROUPS, np.int64)
        """Rows ever made or loaded, by slot group; changed within `moving`."""
        self._deleted_G = np.zeros(NUM_GROUPS, np.int64)
        self.on_deleted: Callable[[U64], None] = lambda _: None
        """Called with the keys of each deletion, for the live feed (pserver.feed.table_changes)."""
        self.on_swept: Callable[[], None] = lambda: None
        """Called when no shrink has rows left to remove: the feed can send a held version."""

    @property
    def rows_by_group(self) -> dict[int, int]:
        """Number of rows by slot group."""
        return by_group(self.made_G - self._deleted_G)

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return int(self.made_G.sum() - self._deleted_G.sum())

    @property
    def sweeping(self) -> bool:
        """Whether rows that a shrink deleted are still to be removed."""
        return bool(self._life.shrinks)

    # --- rows in memory ----------------------------------------------------------------------------------------------

    def statistics(self) -> RowStatistics:
        """The columns of all rows in memory."""
        return RowStatistics(*(self.rows.columns[name] for name in RowStatistics._fields))

    def purge(self, rows_U: I32) -> None:
        """Remove those of the rows that a shrink deleted now, so that they start anew before they are swept."""
        if self._life.shrinks:
            with self.rows.removing():
                self.purge_within(rows_U)

    def purge_within(self, rows_U: I32) -> None:
        """As `purge`, within `removing`."""
        if self._life.shrinks:
            rows_U = rows_U[rows_U != kernels.EMPTY]
            self._remove(rows_U[self._life.gone(self.statistics(), frozen(rows_U)) != STAYS])

    def _remove(self, rows_U: I32) -> None:
        """Delete rows in memory; within `removing`."""
        if len(rows_U):
            group_U, keys_U = self.rows.columns["group"][rows_U], self.rows.columns["keys"][rows_U]
            with self.counting:
                self.gone.add(keys_U, group_U)
                self._deleted_G += np.bincount(group_U, minlength=NUM_GROUPS)
            self._dirty.drop(self.rows.marks_R, rows_U)
            self.rows.remove(rows_U)
            self.on_deleted(keys_U)

    def forget(self, keys_U: U64) -> None:
        """Delete rows that the open pass has not changed, in memory and in the store."""
        with self.rows.still:
            with self.rows.removing():
                rows_U = self.rows.look_up(keys_U)
                present_U = rows_U[rows_U != kernels.EMPTY]
                self._remove(present_U[self.rows.columns["changed_version"][present_U] != 0])
            away_U = keys_U[rows_U == kernels.EMPTY]
            found_A, words_FW = self.rows.stored.get(away_U)
            if len(words_FW):
                with self.counting:
                    self._note_deleted(away_U[found_A], groups_of(words_FW))

    # --- rows of a store ---------------------------------------------------------------------------------------------

    def is_deleted(self, keys_U: U64, words_UW: U32, *, found_out: bool) -> NDArray[np.bool_]:
        """(U,) which keys of rows of the store were deleted, as DeletedRows says."""
        absent_U = self._life.absent(words_UW)
        with self.counting:
            went_U = self.gone.contains(keys_U)
            fresh_U = absent_U & ~went_U
            if found_out and fresh_U.any():
                self._note_deleted(keys_U[fresh_U], groups_of(words_UW[fresh_U]))
        return went_U | absent_U

    def _note_deleted(self, keys_U: U64, group_U: U16) -> None:
        """Note that rows which are only in the store are deleted; within `counting`."""
        self.gone.add(keys_U, group_U)
        self._deleted_G += np.bincount(group_U, minlength=NUM_GROUPS)
        self.rows.stored.left(len(keys_U))
        self.on_deleted(keys_U)

    # --- all rows ----------------------------------------------------------------------------------------------------

    def sweep(self) -> Iterator[None]:
        """Remove the rows that shrinks deleted, a piece at a time. Raises StoreFailed and StoreDamaged."""
        while self._life.shrinks:
            seen = self._life.shrinks  # pieces done by then know nothing of later ones, whatever their version
            for begin in range(0, self.rows.num_numbers, PIECE_ROWS):
                self.gone.make_room(PIECE_ROWS)
                with self.rows.removing():
                    self.purge_within(self._piece(begin))
                yield
            num_writes = self.rows.stored.num_writes  # before the read: rows written meanwhile are not in it
            for keys_U, words_UW in self.rows.stored.scan():
                for begin in range(0, len(keys_U), STORED_PIECE_ROWS):
                    self.gone.make_room(STORED_PIECE_ROWS)
                    piece = keys_U[begin : begin + STORED_PIECE_ROWS], words_UW[begin : begin + STORED_PIECE_ROWS]
                    self._sweep_stored(*piece, num_writes)
                    yield
            self._life.swept(seen)
        self.on_swept()

    def _sweep_stored(self, keys_U: U64, words_UW: U32, num_writes: int) -> None:
        """Delete those rows that a shrink took; they were read from the store after `num_writes` writes."""
        suspect_U = self.is_deleted(keys_U, words_UW, found_out=False)
        if not suspect_U.any():
            return
        with self.rows.still:
            keys_U, words_UW = keys_U[suspect_U], words_UW[suspect_U]
            with self.rows.removing():
                self.purge_within(self.rows.look_up(keys_U))  # rows loaded into memory since the shrink acted
            away_U = self.rows.resident(keys_U) == kernels.EMPTY
            if num_writes == self.rows.stored.num_writes:
                self.is_deleted(keys_U[away_U], words_UW[away_U], found_out=True)
            else:  # the present rows: one may have been loaded, changed and evicted again
                self.rows.stored.get(keys_U[away_U])

    def survey(self, shrink: ShrinkRows, stopping: Callable[[], bool] = lambda: False) -> ShrinkSurvey:
        """The rows that `shrink` would delete now, among those that the open pass has not changed.

        Raises Unavailable once `stopping()` is true.
        """
        rule = self._life.ruled(shrink, self.rows.open_version - 1)
        below_G, unseen_G = np.zeros(NUM_GROUPS, np.int64), np.zeros(NUM_GROUPS, np.int64)

        def count(statistics: RowStatistics, rows_U: I32) -> None:
            if stopping():
                raise Unavailable("the shard is stopping")
            why_U, group_U = self._life.gone(statistics, rows_U, rule), statistics.group[rows_U]
            for why, counts_G in ((BELOW, below_G), (UNSEEN, unseen_G)):
                counts_G += np.bincount(group_U[why_U == why], minlength=NUM_GROUPS)

        for begin in range(0, self.rows.num_numbers, PIECE_ROWS):
            rows_U = self._piece(begin)  # before the columns are read: these then have room for all numbers given out
            count(self.statistics(), frozen(rows_U))
        for _, words_UW in self.rows.away():
            count(RowStatistics.of_words(words_UW), frozen(np.arange(len(words_UW), dtype=np.int32)))
        return ShrinkSurvey(self.num_rows, by_group(below_G), by_group(unseen_G))

    def _piece(self, begin: int) -> I32:
        return np.arange(begin, min(begin + PIECE_ROWS, self.rows.num_numbers), dtype=np.int32)


def by_group(counts_G: NDArray[np.int64]) -> dict[int, int]:
    """Counts by slot group, without zeros."""
    return {int(group): int(counts_G[group]) for group in np.flatnonzero(counts_G)}
