"""The commit of a warm start: version 1 of timeline t0, with one part that has all buckets.

The next run begins timeline t1 at this commit, as it does at a commit from a mirror. It is version 1, not 0: a row
exists from a version above 0 on, and a pass treats rows of its own version as touched by itself. Also, the log can then
never be taken for complete without this commit. It has only rows and dense tensors: metrics, positions and counts begin
as in a new job (trainer.train.commit_state).
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from headrace.dataset.spec.schema import Schema
from headrace.durable import REAL, writing
from headrace.errors import BadInput
from headrace.key_kernels import keys_of
from headrace.keys import NUM_BUCKETS, sign_of
from headrace.pserver.config import TableSection
from headrace.pserver.protocol.commit_parts import TableFacts
from headrace.pserver.protocol.shards import ShardCommitPart
from headrace.pserver.rows.initial_values import table_seed_of
from headrace.pserver.rows.row_format import HEAD, pack
from headrace.pserver.rows.row_settings import RowSettings
from headrace.pserver.rows.table_rows import COLUMNS, bits_of
from headrace.pserver.store.rocks_store import RocksRowStore
from headrace.pserver.store.row_store import StoredFile
from headrace.trainer.checkpoint.commits import (
    FORMAT_OF_FILES,
    CommitManifest,
    Commits,
    hash_of,
    name_of,
    sync_tree,
    write_manifest,
)
from headrace.trainer.config import TrainerJob
from headrace.trainer.exports.row_chunks import RowChunk
from headrace.trainer.importing.selection import ImportSelection, TensorSelection
from headrace.trainer.importing.source import F32, U64, ImportSource, SourceRows

# Rows of a warm start in the store's format: weights and statistics of the source, and the state of its optimizer if
# the table's is the same; otherwise a fresh one.
#
# `changed_version` is VERSION, which is the number of no pass: a row exists from a version above 0 on, and a pass
# treats rows of its own version as touched by itself. `last_seen_day` is 0, the day of the first pass: rows count as
# just seen.
#
# Shapes: U rows given, D weights of a row, W floats of a row in the slab, W' its words.

U16 = NDArray[np.uint16]
U32 = NDArray[np.uint32]

VERSION = 1
"""The version of an imported state; the job's first pass is the next one."""


