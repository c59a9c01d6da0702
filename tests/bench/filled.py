"""Tables of a given number of rows without a trainer: filled, changed, closed and committed as one would.

Rows are of slot group 0, of signs 0, 1, ...; their gradients are noise, so that weights are not alike.
"""

import dataclasses
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from headrace.deadline import Deadline
from headrace.key_kernels import keys_of
from headrace.pserver.config import ShardProcess, TableSection
from headrace.pserver.protocol.shards import Gradients, Keys, StepScale
from headrace.pserver.row_optimizers import Adagrad
from headrace.pserver.server.commands import RestoreCommit, SettleSnapshot, TakeSnapshot, WriteSnapshot
from headrace.pserver.server.embedded import EmbeddedShards
from headrace.pserver.tables.table import ShardTable
from headrace.trainer.checkpoint.commits import Commit, hash_of, name_of, read_commit, write_manifest
from tests.fakes.manifests import manifest_of

TABLE, JOB, TIMELINE, SEED = "default", "bench", "t1", 1
STEP_KEYS = 200_000
"""Rows made in one step."""


def section(**more: Any) -> TableSection:
    """Of 16 numbers a row, learning by adagrad with one accumulator."""
    return TableSection.model_validate({"dim": 16, "first_order": False, "optimizer": Adagrad(per="row"), **more})


def soon() -> Deadline:
    """Long enough for anything here."""
    return Deadline.after(600)


def keys_at(signs_U: np.ndarray) -> Keys:
    """Of slot group 0."""
    keys_U = np.empty(len(signs_U), np.uint64)
    keys_of(np.ascontiguousarray(signs_U, np.uint64), 0, keys_U)
    return Keys(keys_U, np.zeros(len(signs_U), np.uint16))


def gradients(num_keys: int, dim: int = 16, seed: int = 1) -> Gradients:
    """Of as many keys, one show each; every fourth clicked."""
    grads_UD = np.random.default_rng(seed).normal(size=(num_keys, dim)).astype(np.float32)
    click_U = (np.arange(num_keys) % 4 == 0).astype(np.float32)
    return Gradients(grads_UD, np.ones(num_keys, np.float32), click_U)


@contextmanager
def shards_at(live: Path | None, own: TableSection) -> Iterator[EmbeddedShards]:
    """The one embedded shard of a job with one table; with `live`, empty stores are open there."""
    shards = EmbeddedShards(ShardProcess.alone({TABLE: own}, SEED, live=live))
    try:
        if live is not None:
            shards.call(RestoreCommit(live.parent, (), 0), soon())
        yield shards
    finally:
        shards.close()


def table_of(shards: EmbeddedShards) -> ShardTable:
    """Its table."""
    return shards._shard.tables[TABLE]


def learn(shards: EmbeddedShards, version: int, signs_N: np.ndarray, day: int = 0) -> None:
    """One pass in which rows of these signs learn, some at a time."""
    shards.open_pass(version, soon())
    push = gradients(min(STEP_KEYS, len(signs_N)), seed=version)
    for step, begin in enumerate(range(0, len(signs_N), STEP_KEYS)):
        keys = keys_at(signs_N[begin : begin + STEP_KEYS])
        batch = shards.prepare({TABLE: keys}, learn=True)
        shards.pull(batch, soon())
        of_step = Gradients(*(getattr(push, f.name)[: len(keys.keys_U)] for f in dataclasses.fields(Gradients)))
        shards.exchange(step, batch, {TABLE: of_step}, None, StepScale(len(keys.keys_U)), soon())
    shards.close_pass(day, soon())


def commit(shards: EmbeddedShards, store: Path, version: int, changes_since: int | None = 0) -> Commit:
    """Commit the last closed pass, as a rank 0 does whose dense part is small."""
    shards.call(TakeSnapshot(version, changes_since), soon())
    folder = store / "commits" / name_of(TIMELINE, version, 1)
    folder.mkdir(parents=True)
    parts = shards.call(WriteSnapshot(folder), soon())
    save_file({"model.w": np.zeros((64, 64), np.float32)}, folder / "dense.safetensors")
    files = {path: file for part in parts for path, file in part.files.items()}
    files["dense.safetensors"] = hash_of(folder / "dense.safetensors")
    write_manifest(folder, manifest_of(folder.name, job=JOB, log_from=version, files=files, shards=parts))
    shards.call(SettleSnapshot(True), soon())
    return read_commit(folder)


def store_of(folder: Path, num_rows: int, passes: Sequence[np.ndarray] = ()) -> list[Commit]:
    """A store made anew: a commit of `num_rows` rows, then one after each pass over rows of some signs."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with shards_at(folder / "live", section()) as shards:
        commits = []
        for version, signs_N in enumerate((np.arange(num_rows), *passes), start=1):
            learn(shards, version, signs_N)
            commits.append(commit(shards, folder, version))
    return commits
