"""The rows of one table that an export takes from a commit, and those that went: chosen, in the order of stores.

A base reads every row, a delta those that a list of changed keys names. The stores of a commit are linked into a
scratch folder and opened there; nothing of the commit is touched. How rows are written is trainer.exports.tables'
matter.

Shapes: U rows of a chunk, W words of a row, P keys of one part, G keys that went.
"""

import shutil
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from millrace.deadline import Deadline
from millrace.errors import MillraceError
from millrace.keys import NUM_BUCKETS
from pserver.aging import KEEPERS, Life
from pserver.changes import Changes, read_changes
from pserver.client import U16, U64, ShardPart
from pserver.config import TableSection
from pserver.operations import Cut
from pserver.optim import optimizer_of
from pserver.row_words import HEAD
from pserver.store.base import U32, RowStore, order_of
from pserver.store.rocks import RocksRows
from trainer.commits import Commit, CommitDamaged

U8 = NDArray[np.uint8]

CHUNK_ROWS = 65_536
"""Rows of a delta that are looked up at once."""


class NotCovered(MillraceError):
    """What a delta needs is not there any more, or not yet: trying again cannot help, a base would do."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which rows of a table an export takes."""

    cut: Cut
    version: int
    """Of the commit, at which it was cut."""
    is_base: bool

    def kept_back(self, life: Life, words_UW: U32) -> U8:
        """(U,) what keeps back rows that are there, and, for a delta, changed: 0, or 1 + its place in KEEPERS.

        Thresholds of 0 keep nothing back.
        """
        cut = Cut(since=0, base_threshold=self.cut.base_threshold) if self.is_base else self.cut
        if cut.base_threshold <= 0 and cut.delta_threshold <= 0 and cut.delta_keep_days is None:
            return np.zeros(len(words_UW), np.uint8)
        return life.kept_back(words_UW, cut, self.version)

    def chosen(self, life: Life, words_UW: U32) -> NDArray[np.bool_]:
        """(U,) which it takes of rows that are there, and, for a delta, changed."""
        chosen_U: NDArray[np.bool_] = self.kept_back(life, words_UW) == 0
        return chosen_U


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of an export in order, and what was met on the way to them."""

    keys_U: U64
    words_UW: U32
    kept_back: Mapping[str, int]
    """Rows that could have been chosen (of a base those that are there, of a delta those that changed), by KEEPERS."""


class TableRows:
    """One table of a commit; a context, in which stores stay open once they were read."""

    def __init__(
        self, commit: Commit, table: str, section: TableSection, groups: Mapping[str, int], scratch: Path
    ) -> None:
        """`groups` are the slot groups of the table's slots, by name."""
        self._commit, self._table, self._scratch = commit, table, scratch
        self._num_weights = int(section.first_order) + section.dim
        self._num_words = HEAD + self._num_weights + len(optimizer_of(section).start_state)
        self._parts = sorted((part for part in commit.shards if table in part.tables), key=lambda part: part.buckets)
        self._lives = [Life.of(section, groups, part.tables[table].get("life")) for part in self._parts]
        self._stores: dict[str, RowStore] = {}

    def __enter__(self) -> "TableRows":
        return self

    def __exit__(self, *_: object) -> None:
        for folder, store in self._stores.items():
            store.close()
            shutil.rmtree(self._live(folder), ignore_errors=True)
        self._stores = {}

    @property
    def num_rows(self) -> int:
        """Rows of the commit, those among them that are absent."""
        return sum(int(part.tables[self._table]["rows"]) for part in self._parts)

    def all(self, selection: Selection, deadline: Deadline) -> Generator[Rows, None, None]:
        """Every row that a base takes."""
        for part, life in zip(self._parts, self._lives, strict=True):
            for keys_U, words_UW in self._store(part).scan():
                deadline.check(f"exporting table {self._table!r}")
                yield _chosen(selection, life, keys_U, words_UW)

    def find(self, keys_U: U64, selection: Selection) -> tuple[NDArray[np.bool_], NDArray[np.float32]]:
        """(U,) whether a base has rows of some keys, and (U, D) their weights, zeros where it has none."""
        found_U, weights_UD = np.zeros(len(keys_U), np.bool_), np.zeros((len(keys_U), self._num_weights), np.float32)
        order_U = np.argsort(order_of(keys_U))
        done = 0
        for part, life, keys_P in self._by_part(keys_U[order_U]):
            there_P, words_FW = self._store(part).get(keys_P)
            place_F = order_U[done : done + len(keys_P)][there_P]
            done += len(keys_P)
            chosen_F = selection.chosen(life, words_FW) & ~life.absent(words_FW)
            found_U[place_F[chosen_F]] = True
            weights_UD[place_F[chosen_F]] = weights_of(words_FW[chosen_F], self._num_weights)
        return found_U, weights_UD

    def changes(self, since: int) -> Changes:
        """Keys changed and gone after version `since`. Raises NotCovered."""
        if any(life.shrinks for life in self._lives):
            raise NotCovered(f"table {self._table!r}: rows that a shrink took are not removed yet: no delta can be cut")
        found = read_changes(self._commit.folder, self._parts, self._table, since, self._commit.version)
        if found is None:
            raise NotCovered(
                f"{self._commit.name} does not tell which rows of table {self._table!r} changed after version {since}: "
                "a base is needed"
            )
        return found

    def among(self, changes: Changes, selection: Selection, deadline: Deadline) -> Generator[Rows, None, None]:
        """The rows that a delta takes. Raises CommitDamaged where a changed one is neither there nor gone."""
        for part, life, keys_P in self._by_part(changes.changed_U):
            for begin in range(0, len(keys_P), CHUNK_ROWS):
                deadline.check(f"exporting table {self._table!r}")
                keys_U = keys_P[begin : begin + CHUNK_ROWS]
                found_U, words_UW = self._store(part).get(keys_U)
                if not np.isin(keys_U[~found_U], changes.gone_G).all():
                    raise CommitDamaged(f"{self._commit.name}: rows of table {self._table!r} that changed are lost")
                yield _chosen(selection, life, keys_U[found_U], words_UW)

    def gone(self, changes: Changes, selection: Selection, deadline: Deadline) -> Iterator[tuple[U64, U16]]:
        """Keys that went and of which the delta has no row, with their slot groups, in order.

        It has none either where thresholds keep back a row that was made since: what is served of the one before goes.
        """
        done = 0
        for part, life, keys_P in self._by_part(changes.gone_G):
            group_P = changes.gone_group_G[done : done + len(keys_P)]
            done += len(keys_P)
            for begin in range(0, len(keys_P), CHUNK_ROWS):
                deadline.check(f"exporting what went from table {self._table!r}")
                keys_U, group_U = keys_P[begin : begin + CHUNK_ROWS], group_P[begin : begin + CHUNK_ROWS]
                stays_U, words_FW = self._store(part).get(keys_U)
                kept_back_F = (words_FW[:, 1] > selection.cut.since) & ~selection.chosen(life, words_FW)
                stays_U[np.flatnonzero(stays_U)[kept_back_F]] = False
                yield keys_U[~stays_U], group_U[~stays_U]

    def _by_part(self, keys_N: U64) -> Iterator[tuple[ShardPart, Life, U64]]:
        """Keys in order, cut where parts end; parts without any are left out. Together the parts have all buckets."""
        bucket_N = keys_N % np.uint64(NUM_BUCKETS)
        for part, life in zip(self._parts, self._lives, strict=True):
            begin, end = np.searchsorted(bucket_N, np.array(part.buckets, np.uint64))
            if begin < end:
                yield part, life, keys_N[begin:end]

    def _live(self, folder: str) -> Path:
        return self._scratch / f"{folder}-{self._table}"

    def _store(self, part: ShardPart) -> RowStore:
        """A part's store, linked into the scratch folder."""
        if part.folder not in self._stores:
            below = f"{part.folder}/{self._table}/"
            known = {path.removeprefix(below): file for path, file in part.files.items() if path.startswith(below)}
            checkpoint, live = self._commit.folder / part.folder / self._table, self._live(part.folder)
            self._stores[part.folder] = RocksRows.open(live, checkpoint, num_words=self._num_words, known=known)
        return self._stores[part.folder]


def _chosen(selection: Selection, life: Life, keys_U: U64, words_UW: U32) -> Rows:
    considered_U = ~life.absent(words_UW) if selection.is_base else words_UW[:, 1] > selection.cut.since
    if not considered_U.all():
        keys_U, words_UW = keys_U[considered_U], words_UW[considered_U]
    by_U = selection.kept_back(life, words_UW)
    if not by_U.any():
        return Rows(keys_U, words_UW, {})
    counts = np.bincount(by_U, minlength=1 + len(KEEPERS))[1:]
    kept_back = {name: int(count) for name, count in zip(KEEPERS, counts, strict=True) if count}
    return Rows(keys_U[by_U == 0], words_UW[by_U == 0], kept_back)


def weights_of(words_UW: U32, num_weights: int) -> NDArray[np.float32]:
    """(U, D) the weights of rows: the first-order weight, if any, then the vector."""
    weights_UD: NDArray[np.float32] = np.ascontiguousarray(words_UW[:, HEAD : HEAD + num_weights]).view(np.float32)
    return weights_UD