class RowMaker:
    """Makes the rows of one table."""

    def __init__(self, name: str, section: TableSection, groups: Mapping[str, int], seed: int) -> None:
        """`groups`: slot groups of the table's slots, by name."""
        self.name, self._section = name, section
        self._settings = RowSettings.of(section, groups)
        self._seed, self._width = table_seed_of(name, seed), len(self._settings.start_W)
        self.num_words = HEAD + self._width

    def words(self, keys_U: U64, group_U: U16, brought: SourceRows, *, exact: bool = False) -> U32:
        """(U, W') words of rows; `exact`: weights are bits, not numbers.

        Raises BadInput for vectors of another length, and for numbers that are not finite.
        """
        if not exact:
            self._check(brought, keys_U, group_U)
        num_rows, first = len(keys_U), self._settings.first_order
        slab_UW = np.empty((num_rows, self._width), np.float32)
        self._settings.initialise(slab_UW, keys_U, group_U, 0, num_rows, self._seed)
        if first and brought.weight_R is not None:
            slab_UW[:, 0] = brought.weight_R
        whole_U = self._whole(group_U, brought)
        if self._section.dim and brought.vector_RD is not None:
            slab_UW[whole_U, first : first + self._section.dim] = brought.vector_RD[whole_U]
        self._settings.start(slab_UW, group_U, 0, num_rows)
        if brought.state_RK is not None:
            self._put_state(slab_UW, whole_U, brought.state_RK)
        if self._settings.extends:
            leave_out_vectors(slab_UW, ~whole_U & self._waits(group_U), self._settings)
        columns: dict[str, NDArray[Any]] = {name: np.zeros(num_rows, dtype) for name, dtype in COLUMNS.items()}
        columns |= {name: np.asarray(values, np.float32) for name, values in brought.statistics.items()}
        columns |= {"keys": keys_U, "group": group_U, "changed_version": np.full(num_rows, VERSION, np.uint32)}
        words_UW = np.empty((num_rows, self.num_words), np.uint32)
        bits = bits_of(slab_UW, columns)
        pack(*bits, np.arange(num_rows, dtype=np.int32), 0, num_rows, np.empty_like(keys_U), words_UW)
        return words_UW

    def _put_state(self, slab_UW: F32, whole_U: NDArray[np.bool_], state_UK: F32) -> None:
        """Write the state of the weight, and that of the vector in rows that have one."""
        begin = self._settings.num_weights
        part_K = self._settings.parts_W[begin : begin + state_UK.shape[1]]
        slab_UW[:, begin + np.flatnonzero(part_K == 0)] = state_UK[:, part_K == 0]
        slab_UW[np.ix_(whole_U, begin + np.flatnonzero(part_K == 1))] = state_UK[np.ix_(whole_U, part_K == 1)]

    def _whole(self, group_U: U16, brought: SourceRows) -> NDArray[np.bool_]:
        """(U,) whether a row has a vector. Where rows wait for theirs, zeros mean none; others get an initial one."""
        if brought.vector_RD is None:
            return np.zeros(len(group_U), np.bool_)
        whole_U = np.ones(len(group_U), np.bool_) if brought.whole_R is None else brought.whole_R
        whole: NDArray[np.bool_] = whole_U & (brought.vector_RD.any(axis=1) | ~self._waits(group_U))
        return whole

    def _waits(self, group_U: U16) -> NDArray[np.bool_]:
        """(U,) whether a row gets its vector later, once its score is high enough."""
        waits_U: NDArray[np.bool_] = ~np.isneginf(self._settings.extend_G[group_U])
        return waits_U

    def _check(self, brought: SourceRows, keys_U: U64, group_U: U16) -> None:
        vector_RD, dim = brought.vector_RD, self._section.dim
        if vector_RD is not None and len(vector_RD) and vector_RD.shape[1] != dim:
            raise BadInput(
                f"{brought.where(0)}: has dim {vector_RD.shape[1]}; table {self.name!r} of the job has {dim}"
            )
        values = {"weight": brought.weight_R, "vector": vector_RD, "state": brought.state_RK, **brought.statistics}
        for what, array in values.items():
            if array is None or np.isfinite(array).all():
                continue
            row = int(np.flatnonzero(~np.isfinite(array.reshape(len(array), -1)).all(axis=1))[0])
            slot = brought.slots[int(brought.slot_R[row])]
            sign = sign_of(int(keys_U[row]), int(group_U[row]))
            raise BadInput(f"{brought.where(row)}: slot {slot!r}, sign {sign}: its {what} is not a finite number")
        for what in ("show", "click"):
            if (below := np.flatnonzero(brought.statistics.get(what, np.zeros(0)) < 0)).size:
                raise BadInput(f"{brought.where(int(below[0]))}: its {what} is below 0")


def leave_out_vectors(slab_UW: F32, chosen_U: NDArray[np.bool_], settings: RowSettings) -> None:
    """Make rows without a vector, in the format of pserver.rows.split_slab: zeros for it, and in the last float."""
    slab_UW[np.ix_(chosen_U, settings.parts_W == 1)] = 0
    slab_UW[chosen_U, -1] = 0


def keys_in(signs: U64, group: int) -> U64:
    """(U,) keys of feature ids (`signs`) in a slot group."""
    keys = np.empty(len(signs), np.uint64)
    keys_of(np.ascontiguousarray(signs), group, keys)
    return keys


# Reads a source into row stores of the job's tables; detects duplicate keys.
#
# Memory is bounded by one batch. After an error the caller removes the folders.


@dataclass(frozen=True, slots=True)
class RememberedRows:
    """The rows of a table of histories or counters."""

    section: TableSection
    group: int
    """Slot group of the keys."""
    chunks: Iterator[RowChunk]
    """The rows as shards hold them, in `vector_RD`."""


