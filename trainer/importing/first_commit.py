"""The commit of a warm start: version 1 of timeline t0, with one part that has all buckets.

The next run begins timeline t1 at this commit, as it does at a commit from a mirror. It is version 1, not 0: a row
exists from a version above 0 on, and a pass treats rows of its own version as touched by itself. Also, the log can then
never be taken for complete without this commit. It has only rows and dense tensors: metrics, positions and counts begin
as in a new job (trainer.train.commit_state).
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from headrace.codec import plain
from headrace.dataset.spec.schema import Schema
from headrace.durable import REAL, writing
from headrace.keys import NUM_BUCKETS
from headrace.pserver.protocol.shards import ShardCommitPart
from headrace.pserver.store.row_store import StoredFile
from headrace.trainer.checkpoint.commits import FORMAT_OF_FILES, Commits, hash_of, name_of, sync_tree, write_manifest
from headrace.trainer.config import TrainerJob
from headrace.trainer.importing.initial_rows import VERSION
from headrace.trainer.importing.selection import ImportSelection, TensorSelection
from headrace.trainer.importing.source import ImportSource
from headrace.trainer.importing.table_stores import RememberedRows, fill, open_tables

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
) -> dict[str, Any]:
    files = {**part.files, DENSE: hash_of(folder / DENSE)}
    counts = {name: 0 for name in ("num_positions", "num_events", "num_samples", "skipped_steps")}
    return {
        "format": FORMAT_OF_FILES,
        "job": job,
        "timeline": "t0",
        "version": VERSION,
        "name": NAME,
        "parent": None,
        "generation": 0,
        "world": 0,
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "fingerprint": {},
        "positions": {},
        "log_from": 1,
        "files": plain(dict(sorted(files.items()))),
        "shards": [plain(part)],
        "state": {
            "imported": dict(source.facts()),
            "progress": {"version": VERSION, **counts, "positions": {}, "rejected": {}},
            "spec": dict(raw),
            "partitions": [],
            "skips": [],
        },
    }
