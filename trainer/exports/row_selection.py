"""Selects the rows and the deletions of one table that an export takes from a commit, in the order of stores.

A base reads every row, a delta the rows of a list of changed keys. The stores of a commit are linked into a scratch
folder and opened there; the commit itself is not touched. trainer.exports.parquet_files writes the rows.

Shapes: U rows of a chunk, W words of a row, P keys of one part, F found rows of a chunk, G deleted keys.
"""

import shutil
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.deadline import Deadline
from headrace.errors import HeadraceError
from headrace.keys import NUM_BUCKETS
from headrace.pserver.commit.change_files import ChangedKeys, read_changes
from headrace.pserver.config import TableSection
from headrace.pserver.lifecycle.aging import KEEPERS, RowStatistics, TableAging
from headrace.pserver.lifecycle.day_decay import DayDecay
from headrace.pserver.protocol.shards import U16, U64, ShardCommitPart
from headrace.pserver.protocol.table_operations import ExportCut
from headrace.pserver.rows.row_format import HEAD
from headrace.pserver.rows.row_settings import optimizer_of
from headrace.pserver.store.rocks_store import RocksRowStore
from headrace.pserver.store.row_store import U32, RowStore, sort_order_of
from headrace.trainer.checkpoint.commits import Commit, CommitDamaged

U8 = NDArray[np.uint8]

CHUNK_ROWS = 65_536
"""Rows of a delta that are looked up in one call."""


class DeltaImpossible(HeadraceError):
    """A delta lacks what it builds on. Another try cannot help; a base is needed."""


@dataclass(frozen=True, slots=True)
class RowSelection:
    """Which rows of a table an export takes."""

    cut: ExportCut
    version: int
    """Version of the commit, at which the export was cut."""
    is_base: bool

    def kept_back(self, life: TableAging, words_UW: U32) -> U8:
        """(U,) the threshold that excludes each row: 0 for none, or 1 + its index in KEEPERS.

        The rows exist and, for a delta, changed. Thresholds of 0 exclude nothing.
        """
        cut = ExportCut(since=0, base_threshold=self.cut.base_threshold) if self.is_base else self.cut
        if cut.base_threshold <= 0 and cut.delta_threshold <= 0 and cut.delta_keep_days is None:
            return np.zeros(len(words_UW), np.uint8)
        return life.kept_back(words_UW, cut, self.version)

    def chosen(self, life: TableAging, words_UW: U32) -> NDArray[np.bool_]:
        """(U,) which of the rows, which exist and, for a delta, changed, the export takes."""
        chosen_U: NDArray[np.bool_] = self.kept_back(life, words_UW) == 0
        return chosen_U


@dataclass(frozen=True, slots=True)
class SelectedRows:
    """Some rows of an export, in order, and how many were excluded among them."""

    keys_U: U64
    words_UW: U32
    kept_back: Mapping[str, int]
    """Excluded rows (of a base existing ones, of a delta changed ones), by the name in KEEPERS."""


