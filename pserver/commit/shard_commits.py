"""One shard's part of commits: it writes changed rows to the stores of its tables, and restores them from any commit.

pserver.server.pass_state decides whether a call is due, pserver.tables.table which rows are dirty, pserver.store how
rows are stored. trainer.checkpoint.commits writes the manifest, by which a commit exists.

    <live>/<table>/                             the store of each table, open
    <commit's folder>/shard-<k>/<table>/        a checkpoint of it
    .../<table>.changes/                        the changed and deleted keys, in both (pserver.commit.change_files)
    .../<table>.admission.safetensors           the counts of admission, in the commit

With `store.parts = "object"` the commit's folder is a cache of this shard alone, and its files are uploaded.
"""

import hashlib
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from headrace.deadline import Deadline
from headrace.durable import REAL, write_whole
from headrace.failpoints import Failpoint, failpoint
from headrace.keys import NUM_BUCKETS, unique_keys
from headrace.pserver.commit.change_files import FOLDER as CHANGES
from headrace.pserver.commit.change_files import ChangedKeys, ChangeFiles, read_changes
from headrace.pserver.commit.commit_files import PartObjects
from headrace.pserver.commit.handed_rows import FILE as HANDED_FILE
from headrace.pserver.commit.handed_rows import HandedRows
from headrace.pserver.commit.late_writes import LateWriter
from headrace.pserver.errors import (
    InvalidShardCall,
    PartsUnavailable,
    PserverError,
    StepTimedOut,
    StoreDamaged,
    StoreFailed,
)
from headrace.pserver.protocol.commit_parts import AgingState, TableFacts
from headrace.pserver.protocol.shards import ShardCommitPart
from headrace.pserver.rows.row_format import groups_of
from headrace.pserver.store.rocks_store import RocksRowStore, store_error_of
from headrace.pserver.store.row_store import U32, U64, RowStore, RowWriter, StoredFile
from headrace.pserver.tables.table import ShardTable, TableSnapshot
from headrace.timeline import Span, recorded

CLOSE_S = 10.0
"""How long a write may delay the end of the process."""
FETCH_S = 3600.0
"""Longest time to fetch the files of a commit."""
COPY_BYTES = 64 << 20
"""Fewest bytes of rows that a restore onto other shards writes at a time."""
ADVANCE_ROWS = 1 << 20
"""Most rows that an advance reads and writes at a time."""
ADMISSION = "{}.admission.safetensors"
"""File with the admission counts of a table."""


@dataclass(slots=True)
class ShardSnapshot:
    """The changes since the last commit, and the part of a commit made of them."""

    version: int
    changes_since: int | None
    """The commit records the changes after this version; None: no changes."""
    tables: Mapping[str, TableSnapshot]
    facts: dict[str, TableFacts]
    """ShardPart.tables, as of the snapshot."""
    part: ShardCommitPart | None = None
    folder: Path | None = None
    """The folder of `part`."""


