"""Copies the changed rows of one table for a commit, and loads rows from one.

pserver.rows.dirty_rows knows the changed rows, pserver.lifecycle.deletions the deleted ones, pserver.rows.row_format
the format of a row. pserver.commit.shard_commits owns stores and files.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.keys import are_among
from headrace.pserver.admission.slot_admission import SlotAdmission
from headrace.pserver.errors import InvalidShardCall, StoreDamaged
from headrace.pserver.lifecycle.aging import TableAging
from headrace.pserver.lifecycle.deletions import Deletions
from headrace.pserver.protocol.commit_parts import AgingState
from headrace.pserver.protocol.shards import U16, U64
from headrace.pserver.rows import kernels
from headrace.pserver.rows.arrays import allocate, frozen
from headrace.pserver.rows.dirty_rows import DirtyRows
from headrace.pserver.rows.row_cache import RowCache
from headrace.pserver.rows.row_format import HEAD, groups_of
from headrace.pserver.rows.slot_classes import NUM_GROUPS
from headrace.pserver.rows.split_work import WorkSplitter
from headrace.pserver.rows.table_rows import U32, RowArrays
from headrace.pserver.store.row_store import RowStore, RowWriter

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TableSnapshot:
    """The part of a table that a commit writes."""

    keys_U: U64
    """Keys of the rows changed since the last commit."""
    words_UW: U32
    deleted_keys_U: U64
    """Keys deleted since; some may have rows again, and are in `keys_U` then."""
    deleted_group_U: U16
    rows_by_group: Mapping[int, int]
    """Number of rows by slot group, without deleted ones."""
    life: AgingState
    admission: Mapping[str, NDArray[Any]]
    """See pserver.admission.slot_admission.SlotAdmission.state."""

    def gone(self) -> tuple[U64, U16]:
        """Keys and groups of deleted rows that did not come back. Slow for many keys: not while steps wait."""
        if not len(self.deleted_keys_U):
            return self.deleted_keys_U, self.deleted_group_U
        gone_U = ~are_among(self.deleted_keys_U, np.sort(self.keys_U))
        return self.deleted_keys_U[gone_U], self.deleted_group_U[gone_U]


@dataclass(frozen=True, slots=True)
class TableSnapshots:
    """Snapshots of one table for commits."""

    name: str
    rows: RowArrays
    life: TableAging
    selection: SlotAdmission
    dirty: DirtyRows
    deletions: Deletions
    halves: WorkSplitter

    @property
    def num_words(self) -> int:
        """Words of a row in snapshots and stores."""
        return HEAD + self.rows.width

    def take(self) -> TableSnapshot:
        """Copies of the dirty rows and of all other changes; in flight until `settle`. Between passes only."""
        with self.rows.moving:
            rows_U = self.dirty.take(self.rows.marks_R, self.rows.num_numbers)
            keys_U = allocate((len(rows_U),), np.uint64)
            words_UW = allocate((len(rows_U), self.num_words), np.uint32)
            bits, pack = self.rows.bits(), self.rows.floats.pack
            self.halves.do(len(rows_U), lambda begin, end: pack(bits, rows_U, begin, end, keys_U, words_UW))
            life = self.life.state  # before the deletions: a sweep that ends in between is repeated
            with self.deletions.counting:
                deleted, rows_by_group = self.deletions.gone.take(), self.deletions.rows_by_group
        return TableSnapshot(keys_U, words_UW, *deleted, rows_by_group, life, self.selection.state())

    def settle(self, committed: bool) -> None:
        """End the snapshot: the rows in flight are clean, or dirty again if the commit failed."""
        with self.rows.still, self.rows.moving:  # a reader sees store and deletions of one moment
            self.deletions.gone.settle(committed)
            self.dirty.settle(self.rows.marks_R, committed)
        self.rows.made_room()

    def attach(
        self,
        store: RowStore,
        rows_by_group: Mapping[int, int],
        lives: Sequence[AgingState] = (),
        admission: Sequence[tuple[int, Mapping[str, NDArray[Any]]]] = (),
    ) -> None:
        """After a restore, into an empty table: use the committed rows of `store`, counted in `rows_by_group`.

        `lives` and `admission` (with the first bucket of each) come from all parts of the commit. All rows are loaded
        at once, or on demand if memory is bounded. Raises StoreDamaged if the counts of the store differ.
        """
        self._load_facts(lives, admission)
        if isinstance(self.rows, RowCache):
            self.rows.stored.attach(store, sum(rows_by_group.values()))
            for group, count in rows_by_group.items():
                self.deletions.made_G[group] = count
            return
        self.rows.make_room(sum(rows_by_group.values()))
        self.load(store.scan())
        if self.deletions.rows_by_group != dict(rows_by_group):
            raise StoreDamaged(
                f"table {self.name!r}: the store holds {self.deletions.num_rows} rows, not those of its commit"
            )

    def _load_facts(
        self, lives: Sequence[AgingState], admission: Sequence[tuple[int, Mapping[str, NDArray[Any]]]]
    ) -> None:
        self.life.load(lives)
        restarted = self.selection.load(admission) if admission else []
        if restarted:
            log.warning("table %r: admission of %s counts differently now and starts anew", self.name, restarted)

    def begin_advance(
        self, lives: Sequence[AgingState], admission: Sequence[tuple[int, Mapping[str, NDArray[Any]]]]
    ) -> U64:
        """After a restore, before the first pass: go on to a later commit. `lives` and `admission` as in `attach`.

        Returns keys that were swept since the restore: they must be taken over, as the changed ones.
        """
        self.begin_handed(lives, admission)
        return self.deletions.gone.drop_all()

    def begin_handed(
        self, lives: Sequence[AgingState], admission: Sequence[tuple[int, Mapping[str, NDArray[Any]]]]
    ) -> None:
        """After a restore, before the first pass: go on to a state that was handed over."""
        if self.dirty.num_dirty or self.dirty.num_in_flight:
            raise InvalidShardCall(f"table {self.name!r} cannot advance: rows have changed since the restore")
        self.selection.start_anew()
        self._load_facts(lives, admission)

    def take_handed(self, keys_U: U64, words_UW: U32, gone_G: U64, gone_group_G: U16) -> None:
        """Take over rows as if they had been changed, and deleted, here: the next commit writes them.

        For unbounded memory. A key may be in both, and has a row then.
        """
        assert not isinstance(self.rows, RowCache), "all rows are in memory"
        with self.rows.removing():
            rows_G = self.rows.look_up(gone_G[~np.isin(gone_G, keys_U)])
            self._take_out(rows_G[rows_G != kernels.EMPTY])
            rows_U = self.rows.look_up(keys_U)
            here_U = rows_U[rows_U != kernels.EMPTY]  # they are written in place
            self._uncount(here_U)
            self.rows.floats.free(here_U)
        self.deletions.gone.add(gone_G, gone_group_G)
        self.load([(keys_U, words_UW)], dirty=True)

    def _take_out(self, rows_U: NDArray[np.int32]) -> None:
        """Remove rows that others replace, within `removing`; they do not count as deleted."""
        self._uncount(rows_U)
        self.rows.remove(frozen(rows_U))

    def _uncount(self, rows_U: NDArray[np.int32]) -> None:
        self.deletions.made_G -= np.bincount(self.rows.columns["group"][rows_U], minlength=NUM_GROUPS)

    def take_over(
        self, store: RowWriter, keys_U: U64, swept_U: NDArray[np.bool_], found_U: NDArray[np.bool_], words_FW: U32
    ) -> None:
        """Replace the rows of unique keys, in memory and in `store`: those found have these words, the others go.

        `swept_U`: the keys are among those of `begin_advance`. 1. Remove the rows in memory. 2. Replace those of the
        store. 3. Count; load them where all rows are in memory.
        """
        made_G, bounded = self.deletions.made_G, isinstance(self.rows, RowCache)
        with self.rows.still:
            with self.rows.removing():  # 1
                rows_U = self.rows.look_up(keys_U)
                self._take_out(rows_U[rows_U != kernels.EMPTY])
            away_U = (rows_U == kernels.EMPTY) & ~swept_U
            before_FW = store.get(keys_U[away_U])[1] if bounded else words_FW[:0]
            store.write(keys_U[found_U], words_FW, keys_U[~found_U])  # 2
            if bounded:
                made_G += np.bincount(groups_of(words_FW), minlength=NUM_GROUPS)  # 3
                made_G -= np.bincount(groups_of(before_FW), minlength=NUM_GROUPS)
                self.rows.stored.left(len(before_FW) - len(words_FW))
        if not bounded:
            self.load([(keys_U[found_U], words_FW)])

    def load(self, chunks: Iterable[tuple[U64, U32]], *, dirty: bool = False) -> None:
        """Add rows of keys without one, as keys and words; committed ones are clean. Memory is unbounded."""
        for keys_U, words_UW in chunks:
            group_U, words_UW = groups_of(words_UW), frozen(words_UW)
            rows_U = self.rows.reserve(keys_U, group_U, start=False)
            with self.rows.moving:
                self._unpack(words_UW, rows_U)
                self.deletions.made_G += np.bincount(group_U, minlength=NUM_GROUPS)
                if dirty:
                    self.dirty.touch(self.rows.marks_R, rows_U)
            self.rows.release(rows_U)

    def _unpack(self, words_UW: U32, rows_U: NDArray[np.int32]) -> None:
        bits, unpack = self.rows.bits(), self.rows.floats.unpack
        self.rows.floats.hold(words_UW, rows_U)
        self.halves.do(len(rows_U), lambda begin, end: unpack(words_UW, rows_U, begin, end, bits))