class CommitTableRows:
    """One table of a commit. A context: stores stay open, once read, until it ends."""

    def __init__(
        self, commit: Commit, table: str, section: TableSection, groups: Mapping[str, int], scratch: Path
    ) -> None:
        """`groups` are the slot groups of the table's slots, by name."""
        self._commit, self._table, self._scratch = commit, table, scratch
        self._num_weights = section.num_weights
        self._num_words = HEAD + self._num_weights + len(optimizer_of(section).start_state)
        self._parts = sorted((part for part in commit.shards if table in part.tables), key=lambda part: part.buckets)
        self._lives = [TableAging.of(section, groups, part.tables[table].life) for part in self._parts]
        self._stores: dict[str, RowStore] = {}

    def __enter__(self) -> "CommitTableRows":
        return self

    def __exit__(self, *_: object) -> None:
        for folder, store in self._stores.items():
            store.close()
            shutil.rmtree(self._live(folder), ignore_errors=True)
        self._stores = {}

    @property
    def num_rows(self) -> int:
        """Rows of the commit, including absent ones."""
        return sum(part.tables[self._table].rows for part in self._parts)

    def all(self, selection: RowSelection, deadline: Deadline) -> Generator[SelectedRows, None, None]:
        """Every row that a base takes."""
        for part, life in zip(self._parts, self._lives, strict=True):
            for keys_U, words_UW in self._store(part).scan():
                deadline.check(f"exporting table {self._table!r}")
                yield _chosen(selection, life, keys_U, words_UW)

    def find(self, keys_U: U64, selection: RowSelection) -> tuple[NDArray[np.bool_], NDArray[np.float32]]:
        """(U,) whether a base has a row of each key, and (U, D) the weights, zeros where it has none."""
        found_U, weights_UD = np.zeros(len(keys_U), np.bool_), np.zeros((len(keys_U), self._num_weights), np.float32)
        for life, place_F, words_FW in self._found(keys_U):
            chosen_F = selection.chosen(life, words_FW)
            found_U[place_F[chosen_F]] = True
            weights_UD[place_F[chosen_F]] = weights_of(words_FW[chosen_F], self._num_weights)
        return found_U, weights_UD

    def weights(self, keys_U: U64) -> NDArray[np.float32]:
        """(U, D) the weights of rows, zeros for a key without one."""
        return self.find(keys_U, RowSelection(ExportCut(since=0), self._commit.version, is_base=True))[1]

    def decay_of(self, group: int) -> DayDecay:
        """The day of the commit, and the rates that led to it. Days and rates are the same in all parts."""
        return DayDecay.of(self._lives[0], group)

    def statistics_of(self, keys_U: U64) -> NDArray[np.float32]:
        """(U, 2) shows and clicks of rows on the day of the commit; 0 for a key without one."""
        value_U2 = np.zeros((len(keys_U), 2), np.float32)
        for life, place_F, words_FW in self._found(keys_U):
            value_U2[place_F] = life.present(RowStatistics.of_words(words_FW))
        return value_U2

    def _found(self, keys_U: U64) -> Iterator[tuple[TableAging, NDArray[np.int64], U32]]:
        """By part, the places of those keys that have a row, and their rows."""
        order_U = np.argsort(sort_order_of(keys_U))
        done = 0
        for part, life, keys_P in self._by_part(keys_U[order_U]):
            there_P, words_FW = self._store(part).get(keys_P)
            place_F = order_U[done : done + len(keys_P)][there_P]
            done += len(keys_P)
            stays_F = (words_FW[:, 1] != 0) & ~life.absent(words_FW)
            yield life, place_F[stays_F], words_FW[stays_F]

    def changes(self, since: int) -> ChangedKeys:
        """Keys that changed or were deleted after version `since`. Raises DeltaImpossible."""
        if any(life.shrinks for life in self._lives):
            raise DeltaImpossible(
                f"table {self._table!r}: a shrink has not removed all of its rows: no delta can be cut"
            )
        found = read_changes(self._commit.folder, self._parts, self._table, since, self._commit.version)
        if found is None:
            raise DeltaImpossible(
                f"{self._commit.name} does not record which rows of table {self._table!r} changed after version "
                f"{since}: a base is needed"
            )
        return found

    def among(
        self, changes: ChangedKeys, selection: RowSelection, deadline: Deadline
    ) -> Generator[SelectedRows, None, None]:
        """The rows that a delta takes. Raises CommitDamaged where a changed row neither exists nor was deleted."""
        for part, life, keys_P in self._by_part(changes.changed_U):
            for begin in range(0, len(keys_P), CHUNK_ROWS):
                deadline.check(f"exporting table {self._table!r}")
                keys_U = keys_P[begin : begin + CHUNK_ROWS]
                found_U, words_UW = self._store(part).get(keys_U)
                if not np.isin(keys_U[~found_U], changes.gone_G).all():
                    raise CommitDamaged(f"{self._commit.name}: rows of table {self._table!r} that changed are lost")
                yield _chosen(selection, life, keys_U[found_U], words_UW)

    def gone(self, changes: ChangedKeys, selection: RowSelection, deadline: Deadline) -> Iterator[tuple[U64, U16]]:
        """Deleted keys of which the delta has no row, with their slot groups, in order.

        Includes keys with a new row that thresholds exclude: readers must drop the old row.
        """
        done = 0
        for part, life, keys_P in self._by_part(changes.gone_G):
            group_P = changes.gone_group_G[done : done + len(keys_P)]
            done += len(keys_P)
            for begin in range(0, len(keys_P), CHUNK_ROWS):
                deadline.check(f"exporting deletions of table {self._table!r}")
                keys_U, group_U = keys_P[begin : begin + CHUNK_ROWS], group_P[begin : begin + CHUNK_ROWS]
                stays_U, words_FW = self._store(part).get(keys_U)
                kept_back_F = (words_FW[:, 1] > selection.cut.since) & ~selection.chosen(life, words_FW)
                stays_U[np.flatnonzero(stays_U)[kept_back_F]] = False
                yield keys_U[~stays_U], group_U[~stays_U]

    def _by_part(self, keys_N: U64) -> Iterator[tuple[ShardCommitPart, TableAging, U64]]:
        """Ordered keys, split by part; parts without keys are skipped. Together the parts cover all buckets."""
        bucket_N = keys_N % np.uint64(NUM_BUCKETS)
        for part, life in zip(self._parts, self._lives, strict=True):
            begin, end = np.searchsorted(bucket_N, np.array(part.buckets, np.uint64))
            if begin < end:
                yield part, life, keys_N[begin:end]

    def _live(self, folder: str) -> Path:
        return self._scratch / f"{folder}-{self._table}"

    def _store(self, part: ShardCommitPart) -> RowStore:
        """A part's store, linked into the scratch folder."""
        if part.folder not in self._stores:
            below = f"{part.folder}/{self._table}/"
            known = {path.removeprefix(below): file for path, file in part.files.items() if path.startswith(below)}
            checkpoint, live = self._commit.folder / part.folder / self._table, self._live(part.folder)
            self._stores[part.folder] = RocksRowStore.open(live, checkpoint, num_words=self._num_words, known=known)
        return self._stores[part.folder]


def _chosen(selection: RowSelection, life: TableAging, keys_U: U64, words_UW: U32) -> SelectedRows:
    considered_U = ~life.absent(words_UW) if selection.is_base else words_UW[:, 1] > selection.cut.since
    if not considered_U.all():
        keys_U, words_UW = keys_U[considered_U], words_UW[considered_U]
    by_U = selection.kept_back(life, words_UW)
    if not by_U.any():
        return SelectedRows(keys_U, words_UW, {})
    counts = np.bincount(by_U, minlength=1 + len(KEEPERS))[1:]
    kept_back = {name: int(count) for name, count in zip(KEEPERS, counts, strict=True) if count}
    return SelectedRows(keys_U[by_U == 0], words_UW[by_U == 0], kept_back)


def weights_of(words_UW: U32, num_weights: int) -> NDArray[np.float32]:
    """(U, D) the weights of rows: the first-order weight, if any, then the vector."""
    weights_UD: NDArray[np.float32] = np.ascontiguousarray(words_UW[:, HEAD : HEAD + num_weights]).view(np.float32)
    return weights_UD