class ImportTableWriter:
    """The store of one table, while rows are added."""

    def __init__(self, maker: RowMaker, live: Path) -> None:
        self.maker = maker
        self._store = RocksRowStore.open(live / maker.name, None, num_words=maker.num_words)
        self._count_G = np.zeros(1 << 16, np.int64)

    def add(
        self, keys_U: U64, group_U: U16, brought: SourceRows, source: ImportSource, choice: ImportSelection
    ) -> None:
        """Add rows. Raises BadInput."""
        unique_U, first_U, counts_U = np.unique(keys_U, return_index=True, return_counts=True)
        twice = unique_U[counts_U > 1]
        found_U, _ = self._store.get(keys_U)
        if len(twice) or found_U.any():
            key = int(twice[0] if len(twice) else keys_U[found_U][0])
            raise BadInput(_duplicate(key, self.maker.name, source, choice))
        self._store.write(keys_U, self.maker.words(keys_U, group_U, brought))
        self._count_G += np.bincount(group_U, minlength=len(self._count_G))

    def remember(self, memory: RememberedRows) -> None:
        """Add the rows of histories or counters, bit for bit."""
        for chunk in memory.chunks:
            group_U = np.full(len(chunk), memory.group, np.uint16)
            columns = chunk.slots, chunk.slot_R, chunk.sign_R, chunk.key_R
            brought = SourceRows(*columns, None, chunk.vector_RD, None, {}, lambda row: f"row {row}")
            self._store.write(chunk.key_R, self.maker.words(chunk.key_R, group_U, brought, exact=True))
            self._count_G[memory.group] += len(chunk)

    @property
    def facts(self) -> TableFacts:
        """Facts about the table for the commit's part."""
        by_group = {int(group): int(self._count_G[group]) for group in np.flatnonzero(self._count_G)}
        return TableFacts(sum(by_group.values()), by_group)

    def checkpoint(self, folder: Path) -> dict[str, StoredFile]:
        """Write the store to `folder`; returns its files."""
        return self._store.checkpoint(folder)

    def close(self) -> None:
        """Close the store."""
        self._store.close()


def open_tables(
    schema: Schema, tables: Mapping[str, TableSection], seed: int, live: Path
) -> dict[str, ImportTableWriter]:
    """An empty store for every table, below `live`."""

    def groups(table: str) -> dict[str, int]:
        return {slot.name: slot.group for slot in schema.sparse if slot.sparse.table == table}

    return {
        name: ImportTableWriter(RowMaker(name, section, groups(name), seed), live) for name, section in tables.items()
    }


def fill(writers: Mapping[str, ImportTableWriter], source: ImportSource, choice: ImportSelection) -> None:
    """Add all rows of a source that `choice` selects. Raises BadInput."""
    for batch in source.batches():
        for number, theirs in enumerate(batch.slots):
            choice.count(theirs, int(np.count_nonzero(batch.slot_R == number)))
        for table, writer in writers.items():
            keys_U, group_U, brought = selected(batch, choice, table)
            if len(keys_U):
                writer.add(keys_U, group_U, brought, source, choice)
    choice.check()


def selected(batch: SourceRows, choice: ImportSelection, table: str) -> tuple[U64, U16, SourceRows]:
    """The rows of a batch for a table: keys, slot groups, values."""
    slots = [choice.slot_of(name) for name in batch.slots]
    group_S = np.array([slot.group if slot and slot.sparse.table == table else -1 for slot in slots] or [-1], np.int32)
    group_R = group_S[batch.slot_R]
    rows = np.flatnonzero(group_R >= 0)
    brought, group_U = batch.select(rows), group_R[rows].astype(np.uint16)
    if brought.key_R is not None:
        return brought.key_R, group_U, brought
    assert brought.sign_R is not None
    keys_U = np.empty(len(rows), np.uint64)
    for group in np.unique(group_U).tolist():
        keys_U[group_U == group] = keys_in(brought.sign_R[group_U == group], group)
    return keys_U, group_U, brought


def _duplicate(key: int, table: str, source: ImportSource, choice: ImportSelection) -> str:
    """A message with both places of a duplicate key; reads the source again up to the second one."""
    places: list[str] = []
    for batch in source.batches():
        keys_U, _, brought = selected(batch, choice, table)
        for row in np.flatnonzero(keys_U == np.uint64(key)).tolist():
            places.append(f"{brought.where(row)} (slot {brought.slots[int(brought.slot_R[row])]!r})")
        if len(places) > 1:
            break
    return f"table {table!r}: duplicate row: {' and '.join(places[:2])}; keep one of them"


