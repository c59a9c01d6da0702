"""Checks of rows on the device (`train.rows`) against the other sections of a spec: what works with them. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from headrace.errors import SpecError
from headrace.pserver.config import TableSection, extends
from headrace.pserver.row_optimizers import ROW_OPTIMIZERS
from headrace.trainer.config import TrainerJob


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWorkers:
    """The workers of a job, as far as rows on devices depend on them."""

    num_trainers: int
    num_shards: int
    elastic: bool
    """Whether the number of trainers changes by itself."""
    one_machine: bool
    """Whether all processes are on one machine, and nobody else reaches them."""
    wire: str
    """`cluster.wire`."""


def check_device_rows(job: TrainerJob, workers: RowWorkers) -> None:
    """Raise SpecError for the first key that does not go with rows on the device."""
    if job.train.rows == "host":
        if job.train.rows_memory is not None:
            raise SpecError('is for train.rows = "device"; set that, or remove rows_memory', "train.rows_memory")
        return
    for key, message in _refused(job, workers):
        raise SpecError(f'{message}; or set train.rows = "host"', key)


def _refused(job: TrainerJob, workers: RowWorkers) -> Iterator[tuple[str, str]]:
    several = workers.num_trainers > 1
    inside = workers.num_trainers if several else 0
    if workers.elastic:
        yield "cluster.trainers", "rows on the device need a fixed number of trainers: set one number"
    if workers.num_shards != inside:
        why = "each trainer has one of the shards in it" if several else "the shard is in the trainer"
        yield "cluster.shards", f"with rows on the device {why}: set shards = {inside}"
    if several and not workers.one_machine:
        yield "cluster.launcher", 'rows on several devices need one machine: set launcher = "local", interface = "lo"'
    if workers.wire != "float32":
        yield "cluster.wire", 'rows on the device do not travel and are not rounded: set wire = "float32"'
    if job.train.mode != "sync":
        yield "train.mode", 'rows on the device learn at each step: set mode = "sync"'
    if job.train.staleness:
        yield "train.staleness", "rows on the device are never old: set staleness = 0"
    if job.dense.strategy in ("shards", "pipeline"):
        yield "dense.strategy", 'does not work with train.rows = "device": set strategy = "all_reduce"'
    for name, table in job.tables.items():
        yield from _of_table(f"tables.{name}", table)


def _of_table(path: str, table: TableSection) -> Iterator[tuple[str, str]]:
    if table.optimizer.on_device is None:
        known = [
            kind for kind in ROW_OPTIMIZERS.own if ROW_OPTIMIZERS.load(kind).model_validate({"kind": kind}).on_device
        ]
        yield f"{path}.optimizer.kind", f"{table.optimizer.kind!r} does not learn on a device: set {' or '.join(known)}"
    if extends(table):
        yield f"{path}.extend_at", "vectors that join later are on the shard alone: remove extend_at"
