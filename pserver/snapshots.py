"""Copies the changed rows of one table for a commit, and loads rows from one.

pserver.dirty knows the changed rows, pserver.departures the deleted ones, pserver.row_words the format of a row.
pserver.commit owns stores and files.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pserver.aging import Life
from pserver.arrays import frozen, roomy
from pserver.client import U16, U64
from pserver.departures import Departures
from pserver.dirty import Dirty
from pserver.errors import StoreDamaged
from pserver.halves import Halves
from pserver.residency import BoundedRows
from pserver.row_words import HEAD, groups_of
from pserver.rows import U32, Rows
from pserver.selection import Selection
from pserver.slot_classes import NUM_GROUPS
from pserver.store.base import RowStore

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
    life: Mapping[str, Any]
    """See pserver.aging.Life.message."""
    admission: Mapping[str, NDArray[Any]]
    """See pserver.selection.Selection.state."""

    def gone(self) -> tuple[U64, U16]:
        """Keys and groups of deleted rows that did not come back. Slow for many keys: not while steps wait."""
        gone_U = ~np.isin(self.deleted_keys_U, self.keys_U)
        return self.deleted_keys_U[gone_U], self.deleted_group_U[gone_U]


@dataclass(frozen=True, slots=True)
class Snapshots:
    """Snapshots of one table for commits."""

    name: str
    rows: Rows
    life: Life
    selection: Selection
    dirty: Dirty
    departures: Departures
    halves: Halves

    def take(self) -> TableSnapshot:
        """Copies of the dirty rows and of all other changes; in flight until `settle`. Between passes only."""
        with self.rows.moving:
            rows_U = self.dirty.take(self.rows.marks_R, self.rows.num_numbers)
            keys_U = roomy((len(rows_U),), np.uint64)
            words_UW = roomy((len(rows_U), HEAD + self.rows.width), np.uint32)
            bits, pack = self.rows.bits(), self.rows.floats.pack
            self.halves.do(len(rows_U), lambda begin, end: pack(bits, rows_U, begin, end, keys_U, words_UW))
            life = self.life.message()  # before the deletions: a sweep that ends in between is repeated
            with self.departures.counting:
                deleted, rows_by_group = self.departures.gone.take(), self.departures.rows_by_group
        return TableSnapshot(keys_U, words_UW, *deleted, rows_by_group, life, self.selection.state())

    def settle(self, committed: bool) -> None:
        """End the snapshot: the rows in flight are clean, or dirty again if the commit failed."""
        with self.rows.still, self.rows.moving:  # a reader sees store and deletions of one moment
            self.departures.gone.settle(committed)
            self.dirty.settle(self.rows.marks_R, committed)
        self.rows.made_room()

    def attach(
        self,
        store: RowStore,
        rows_by_group: Mapping[int, int],
        lives: Sequence[Mapping[str, Any]],
        admission: Sequence[tuple[int, Mapping[str, NDArray[Any]]]],
    ) -> None:
        """See pserver.table.Table.attach."""
        self.life.load(lives)
        restarted = self.selection.load(admission) if admission else []
        if restarted:
            log.warning("table %r: admission of %s counts differently now and starts anew", self.name, restarted)
        if isinstance(self.rows, BoundedRows):
            self.rows.attach(store, sum(rows_by_group.values()))
            for group, count in rows_by_group.items():
                self.departures.made_G[group] = count
            return
        self.rows.make_room(sum(rows_by_group.values()))
        self.load(store.scan())
        if self.departures.rows_by_group != dict(rows_by_group):
            raise StoreDamaged(
                f"table {self.name!r}: the store holds {self.departures.num_rows} rows, not those of its commit"
            )

    def load(self, chunks: Iterable[tuple[U64, U32]]) -> None:
        """Add committed rows as clean: keys and words, of keys without a row. For tables with unbounded memory."""
        for keys_U, words_UW in chunks:
            group_U, words_UW = groups_of(words_UW), frozen(words_UW)
            rows_U = self.rows.reserve(keys_U, group_U, start=False)
            with self.rows.moving:
                self._unpack(words_UW, rows_U)
                self.departures.made_G += np.bincount(group_U, minlength=NUM_GROUPS)
            self.rows.release(rows_U)

    def _unpack(self, words_UW: U32, rows_U: NDArray[np.int32]) -> None:
        bits, unpack = self.rows.bits(), self.rows.floats.unpack
        self.rows.floats.hold(words_UW, rows_U)
        self.halves.do(len(rows_U), lambda begin, end: unpack(words_UW, rows_U, begin, end, bits))