NAME = name_of("t0", VERSION, 0)
UNFINISHED = f"{NAME}.importing"
"""The commit's folder until it is complete; this is not a name of a commit."""
LIVE = Path("live") / "import"
"""Folder in the store where the tables are built."""
PART = "shard-0"
DENSE = "dense.safetensors"
PREFIX = "model."
NO_MEMORIES: Mapping[str, RememberedRows] = MappingProxyType({})
"""No histories and no counters: they begin empty."""


@dataclass(frozen=True, slots=True)
class ImportResult:
    """The result of an import, or of its dry run."""

    commit: Path
    rows: Mapping[str, int]
    """By table."""
    choice: ImportSelection
    tensors: TensorSelection


def make_first_commit(
    store: Path,
    job: TrainerJob,
    raw: Mapping[str, Any],
    source: ImportSource,
    choice: ImportSelection,
    tensors: TensorSelection,
    memories: Mapping[str, RememberedRows] = NO_MEMORIES,
) -> ImportResult:
    """Make the commit in `store`, which has none. An error leaves nothing behind. `memories`: histories and counters,
    by table.

    1. Write rows, table by table, and dense tensors to an unfinished folder. 2. Write the manifest. 3. Rename: the
    commit exists.
    """
    commits = Commits(store)
    unfinished, live = commits.folder / UNFINISHED, store / LIVE
    clear_leftovers(store)
    try:
        with writing(unfinished):
            unfinished.mkdir(parents=True)
            part = _write_rows(unfinished, live, job, source, choice, memories)  # 1
            _write_dense(unfinished / DENSE, source, tensors)
            sync_tree(unfinished)
            write_manifest(unfinished, _manifest(unfinished, job.name, raw, part, source))  # 2
            REAL.make_folder(store / "log")  # readers of commits take the lock in it
            REAL.rename(unfinished, commits.folder / NAME)  # 3
            sync_tree(commits.folder)
    except BaseException:
        clear_leftovers(store)
        raise
    shutil.rmtree(live, ignore_errors=True)
    rows = {table: facts.rows for table, facts in part.tables.items()}
    return ImportResult(commits.folder / NAME, rows, choice, tensors)


def clear_leftovers(store: Path) -> None:
    """Remove the leftovers of a killed import."""
    for path in (Commits(store).folder / UNFINISHED, store / LIVE):
        shutil.rmtree(path, ignore_errors=True)


def _write_rows(
    folder: Path,
    live: Path,
    job: TrainerJob,
    source: ImportSource,
    choice: ImportSelection,
    memories: Mapping[str, RememberedRows],
) -> ShardCommitPart:
    sections = {name: memory.section for name, memory in memories.items()}
    writers = open_tables(Schema.of(job.slots), {**job.tables, **sections}, job.seed, live)
    try:
        fill({name: writers[name] for name in job.tables}, source, choice)
        for name, memory in memories.items():
            writers[name].remember(memory)
        (folder / PART).mkdir()
        files: dict[str, StoredFile] = {}
        for name, writer in writers.items():
            found = writer.checkpoint(folder / PART / name)
            files |= {f"{PART}/{name}/{path}": file for path, file in found.items()}
        return ShardCommitPart(PART, (0, NUM_BUCKETS), {name: writer.facts for name, writer in writers.items()}, files)
    finally:
        for writer in writers.values():
            writer.close()


def _write_dense(path: Path, source: ImportSource, tensors: TensorSelection) -> None:
    found: Mapping[str, NDArray[Any]] = source.dense() if tensors.loaded else {}
    save_file({f"{PREFIX}{name}": np.ascontiguousarray(found[name]) for name in tensors.loaded}, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _manifest(
    folder: Path, job: str, raw: Mapping[str, Any], part: ShardCommitPart, source: ImportSource
) -> CommitManifest:
    files = {**part.files, DENSE: hash_of(folder / DENSE)}
    counts = {name: 0 for name in ("num_positions", "num_events", "num_samples", "skipped_steps")}
    return CommitManifest(
        format=FORMAT_OF_FILES,
        job=job,
        timeline="t0",
        version=VERSION,
        name=NAME,
        parent=None,
        generation=0,
        world=0,
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        fingerprint={},
        positions={},
        log_from=1,
        files=dict(sorted(files.items())),
        shards=[part],
        state={
            "imported": dict(source.facts()),
            "progress": {"version": VERSION, **counts, "positions": {}, "rejected": {}},
            "spec": dict(raw),
            "partitions": [],
            "skips": [],
        },
    )
