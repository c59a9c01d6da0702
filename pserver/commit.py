"""One shard's part of commits: rows that its tables hand over go to their stores, and come back from any commit.

Whether a call is due is pserver.ledger's decision, which rows are dirty pserver.table's, how rows are kept
pserver.store's. The manifest, by which a commit exists, is trainer.commits'.

    <live>/<table>/                             the store of each table, open
    <commit's folder>/shard-<k>/<table>/        a checkpoint of it
    .../<table>.changes/                        which keys changed and went, in both (pserver.changes)
    .../<table>.admission.safetensors           what admission has counted, in the commit
"""

import hashlib
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from millrace.deadline import Deadline
from millrace.durable import REAL, write_whole
from millrace.points import Point, reach
from pserver.changes import FOLDER as CHANGES
from pserver.changes import ChangeFiles, Changes
from pserver.client import ShardPart
from pserver.errors import BadRequest, PserverError, StepTimedOut, StoreDamaged, StoreFailed
from pserver.row_words import groups_of
from pserver.store.base import RowStore, StoredFile
from pserver.store.rocks import RocksRows, error_of
from pserver.table import Table, TableSnapshot

CLOSE_S = 10.0
"""How long a write may hold up the end of a process."""
ADMISSION = "{}.admission.safetensors"
"""What the admission of a table has counted."""


@dataclass(slots=True)
class Snapshot:
    """What changed since the last commit, and the part of the commit that was made of it."""

    version: int
    changes_since: int | None
    """Oldest version whose successors' changes are told; None: none are."""
    tables: Mapping[str, TableSnapshot]
    facts: Mapping[str, dict[str, Any]]
    """ShardPart.tables, of the moment of the snapshot."""
    part: ShardPart | None = None
    folder: Path | None = None
    """Where `part` is."""