class ShardStores:
    """Call `snapshot` and `restore` between passes, `write` and `settle` from any thread."""

    def __init__(
        self,
        number: int,
        buckets: tuple[int, int],
        tables: Mapping[str, ShardTable],
        live: Path,
        objects: PartObjects | None = None,
        cache: Path | None = None,
    ) -> None:
        """`objects`: where files are uploaded to and fetched from. `cache`: our own folder of commits, if there is one
        beside that of rank 0."""
        self._name, self._buckets, self._tables, self._live = f"shard-{number}", buckets, tables, live
        self._objects, self._cache = objects, cache
        self._uploaded: Mapping[str, int] = {}
        """The objects that the newest commit names."""
        self._stores: dict[str, RowStore] = {}
        self._changes: dict[str, ChangeFiles] = {}
        self._snapshot: ShardSnapshot | None = None
        self._late: dict[str, LateWriter] = {}
        """By table whose rows are all in memory: those that an advance took over."""
        self._writing = threading.Lock()

    # --- making a commit -------------------------------------------------------------------------------------------

    @recorded(Span.COMMIT)
    def snapshot(self, version: int, changes_since: int | None = None) -> int:
        """Copy the rows changed since the last commit; returns their number. `version` is the last closed pass.

        `changes_since`: see pserver.server.commands.TakeSnapshot.
        """
        if len(self._stores) < len(self._tables):
            raise InvalidShardCall(f"{self._name} was never restored, so it has no store to commit to")
        tables = {name: table.snapshots.take() for name, table in self._tables.items()}
        facts = {name: _facts(taken) for name, taken in tables.items()}
        self._snapshot = ShardSnapshot(version, changes_since, tables, facts)
        failpoint(Failpoint.SNAPSHOT_TAKEN)
        return sum(len(taken.keys_U) for taken in tables.values())

    @recorded(Span.COMMIT)
    def write(self, folder: Path, deadline: Deadline) -> ShardCommitPart:
        """Write the snapshot to the stores, and their whole state below `folder`, synced.

        A repeat returns the same part. Raises StoreFailed; nothing is left below `folder` then, and the call may be
        repeated. It runs at the priority of training: at a lower one (headrace.priority) it took ten times as long on
        busy cores and delayed training more.
        """
        folder = self._own(folder)
        with self._alone(deadline):
            snapshot = self._snapshot
            if snapshot is None:
                raise InvalidShardCall(f"{self._name} has no snapshot to write")
            if snapshot.part is None or snapshot.folder != folder:
                snapshot.part = self._write(folder / self._name, snapshot, deadline)
            return snapshot.part

    def hand_over(self, folder: Path, deadline: Deadline) -> ShardCommitPart:
        """Write the snapshot below `folder` for the shards of the next generation: rows and facts, and no store.

        Nothing is synced, and the snapshot stays in flight until `settle`. It may be repeated. Raises StoreFailed.
        """
        with self._alone(deadline):
            snapshot = self._snapshot
            if snapshot is None:
                raise InvalidShardCall(f"{self._name} has no snapshot to hand over")
            mine, files, facts = folder / self._name, dict[str, StoredFile](), dict[str, TableFacts]()
            with _translated(mine):
                mine.mkdir(exist_ok=True)
            for name, taken in snapshot.tables.items():
                rows = HandedRows(taken.keys_U, taken.words_UW, taken.deleted_keys_U, taken.deleted_group_U)
                rows.write(mine / HANDED_FILE.format(name))
                facts[name] = msgspec.structs.replace(snapshot.facts[name], handed=self._changes[name].version)
                files |= self._write_admission(name, taken, mine, sync=False)
            failpoint(Failpoint.ROWS_HANDED)
            return ShardCommitPart(self._name, self._buckets, facts, files)

    def _own(self, folder: Path) -> Path:
        """The folder of a commit, in the cache if there is one."""
        return folder if self._cache is None else self._cache / folder.name

    def _write(self, mine: Path, snapshot: ShardSnapshot, deadline: Deadline) -> ShardCommitPart:
        """1. Write and delete rows in the stores. 2. Write the changes and the admission counts of each table.

        3. Make checkpoints of the stores, which sync themselves and the folder. 4. Upload what is new.
        """
        with _translated(mine):
            mine.mkdir(parents=self._cache is not None)
        snapshot.part, snapshot.folder = None, mine.parent
        files: dict[str, StoredFile] = {}
        try:
            for late in self._late.values():
                late.finish()
            for name, taken in snapshot.tables.items():  # 1
                self._stores[name].write(taken.keys_U, taken.words_UW, taken.gone()[0])
                failpoint(Failpoint.ROWS_WRITTEN)
            for name, taken in snapshot.tables.items():  # 2
                files |= self._write_changes(name, taken, snapshot, mine)
                files |= self._write_admission(name, taken, mine)
            for name, store in self._stores.items():  # 3
                found = store.checkpoint(mine / name)
                files |= {f"{self._name}/{name}/{path}": file for path, file in found.items()}
            failpoint(Failpoint.CHECKPOINT_MADE)
            objects = self._upload(mine.parent, files, deadline)  # 4
        except PserverError:
            shutil.rmtree(mine, ignore_errors=True)
            raise
        return ShardCommitPart(self._name, self._buckets, snapshot.facts, files, objects)

    def _upload(self, folder: Path, files: Mapping[str, StoredFile], deadline: Deadline) -> dict[str, int]:
        """Raises StoreFailed where the store does not answer: this commit fails, and the next one may succeed."""
        if self._objects is None:
            return {}
        try:
            objects = self._objects.upload(folder, files, self._uploaded, deadline)
        except PartsUnavailable as error:
            raise StoreFailed(str(error)) from error
        failpoint(Failpoint.PART_UPLOADED)
        return objects

    def _write_changes(
        self, name: str, taken: TableSnapshot, snapshot: ShardSnapshot, mine: Path
    ) -> dict[str, StoredFile]:
        below = CHANGES.format(name)
        changes = ChangedKeys.joined([])
        if snapshot.changes_since is not None:
            changes = ChangedKeys.of(taken.keys_U, taken.deleted_keys_U, taken.deleted_group_U)
        made = self._changes[name].write(snapshot.version, changes, snapshot.changes_since, mine / below)
        path = f"{self._name}/{below}"
        changed = [each.below(path) for each in made]
        snapshot.facts[name] = msgspec.structs.replace(snapshot.facts[name], changes=changed)
        return {f"{path}/{each.name}": each.stored for each in made}

    def _write_admission(
        self, name: str, taken: TableSnapshot, mine: Path, *, sync: bool = True
    ) -> dict[str, StoredFile]:
        if not taken.admission:
            return {}
        file, data = ADMISSION.format(name), save(dict(taken.admission))
        try:
            if sync:
                write_whole(REAL, mine / file, data)
            else:
                (mine / file).write_bytes(data)
        except OSError as error:
            raise store_error_of(f"{mine / file}: {error}") from error
        return {f"{self._name}/{file}": StoredFile(hashlib.sha256(data).hexdigest(), len(data))}

    def settle(self, committed: bool, deadline: Deadline) -> None:
        """End the snapshot, after a write that still runs. Its files are removed unless `committed`."""
        with self._alone(deadline):
            if self._snapshot is None:
                return
            for name, table in self._tables.items():
                table.snapshots.settle(committed)
                self._changes[name].settle(committed)
            if not committed and self._snapshot.folder is not None:
                shutil.rmtree(self._snapshot.folder / self._name, ignore_errors=True)
            if committed and self._snapshot.part is not None:
                self._uploaded = self._snapshot.part.objects
                self._keep_only(self._snapshot.folder)
            self._snapshot = None

    def _keep_only(self, folder: Path | None) -> None:
        """Remove the other commits from our cache: the object store has them."""
        for path in () if self._cache is None else self._cache.iterdir():
            if path != folder:
                shutil.rmtree(path, ignore_errors=True)

    @contextmanager
    def _alone(self, deadline: Deadline) -> Iterator[None]:
        if not self._writing.acquire(timeout=max(deadline.left_s(), 0)):
            raise StepTimedOut(f"{self._name} is still writing a commit")
        try:
            yield
        finally:
            self._writing.release()

    # --- restoring a commit -----------------------------------------------------------------------------------------

    def restore(self, folder: Path, parts: Sequence[ShardCommitPart], version: int) -> None:
        """Open the stores with this shard's rows of the commit of `version`; empty ones without parts.

        Raises StoreDamaged. Another commit may be tried then, unless a table has begun to load rows.
        """
        if self._stores:
            raise InvalidShardCall(f"{self._name} is half restored after an error; restart the shard")
        folder = self._fetched(folder, parts)
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
            lives = _lives(ours, name)
            self._tables[name].snapshots.attach(store, rows_by_group, lives, admission[name])

    def advance(self, folder: Path, parts: Sequence[ShardCommitPart], version: int) -> None:
        """Go on from the restored commit to the later one of `version`: rows, counts and files are as after a
        `restore` of it. Before the first pass.

        Raises InvalidShardCall, with nothing done, if the commit does not record all changes in between. After
        StoreDamaged and StoreFailed the shard must be restarted.
        """
        ours = [part for part in parts if self._shares(part)]
        folder = self._fetched(folder, parts)
        changed = {name: self._changed_keys(folder, ours, name, version) for name in self._tables}
        admission = {name: self._admission(folder, ours, name) for name in self._tables}
        for name, keys_U in changed.items():
            table = self._tables[name]
            lives = _lives(ours, name)
            swept_U = table.snapshots.begin_advance(lives, admission[name])
            for part in ours:
                self._take_over(folder, part, name, unique_keys(keys_U, swept_U), swept_U)
            shutil.rmtree(self._live / CHANGES.format(name), ignore_errors=True)
            self._changes[name] = ChangeFiles(self._live / CHANGES.format(name), version)
            self._changes[name].restore(folder, parts, name, self._buckets)

    def take_handed(self, folder: Path, parts: Sequence[ShardCommitPart]) -> None:
        """Go on from the restored commit to the state that the shards before us handed over (`hand_over`), as if we had
        trained to it: its rows are dirty. Before the first pass. For tables whose rows are all in memory.

        Raises InvalidShardCall, with nothing done, if that state builds on another commit.
        """
        ours = [part for part in parts if self._shares(part)]
        for name, changes in self._changes.items():
            if found := {part.tables[name].handed for part in ours} - {changes.version}:
                raise InvalidShardCall(
                    f"{folder}: has the rows of table {name!r} since version {found.pop()}, not {changes.version}"
                )
        for name, table in self._tables.items():
            lives = _lives(ours, name)
            table.snapshots.begin_handed(lives, self._admission(folder, ours, name))
            for part in ours:
                rows = HandedRows.read(folder / part.folder / HANDED_FILE.format(name)).of_buckets(*self._buckets)
                table.snapshots.take_handed(rows.keys_U, rows.words_UW, rows.gone_G, rows.gone_group_G)

    def _changed_keys(self, folder: Path, parts: Sequence[ShardCommitPart], name: str, version: int) -> U64:
        """The keys of this shard that changed or were deleted since the restored version."""
        since = self._changes[name].version if name in self._stores else None
        found = None if since is None else read_changes(folder, parts, name, since, version)
        if found is None:
            raise InvalidShardCall(f"{folder}: does not record the changes of table {name!r} since version {since}")
        mine = found.of_buckets(*self._buckets)
        return unique_keys(mine.changed_U, mine.gone_G)

    def _take_over(self, folder: Path, part: ShardCommitPart, name: str, keys_U: U64, swept_U: U64) -> None:
        """Replace rows by those of one part, and delete those that it does not have."""
        bucket_U = keys_U % np.uint64(NUM_BUCKETS)
        keys_U = keys_U[(part.buckets[0] <= bucket_U) & (bucket_U < part.buckets[1])]
        of, table = self._live / f"{name}.of-{part.folder}", self._tables[name]
        store: RowWriter = self._stores[name]
        if table.section.memory is None:  # else rows are read from the store
            store = self._late.setdefault(name, LateWriter(self._stores[name]))
        with closing(self._open(of, folder, part, name)) as source:
            for begin in range(0, len(keys_U), ADVANCE_ROWS):
                chunk_C = keys_U[begin : begin + ADVANCE_ROWS]
                swept_C = np.isin(chunk_C, swept_U)
                table.snapshots.take_over(store, chunk_C, swept_C, *source.get(chunk_C))
        shutil.rmtree(of)

    def _fetched(self, folder: Path, parts: Sequence[ShardCommitPart]) -> Path:
        """The folder of a commit with the files of the parts that we read: where they are objects, our own."""
        uploaded = {sha256: generation for part in parts for sha256, generation in part.objects.items()}
        if self._objects is None or not uploaded:
            return folder
        folder = self._own(folder)
        files = {path: file for part in parts if self._shares(part) for path, file in part.files.items()}
        self._objects.complete(folder, files, uploaded, Deadline.after(FETCH_S))
        self._uploaded = uploaded
        return folder

    def _shares(self, part: ShardCommitPart) -> bool:
        """Whether a part has buckets of this shard."""
        return part.buckets[0] < self._buckets[1] and self._buckets[0] < part.buckets[1]

    def _admission(
        self, folder: Path, parts: Sequence[ShardCommitPart], name: str
    ) -> list[tuple[int, Mapping[str, NDArray[Any]]]]:
        """The admission counts of a table in the parts of a commit, with the first bucket of each."""
        found: list[tuple[int, Mapping[str, NDArray[Any]]]] = []
        for part in parts:
            file = f"{part.folder}/{ADMISSION.format(name)}"
            if file in part.files:
                try:
                    data = (folder / file).read_bytes()
                except OSError as error:
                    raise store_error_of(f"{folder / file}: {error}") from error
                if hashlib.sha256(data).hexdigest() != part.files[file].sha256:
                    raise StoreDamaged(f"{folder / file}: not what was committed")
                found.append((part.buckets[0], load(data)))
        return found

    def _linked(self, folder: Path, part: ShardCommitPart, name: str) -> tuple[RowStore, dict[int, int]]:
        """A store linked from the part that has exactly the buckets of this shard."""
        store = self._open(self._live / name, folder, part, name)
        return store, dict(part.tables[name].rows_by_group)

    def _copied(self, folder: Path, parts: Sequence[ShardCommitPart], name: str) -> tuple[RowStore, dict[int, int]]:
        """A new store with this shard's rows, copied from every part."""
        store = RocksRowStore.open(self._live / name, None, num_words=self._tables[name].snapshots.num_words)
        count_G = np.zeros(1 << 16, np.int64)
        with ExitStack() as after_error:
            after_error.callback(store.close)
            for part in parts:
                begin, end = max(self._buckets[0], part.buckets[0]), min(self._buckets[1], part.buckets[1])
                if begin < end and name in part.tables:
                    of = self._live / f"{name}.of-{part.folder}"
                    with closing(self._open(of, folder, part, name)) as source:
                        for keys_U, words_UW in _joined(source.scan(begin, end)):
                            store.write(keys_U, words_UW)
                            count_G += np.bincount(groups_of(words_UW), minlength=len(count_G))
                    shutil.rmtree(of)
            after_error.pop_all()
        return store, {int(group): int(count_G[group]) for group in np.flatnonzero(count_G)}

    def _open(self, live: Path, folder: Path, part: ShardCommitPart, name: str) -> RowStore:
        """A new store, linked from the files of a part."""
        below = f"{part.folder}/{name}/"
        known = {path.removeprefix(below): file for path, file in part.files.items() if path.startswith(below)}
        num_words = self._tables[name].snapshots.num_words
        return RocksRowStore.open(live, folder / part.folder / name, num_words=num_words, known=known)

    def close(self) -> None:
        """Close the stores. If a write still runs, they stay open until the process ends."""
        with suppress(StepTimedOut), self._alone(Deadline.after(CLOSE_S)):
            for store in self._stores.values():
                store.close()


