"""Commits with real stores of rows and lists of changes, without a trainer: what an exporter reads.

Rows are given by (slot, sign), as of slots a, b, c of groups 0, 1, 7 in a table "default" of dim 3.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from headrace.keys import NUM_BUCKETS, key_of_reference
from headrace.pserver.commit.change_files import ChangedKeys, ChangeFiles
from headrace.pserver.config import TableSection
from headrace.pserver.lifecycle.aging import TableAging
from headrace.pserver.protocol.commit_parts import TableFacts
from headrace.pserver.protocol.shards import ShardCommitPart
from headrace.pserver.rows.row_format import HEAD
from headrace.pserver.rows.row_settings import optimizer_of
from headrace.pserver.store.rocks_store import RocksRowStore
from headrace.trainer.checkpoint.commits import Commit, hash_of, name_of, read_commit, write_manifest
from headrace.trainer.config import ExportSection
from headrace.trainer.exports.export_messages import ExportRequest, ParentExport
from tests.fakes.manifests import manifest_of

GROUPS = {"a": 0, "b": 1, "c": 7}
TABLE = "default"


def key_of(row: tuple[str, int]) -> int:
    return key_of_reference(row[1], GROUPS[row[0]])


def words_of(section: TableSection, slot: str, weights, version: int, day=0, show=1.0, click=0.0, delta=1.0):
    """The words of a row."""
    start = optimizer_of(section).start_state
    floats = np.concatenate([np.array([show, click, delta], np.float32), np.asarray(weights, np.float32), start])
    head = np.array([GROUPS[slot] | (day & 0xFFFF) << 16, version], np.uint32)
    return np.concatenate([head, floats.astype(np.float32).view(np.uint32)])


class Job:
    """A table that changes, its commits, and requests to export them."""

    def __init__(self, store: Path, section: TableSection | None = None, shards: int = 2) -> None:
        self.store, self.section = store, section or TableSection(dim=3)
        self.num_words = HEAD + int(self.section.first_order) + self.section.dim
        self.num_words += len(optimizer_of(self.section).start_state)
        ends = np.linspace(0, NUM_BUCKETS, shards + 1).astype(int).tolist()
        self.buckets = list(zip(ends[:-1], ends[1:], strict=True))
        self.stores = [
            RocksRowStore.open(store / "live" / f"g1-shard-{n}", None, num_words=self.num_words) for n in range(shards)
        ]
        self.changes = [ChangeFiles(store / "live" / f"g1-shard-{n}.changes", 0) for n in range(shards)]
        self.life = TableAging(self.section, GROUPS)
        self.rows: dict[tuple[str, int], np.ndarray] = {}
        """Words."""
        self._touched: set[tuple[str, int]] = set()
        self._went: set[tuple[str, int]] = set()

    def set(self, version: int, rows: Mapping[tuple[str, int], object], **statistics: float) -> None:
        """Rows are trained to these weights in the pass that closes `version`."""
        for row, weights in rows.items():
            self.rows[row] = words_of(self.section, row[0], weights, version, day=self.life.day, **statistics)
            self._touched.add(row)

    def remove(self, *rows: tuple[str, int]) -> None:
        for row in rows:
            del self.rows[row]
            self._went.add(row)

    def commit(self, version: int, since: int | None = 0, timeline: str = "t1", dense=None) -> Commit:
        """Everything as it is now."""
        name = name_of(timeline, version, 1)
        folder = self.store / "commits" / name
        folder.mkdir(parents=True)
        files, shards = {}, []
        for number, (begin, end) in enumerate(self.buckets):
            part = self._part(folder, number, begin, end, version, since)
            shards.append(part)
            files |= part.files
        self._touched, self._went = set(), set()
        tensors = dense or {"model.w": np.full((2, 2), version, np.float32), "optimizer.m": np.zeros(4, np.float32)}
        save_file(tensors, folder / "dense.safetensors")
        files["dense.safetensors"] = hash_of(folder / "dense.safetensors")
        write_manifest(folder, manifest_of(name, job="small", files=files, shards=shards))
        return read_commit(folder)

    def _part(
        self, folder: Path, number: int, begin: int, end: int, version: int, since: int | None
    ) -> ShardCommitPart:
        def mine(rows):
            return sorted(row for row in rows if begin <= key_of(row) % NUM_BUCKETS < end)

        name = f"shard-{number}"
        touched = [row for row in mine(self._touched) if row in self.rows]
        went = mine(self._went)
        gone = np.array([key_of(row) for row in went], np.uint64)
        keys = np.array([key_of(row) for row in touched], np.uint64)
        words = np.array([self.rows[row] for row in touched], np.uint32).reshape(-1, self.num_words)
        self.stores[number].write(keys, words, gone[~np.isin(gone, keys)])
        (folder / name).mkdir()
        below = f"{TABLE}.changes"
        groups = np.array([GROUPS[slot] for slot, _ in went], np.uint16)
        changed = np.array([key_of(row) for row in mine(self._touched)], np.uint64)
        made = self.changes[number].write(version, ChangedKeys.of(changed, gone, groups), since, folder / name / below)
        self.changes[number].settle(True)
        files = {f"{name}/{below}/{each.name}": each.stored for each in made}
        found = self.stores[number].checkpoint(folder / name / TABLE)
        files |= {f"{name}/{TABLE}/{path}": file for path, file in found.items()}
        there = mine(self.rows)
        by_group = {g: sum(GROUPS[slot] == g for slot, _ in there) for g in GROUPS.values()}
        facts = TableFacts(len(there), by_group, self.life.state, [each.below(f"{name}/{below}") for each in made])
        return ShardCommitPart(name, (begin, end), {TABLE: facts}, files)

    def request(
        self, commit: Commit, kind: str, address: str, parent: ParentExport | None = None, /, **section: object
    ) -> ExportRequest:
        """An export of a commit."""
        top = {name: section.pop(name) for name in ("all", "facts", "folder", "why") if name in section}
        return ExportRequest(
            job="small", stream="main", section=ExportSection(**section), kind=kind, timeline=commit.timeline,
            version=commit.version, parent=parent, commit=commit.folder, address=address, stage=self.store / "stage",
            tables={TABLE: self.section}, slots={TABLE: {group: slot for slot, group in GROUPS.items()}}, **top,
        )  # fmt: skip

    def close(self) -> None:
        for store in self.stores:
            store.close()


def parent_of(request: ExportRequest) -> ParentExport:
    """For the export that follows."""
    return ParentExport(name=request.name, version=request.version, timeline=request.timeline)