class Stores:
    """See module docstring. `snapshot` and `restore` between passes; `write` and `settle` from any thread."""

    def __init__(self, number: int, buckets: tuple[int, int], tables: Mapping[str, Table], live: Path) -> None:
        self._name, self._buckets, self._tables, self._live = f"shard-{number}", buckets, tables, live
        self._stores: dict[str, RowStore] = {}
        self._changes: dict[str, ChangeFiles] = {}
        self._snapshot: Snapshot | None = None
        self._writing = threading.Lock()

    # --- making one ------------------------------------------------------------------------------------------------

    def snapshot(self, version: int, changes_since: int | None = None) -> int:
        """Copy the rows changed since the last commit; how many. `version` is the pass closed last.

        `changes_since`: see pserver.client.Shards.snapshot.
        """
        if len(self._stores) < len(self._tables):
            raise BadRequest(f"{self._name} was never restored, so that it has no store to commit to")
        tables = {name: table.snapshot() for name, table in self._tables.items()}
        facts = {name: _facts(taken) for name, taken in tables.items()}
        self._snapshot = Snapshot(version, changes_since, tables, facts)
        reach(Point.SNAPSHOT_TAKEN)
        return sum(len(taken.keys_U) for taken in tables.values())

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
        """1. Rows to the stores, and out of them. 2. What else a table has, in files of its own.

        3. Checkpoints of the stores, which sync themselves and the folder.
        """
        try:
            mine.mkdir()
        except OSError as error:
            raise StoreFailed(f"{mine} cannot be made: {error}") from error
        snapshot.part, snapshot.folder = None, mine.parent
        files: dict[str, StoredFile] = {}
        try:
            for name, taken in snapshot.tables.items():  # 1
                self._stores[name].write(taken.keys_U, taken.words_UW, taken.gone()[0])
                reach(Point.ROWS_WRITTEN)
            for name, taken in snapshot.tables.items():  # 2
                files |= self._write_changes(name, taken, snapshot, mine)
                files |= self._write_admission(name, taken, mine)
            for name, store in self._stores.items():  # 3
                found = store.checkpoint(mine / name)
                files |= {f"{self._name}/{name}/{path}": file for path, file in found.items()}
        except PserverError:
            shutil.rmtree(mine, ignore_errors=True)
            raise
        reach(Point.CHECKPOINT_MADE)
        return ShardPart(self._name, self._buckets, snapshot.facts, files)

    def _write_changes(self, name: str, taken: TableSnapshot, snapshot: Snapshot, mine: Path) -> dict[str, StoredFile]:
        below = CHANGES.format(name)
        changes = Changes.joined([])
        if snapshot.changes_since is not None:
            changes = Changes.of(taken.keys_U, taken.went_keys_U, taken.went_group_U)
        made = self._changes[name].write(snapshot.version, changes, snapshot.changes_since, mine / below)
        path = f"{self._name}/{below}"
        snapshot.facts[name]["changes"] = [each.message(path) for each in made]
        return {f"{path}/{each.name}": each.stored for each in made}

    def _write_admission(self, name: str, taken: TableSnapshot, mine: Path) -> dict[str, StoredFile]:
        if not taken.admission:
            return {}
        file, data = ADMISSION.format(name), save(dict(taken.admission))
        try:
            write_whole(REAL, mine / file, data)
        except OSError as error:
            raise error_of(f"{mine / file}: {error}") from error
        return {f"{self._name}/{file}": StoredFile(hashlib.sha256(data).hexdigest(), len(data))}

    def settle(self, committed: bool, deadline: Deadline) -> None:
        """The snapshot is over; a write that still runs ends first. What it left goes, unless `committed`."""
        with self._alone(deadline):
            if self._snapshot is None:
                return
            for name, table in self._tables.items():
                table.settle(committed)
                self._changes[name].settle(committed)
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

    def restore(self, folder: Path, parts: Sequence[ShardPart], version: int) -> None:
        """Open the stores on this shard's rows of a commit, of `version`; without parts, on none.

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
                self._changes[name] = ChangeFiles(self._live / CHANGES.format(name), version if parts else 0)
                self._changes[name].restore(folder, parts, name, self._buckets)
            ours = [part for part in parts if same in (None, part) and self._shares(part)]
            admission = {name: self._admission(folder, ours, name) for name in self._tables}
        except PserverError:
            for store, _ in found.values():
                store.close()
            shutil.rmtree(self._live, ignore_errors=True)
            raise
        for name, (store, rows_by_group) in found.items():
            self._stores[name] = store
            lives = [part.tables[name]["life"] for part in ours if "life" in part.tables.get(name, {})]
            self._tables[name].attach(store, rows_by_group, lives, admission[name])

    def _shares(self, part: ShardPart) -> bool:
        """Whether a part has buckets of this shard."""
        return part.buckets[0] < self._buckets[1] and self._buckets[0] < part.buckets[1]

    def _admission(
        self, folder: Path, parts: Sequence[ShardPart], name: str
    ) -> list[tuple[int, Mapping[str, NDArray[Any]]]]:
        """What parts of a commit have counted for a table's admission, with the first bucket of each."""
        found: list[tuple[int, Mapping[str, NDArray[Any]]]] = []
        for part in parts:
            file = f"{part.folder}/{ADMISSION.format(name)}"
            if file in part.files:
                try:
                    data = (folder / file).read_bytes()
                except OSError as error:
                    raise error_of(f"{folder / file}: {error}") from error
                if hashlib.sha256(data).hexdigest() != part.files[file].sha256:
                    raise StoreDamaged(f"{folder / file}: not what was committed")
                found.append((part.buckets[0], load(data)))
        return found

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


def _facts(taken: TableSnapshot) -> dict[str, Any]:
    by_group = taken.rows_by_group
    return {
        "rows": sum(by_group.values()),
        "rows_by_group": {str(group): count for group, count in by_group.items()},
        "life": dict(taken.life),
    }
