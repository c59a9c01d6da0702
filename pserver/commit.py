"""One shard's part of commits: rows that its tables hand over go to their stores, and come back from any commit.

Whether a call is due is pserver.ledger's decision, which rows are dirty pserver.table's, how rows are kept
pserver.store's. The manifest, by which a commit exists, is trainer.commits'.

    <live>/<table>/                         the store of each table, open
    <commit's folder>/shard-<k>/<table>/    a checkpoint of it
"""

import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from millrace.deadline import Deadline
from millrace.points import Point, reach
from pserver.client import U64, ShardPart
from pserver.errors import BadRequest, PserverError, StepTimedOut, StoreFailed
from pserver.row_words import groups_of
from pserver.store.base import U32, RowStore, StoredFile
from pserver.store.rocks import RocksRows
from pserver.table import Table

CLOSE_S = 10.0
"""How long a write may hold up the end of a process."""


@dataclass(slots=True)
class Snapshot:
    """What changed since the last commit, and the part of the commit that was made of it."""

    rows: Mapping[str, tuple[U64, U32]]
    """Keys and words by table."""
    facts: Mapping[str, Mapping[str, Any]]
    """ShardPart.tables, of the moment of the snapshot."""
    part: ShardPart | None = None
    folder: Path | None = None
    """Where `part` is."""