@contextmanager
def _translated(mine: Path) -> Iterator[None]:
    """Raises StoreFailed where the folder `mine` cannot be created."""
    try:
        yield
    except OSError as error:
        raise StoreFailed(f"{mine} cannot be created: {error}") from error


def _joined(chunks: Iterable[tuple[U64, U32]]) -> Iterator[tuple[U64, U32]]:
    """Chunks of keys and rows, joined to COPY_BYTES or more: every write of a copy makes a file, which stays open."""
    held: list[tuple[U64, U32]] = []
    num_bytes = 0
    for chunk in chunks:
        held.append(chunk)
        num_bytes += chunk[1].nbytes
        if num_bytes >= COPY_BYTES:
            yield _concatenated(held)
            held, num_bytes = [], 0
    if held:
        yield _concatenated(held)


def _concatenated(held: Sequence[tuple[U64, U32]]) -> tuple[U64, U32]:
    return np.concatenate([keys_U for keys_U, _ in held]), np.concatenate([words_UW for _, words_UW in held])


def _facts(taken: TableSnapshot) -> TableFacts:
    return TableFacts(sum(taken.rows_by_group.values()), taken.rows_by_group, taken.life)


def _lives(parts: Sequence[ShardCommitPart], table: str) -> list[AgingState]:
    """How the rows of a table have aged, on the shards whose parts say so."""
    found = (part.tables[table].life for part in parts if table in part.tables)
    return [each for each in found if each is not None]
