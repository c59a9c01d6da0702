"""A store with a past, made by hand: a log as a rank 0 writes it, commits with real tables, linked as real ones are."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from headrace.dataset.stream.source import Segment
from headrace.deadline import Deadline
from headrace.pserver.protocol.commit_parts import TableFacts
from headrace.pserver.protocol.shards import ShardCommitPart
from headrace.pserver.store.rocks_store import RocksRowStore
from headrace.trainer.checkpoint.commits import FORMAT, Commits, hash_of, name_of, write_manifest
from headrace.trainer.journal.log import Log
from headrace.trainer.journal.partitions import KnownPartition
from headrace.trainer.journal.pass_plan import PassPlan
from headrace.trainer.journal.records import PartitionsOperation
from tests.fakes.manifests import manifest_of
from tests.fakes.records import close

SPEC = {"name": "news", "seed": 3}
NUM_WORDS = 3
DIGESTS = {"dense": "d" * 64, "pushes": "e" * 32, "metrics": "f" * 64}


class Past:
    """One job's store, from generation to generation."""

    def __init__(self, store: Path) -> None:
        self.store, self.generation, self.timeline, self.base = store, 0, "t1", None
        store.mkdir(parents=True)
        (store / "headrace.json").write_text(json.dumps({"kind": "store", "format": 1}))
        (store / "run.json").write_text(json.dumps({"job": "news"}))
        self.positions: dict[str, int] = {}
        self.log: Log | None = None
        self._rows: RocksRowStore | None = None
        self._num_rows = 0

    def begin(self, timeline="t1", base=None) -> "Past":
        """Begin a new generation."""
        self.end()
        self.generation += 1
        self.timeline, self.base = timeline, base
        folder, facts = self.store / "log", {"host": "mill", "pid": 1}
        self.log = Log.claim(folder, self.generation, Deadline.after(5), timeline=timeline, base=base, facts=facts)
        return self

    def end(self) -> None:
        """End the generation."""
        if self.log is not None:
            self.log.close()
        if self._rows is not None:
            self._rows.close()
        self.log = self._rows = None

    def meet(self, *names: str, end: int | None = None) -> None:
        """Log new partitions."""
        known = [KnownPartition(name, number, 0, end, "") for number, name in enumerate(names)]
        self.log.append(PartitionsOperation(partitions=known))

    def plan(self, number: int, **ranges: tuple[int, int]) -> None:
        """Plan a pass over these positions, by partition."""
        ranks = tuple(Segment(name, n, begin, end) for n, (name, (begin, end)) in enumerate(ranges.items()))
        self.log.append(PassPlan(number, (ranks,)))

    def close(self, number: int, facts: Mapping[str, Any] | None = None, **ranges: tuple[int, int]) -> None:
        """Plan and close a pass. `facts`: further ones of the close."""
        self.plan(number, **ranges)
        events = sum(end - begin for begin, end in ranges.values())
        self.log.append(close(number, events=events, samples=events, digests=DIGESTS, **(facts or {})))
        self.positions |= {name: end for name, (_, end) in ranges.items()}

    def commit(self, version: int, rows: int = 100) -> str:
        """Make a commit with this many more rows than the one before; returns its name."""
        live = self.store / "live" / f"g{self.generation}"
        if self._rows is None:
            shutil.rmtree(live, ignore_errors=True)
            self._rows = RocksRowStore.open(live, None, num_words=NUM_WORDS)
            self._num_rows = 0
        keys_U = np.arange(self._num_rows, self._num_rows + rows, dtype=np.uint64)
        self._rows.write(keys_U, np.ones((rows, NUM_WORDS), np.uint32))
        self._num_rows += rows
        name = name_of(self.timeline, version, self.generation)
        folder = Commits(self.store).folder / name
        folder.mkdir(parents=True)
        (folder / "dense.safetensors").write_bytes(b"weights %d" % version)
        stored = self._rows.checkpoint(folder / "shard-0" / "default")
        files = {f"shard-0/default/{file}": each for file, each in stored.items()}
        tables = {"default": TableFacts(self._num_rows, {1: self._num_rows})}
        part = ShardCommitPart("shard-0", (0, 4096), tables, files)
        files = files | {"dense.safetensors": hash_of(folder / "dense.safetensors")}
        self.write_manifest(name, version, [part], files)
        return name

    def write_manifest(self, name, version, parts, files) -> None:
        """Step 4 of a commit."""
        facts = {"made_at": "2026-01-02T03:04:05+00:00", "fingerprint": {"torch": "2.9"}}
        state = {"progress": {"num_events": 40}, "partitions": [], "skips": [], "spec": SPEC}
        manifest = manifest_of(
            name, format=FORMAT, job="news", positions=dict(self.positions), files=dict(sorted(files.items())),
            shards=parts, state=state, **facts,
        )  # fmt: skip
        write_manifest(Commits(self.store).folder / name, manifest)