class Stores:
    """See module docstring. `snapshot` and `restore` between passes; `write` and `settle` from any thread."""

    def __init__(self, number: int, buckets: tuple[int, int], tables: Mapping[str, Table], live: Path) -> None:
        self._name, self._buckets, self._tables, self._live = f"shard-{number}", buckets, tables, live
        self._stores: dict[str, RowStore] = {}
        self._snapshot: Snapshot | None = None
        self._writing = threading.Lock()

    # --- making one ------------------------------------------------------------------------------------------------

    def snapshot(self, version: int, changes_since: int | None = None) -> int:
        """Copy the rows changed since the last commit, for one of `version`; how many."""
        if len(self._stores) < len(self._tables):
            raise BadRequest(f"{self._name} was never restored, so that it has no store to commit to")
        taken = {name: table.snapshot() for name, table in self._tables.items()}
        rows = {name: (each.keys_U, each.words_UW) for name, each in taken.items()}
        self._snapshot = Snapshot(rows, {name: _facts(table) for name, table in self._tables.items()})
        reach(Point.SNAPSHOT_TAKEN)
        return sum(len(keys_U) for keys_U, _ in rows.values())

    def write(self, folder: Path, deadline: Deadline) -> ShardPart:
        """Put the snapshot into the stores, and their whole state below `folder`, synced.

        A repeat answers the same. Raises StoreFailed; nothing is left below `folder` then, and it may be tried again.
        As urgent as training, which it costs less than its own time: behind all other threads (millrace.priority) it
        took ten times as long on busy cores, and cost more.
        """
        with self._alone(deadline):
            snapshot = self._snapshot
            if snapshot is None:
                raise BadRequest(f"{self._name} has no snapshot to write")
            if snapshot.part is None or snapshot.folder != folder:
                snapshot.part = self._write(folder / self._name, snapshot)
            return snapshot.part

    def _write(self, mine: Path, snapshot: Snapshot) -> ShardPart:
        """1. Rows to the stores. 2. Checkpoints of the stores, which sync themselves."""
        try:
            mine.mkdir()
        except OSError as error:
            raise StoreFailed(f"{mine} cannot be made: {error}") from error
        snapshot.part, snapshot.folder = None, mine.parent
        try:
            for name, (keys_U, words_UW) in snapshot.rows.items():  # 1
                self._stores[name].write(keys_U, words_UW)
                reach(Point.ROWS_WRITTEN)
            files: dict[str, StoredFile] = {}
            for name, store in self._stores.items():  # 2
                found = store.checkpoint(mine / name)
                files |= {f"{self._name}/{name}/{path}": file for path, file in found.items()}
        except PserverError:
            shutil.rmtree(mine, ignore_errors=True)
            raise
        reach(Point.CHECKPOINT_MADE)
        return ShardPart(self._name, self._buckets, snapshot.facts, files)

    def settle(self, committed: bool, deadline: Deadline) -> None:
        """The snapshot is over; a write that still runs ends first. What it left goes, unless `committed`."""
        with self._alone(deadline):
            if self._snapshot is None:
                return
            for table in self._tables.values():
                table.settle(committed)
            if not committed and self._snapshot.folder is not None:
                shutil.rmtree(self._snapshot.folder / self._name, ignore_errors=True)
            self._snapshot = None

    @contextmanager
    def _alone(self, deadline: Deadline) -> Iterator[None]:
        if not self._writing.acquire(timeout=max(deadline.left_s(), 0)):
            raise StepTimedOut(f"{self._name} is still writing a commit")
        try:
            yield
        finally:
            self._writing.release()

    # --- coming back from one ---------------------------------------------------------------------------------------

    def restore(self, folder: Path, parts: Sequence[ShardPart]) -> None:
        """Open the stores on this shard's rows of a commit; without parts, on none.

        Raises StoreDamaged; another commit may be tried then, unless a table has begun to read.
        """
        if self._stores:
            raise BadRequest(f"{self._name} is half restored, after an error; it must be started again")
        same = next((part for part in parts if part.buckets == self._buckets), None)
        found: dict[str, tuple[RowStore, dict[int, int]]] = {}
        try:
            for name in self._tables:
                if same is not None and name in same.tables:
                    found[name] = self._linked(folder, same, name)
                else:
                    found[name] = self._copied(folder, parts, name)
        except PserverError:
            for store, _ in found.values():
                store.close()
            shutil.rmtree(self._live, ignore_errors=True)
            raise
        for name, (store, rows_by_group) in found.items():
            self._stores[name] = store
            self._tables[name].attach(store, rows_by_group)

    def _linked(self, folder: Path, part: ShardPart, name: str) -> tuple[RowStore, dict[int, int]]:
        """The store of a part with the very buckets of this shard."""
        store = self._open(self._live / name, folder, part, name)
        return store, {int(group): count for group, count in part.tables[name]["rows_by_group"].items()}

    def _copied(self, folder: Path, parts: Sequence[ShardPart], name: str) -> tuple[RowStore, dict[int, int]]:
        """A new store with this shard's rows of every part."""
        store = RocksRows.open(self._live / name, None, num_words=self._tables[name].num_words)
        count_G = np.zeros(1 << 16, np.int64)
        for part in parts:
            begin, end = max(self._buckets[0], part.buckets[0]), min(self._buckets[1], part.buckets[1])
            if begin < end and name in part.tables:
                source = self._open(self._live / f"{name}.of-{part.folder}", folder, part, name)
                for keys_U, words_UW in source.scan(begin, end):
                    store.write(keys_U, words_UW)
                    count_G += np.bincount(groups_of(words_UW), minlength=len(count_G))
                source.close()
                shutil.rmtree(self._live / f"{name}.of-{part.folder}")
        return store, {int(group): int(count_G[group]) for group in np.flatnonzero(count_G)}

    def _open(self, live: Path, folder: Path, part: ShardPart, name: str) -> RowStore:
        """A store of its own, linked from a part's."""
        below = f"{part.folder}/{name}/"
        known = {path.removeprefix(below): file for path, file in part.files.items() if path.startswith(below)}
        num_words = self._tables[name].num_words
        return RocksRows.open(live, folder / part.folder / name, num_words=num_words, known=known)

    def close(self) -> None:
        """Let go of the stores, unless something still writes to them: then they end with the process."""
        with suppress(StepTimedOut), self._alone(Deadline.after(CLOSE_S)):
            for store in self._stores.values():
                store.close()


def _facts(table: Table) -> dict[str, Any]:
    by_group = table.rows_by_group
    return {"rows": sum(by_group.values()), "rows_by_group": {str(group): count for group, count in by_group.items()}}
