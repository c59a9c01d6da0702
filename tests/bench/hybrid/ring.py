"""All-reduce alone, without shards: `python -m tests.bench.hybrid.ring` is one trainer of it, `measured` a whole run.

Every trainer holds all rows. All trainers gather the sparse gradients of all (one all_gather for each array, as
PyTorch does for sparse tensors), and each applies all of them in rank order; dense gradients are summed as by default.
The parts are those of the product, so the model, its samples and its sums are those of "hybrid".
"""

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from headrace.address import format_address, parse_address
from headrace.dataset.__main__ import first_segments
from headrace.dataset.loader.batch_loader import PassTally
from headrace.dataset.loader.segment_reader import SegmentReader
from headrace.dataset.samples.batch import Samples, cut_batches
from headrace.dataset.sources.kinds import open_source
from headrace.dataset.spec.config import Opening
from headrace.dataset.spec.schema import Schema
from headrace.deadline import Deadline
from headrace.exact_auc import exact_auc
from headrace.pserver.config import ShardProcess
from headrace.pserver.protocol.shards import Gradients, Keys, StepScale
from headrace.pserver.server.pushes import Push
from headrace.pserver.server.shard import Shard
from headrace.service.spec.job import load_job
from headrace.trainer.collectives.collective_traffic import CollectiveTraffic
from headrace.trainer.collectives.rank_store import connect_store, serve_store
from headrace.trainer.collectives.ranks import TorchRanks
from headrace.trainer.config import TrainerJob
from headrace.trainer.dense.strategy import Around, DenseStrategy, dense_strategy
from headrace.trainer.features.deduplication import tables_of
from headrace.trainer.features.pooling import pooling_for
from headrace.trainer.features.training_batches import BatchMaker, TrainingBatch
from headrace.trainer.metrics.halves import FILE_NAME
from headrace.trainer.metrics.samples import row_type
from headrace.trainer.train.device import set_up_torch
from headrace.trainer.train.model_building import build_model
from headrace.trainer.train.step import RowSums, Stepper, StepSettings
from tests.bench.hybrid.cluster import BATCH, RUN_S, START_S, Cluster, Measured, curve_of, fill
from tests.machines import network
from tests.machines.external_job import Output, setting, started

CPU = torch.device("cpu")
TABLE = "default"


class GatheredRows:
    """All rows, on every trainer alike."""

    def __init__(self, job: TrainerJob, world: int, traffic: CollectiveTraffic) -> None:
        self._shard, self._world, self._traffic = Shard(ShardProcess.alone(job.tables, job.seed)), world, traffic
        self._shard.open_pass()

    def prepare(self, tables: Mapping[str, Keys], *, learn: bool) -> Mapping[str, Keys]:
        """As Shards: rows are found when they are read."""
        return tables

    def read(self, tables: Mapping[str, Keys]) -> dict[str, np.ndarray]:
        """The rows of a batch."""
        return self._shard.rows(self._shard.resolve(tables, learn=True))

    def gather(self, keys: Keys, push: Gradients) -> list[tuple[Keys, Gradients]]:
        """The sparse gradients of all trainers, by rank. Shorter ones are filled up for the wire."""
        counts_W = self._all(np.array([len(keys.keys_U)], np.int64))[:, 0].tolist()
        arrays = (keys.keys_U.view(np.int64), push.grads_UD, np.stack([push.show_U, push.click_U], 1))
        brought = [self._all(_filled(array, max(counts_W))) for array in arrays]
        return [
            (
                Keys(keys_WU[:count].view(np.uint64), np.zeros(count, np.uint16)),
                Gradients(grads_UD[:count], counts_U2[:count, 0].copy(), counts_U2[:count, 1].copy()),
            )
            for count, keys_WU, grads_UD, counts_U2 in zip(counts_W, *brought, strict=True)
        ]

    def _all(self, mine: np.ndarray) -> np.ndarray:
        brought = torch.empty((self._world, *mine.shape), dtype=torch.from_numpy(mine).dtype)
        dist.all_gather(list(brought), torch.from_numpy(mine))
        self._traffic.all_gather(mine.nbytes)
        return brought.numpy()

    def apply(self, pushes: Sequence[tuple[Keys, Gradients]], scale: StepScale) -> None:
        """Learn a step, in rank order."""
        batches = [(self._shard.resolve({TABLE: keys}, learn=True), {TABLE: push}) for keys, push in pushes]
        self._shard.apply([Push(batch, grads, scale.batch_samples) for batch, grads in batches], 1)


def _filled(array: np.ndarray, length: int) -> np.ndarray:
    out = np.zeros((length, *array.shape[1:]), array.dtype)
    out[: len(array)] = array
    return out


def batches(job: TrainerJob, rank: int, steps: int) -> Iterator[Samples]:
    """The batches of a rank: a segment of the source, as the launcher would plan it for one pass."""
    (section,) = job.sources.values()
    folder, schema = Path.cwd(), Schema.of(job.slots)
    source = open_source(section, Opening(folder=folder, job=job.name, seed=job.seed, deadline=Deadline.after(START_S)))
    reader = SegmentReader(source, job.pipe, schema, section, None, folder)
    try:
        (whole,) = first_segments(source.partitions(Deadline.after(START_S)), (rank + 1) * steps * BATCH)
        mine = replace(whole, begin=whole.end - steps * BATCH)
        yield from cut_batches(reader.read(0, [mine], PassTally()), BATCH)
    finally:
        reader.close()


class Ring:
    """One trainer."""

    def __init__(self, job: TrainerJob, ranks: TorchRanks, traffic: CollectiveTraffic) -> None:
        schema = Schema.of(job.slots)
        model = build_model(job, schema, Path.cwd(), CPU)
        self.rows = GatheredRows(job, ranks.world, traffic)
        self.dense: DenseStrategy = dense_strategy(model, job.dense, ranks, around=Around(self.rows, RUN_S))  # type: ignore[arg-type]
        settings = StepSettings(schema=schema, tasks=job.tasks, train=job.train)
        self.stepper = Stepper(model, settings, pooling_for(CPU, 1), CPU)
        tables = tables_of(schema, job.tables, job.tasks[0].label)
        self.maker = BatchMaker(tables, job.tasks, None, self.rows, prepares=False)  # type: ignore[arg-type]
        self.task, self.ranks = job.tasks[0].name, ranks
        self.compute_s = self.wire_s = 0.0

    def step(self, number: int, batch: TrainingBatch) -> np.ndarray:
        """Learn a batch of every trainer; this one's predictions."""
        begin_s = time.perf_counter()
        (look,), total = batch.lookups, BATCH * self.ranks.world
        self.dense.clear()
        forward = self.stepper.forward(batch, self.rows.read({TABLE: look.keys}), {self.task: float(total)})
        sums = RowSums.of(batch)
        self.dense.fills(1.0)
        self.stepper.backward(batch, forward, sums)
        pushes = self.stepper.gradients(batch, sums)
        assert sums.finite and self.dense.finite()
        computed_s = time.perf_counter()
        self.dense.after_backward(number, 1.0)
        brought = self.rows.gather(look.keys, pushes[TABLE])
        self.dense.wait()
        wired_s = time.perf_counter()
        self.dense.step()
        self.rows.apply(brought, StepScale(total))
        self.wire_s += wired_s - computed_s
        self.compute_s += time.perf_counter() - wired_s + computed_s - begin_s
        rows_B = np.ones(len(batch.samples), row_type(1, grouped=False))
        rows_B["prediction0"], rows_B["label0"] = forward.prediction_B[self.task], batch.label_B[self.task]
        return rows_B


def train(job: TrainerJob, rank: int, world: int, store: str, steps: int) -> None:
    """One trainer; rank 0 writes all predictions, and prints its times."""
    set_up_torch(job.train, 1, CPU)
    if rank == 0:
        host, _ = parse_address(store)
        serving = serve_store(host, START_S)
        print(f"store {format_address(host, serving.port)}", flush=True)
    else:
        serving = connect_store(store, START_S)
    ranks, traffic = TorchRanks(rank, world, serving, "eth0", CPU, RUN_S), CollectiveTraffic(rank, world)
    ring = Ring(job, ranks, traffic)
    made = [ring.maker.make(0, samples) for samples in batches(job, rank, steps)]
    ranks.meet()
    begin_s = time.perf_counter()
    rows = np.concatenate([ring.step(number, batch) for number, batch in enumerate(made)])
    whole_s = time.perf_counter() - begin_s
    brought = ranks.gather({"rows": rows.view(np.uint8)})
    if brought is not None:
        parts_RN = [part["rows"].view(rows.dtype).reshape(steps, -1) for part in brought]
        np.concatenate(parts_RN, 1).reshape(-1).tofile(FILE_NAME)
        own = [*ranks.links().values(), *(asdict(link) for link in traffic.peers.values())]
        moved = sum(link["sent_bytes"] + link["received_bytes"] for link in own)
        figures = {"whole_s": whole_s, "compute_s": ring.compute_s, "wire_s": ring.wire_s, "bytes": moved}
        print(f"figures {json.dumps(figures)}", flush=True)
    ranks.close()


def measured(cluster: Cluster, steps: int, settings: Sequence[str]) -> Measured:
    """Train `steps` steps with all trainers, on two of four machines as in a job."""
    with network.machines(2) as machines:
        for machine in machines:
            fill(machine, steps * BATCH * cluster.trainers)
            machine.shape(rate=cluster.rate)
        outputs: list[Output] = []
        store = format_address(machines[0].address, 0)
        size = ("--world", str(cluster.trainers), "--steps", str(steps), *setting(settings))
        try:
            for rank in range(cluster.trainers):
                words = ("-m", __name__, "--rank", str(rank), "--store", store, *size)
                outputs.append(started(machines[cluster.home(rank)], *words))
                if rank == 0:
                    store = outputs[0].until("store ", START_S).split()[1]
            figures = json.loads(outputs[0].until("figures ", RUN_S).partition(" ")[2])
            for output in outputs:
                assert output.end() == 0, output.said
            return _measured(figures, machines[0].tmp / FILE_NAME, steps, cluster.trainers)
        finally:
            for output in outputs:
                output.kill()


def _measured(figures: Mapping[str, float], predictions: Path, steps: int, trainers: int) -> Measured:
    whole, compute, wire = (1000 * figures[name] / steps for name in ("whole_s", "compute_s", "wire_s"))
    traffic_mb = figures["bytes"] * trainers / steps / 1e6  # all trainers move about as many
    rows_N = np.fromfile(predictions, row_type(1, grouped=False))
    last_N = rows_N[len(rows_N) // 2 :]
    auc = exact_auc(last_N["prediction0"], last_N["label0"], last_N["weight0"])
    assert auc is not None
    return Measured(steps, whole, compute, wire, traffic_mb, traffic_mb, auc, curve_of(predictions))


def main() -> None:
    """One trainer."""
    arguments = argparse.ArgumentParser(description=__doc__)
    for name, kind in (("rank", int), ("world", int), ("store", str), ("steps", int)):
        arguments.add_argument(f"--{name}", type=kind, required=True)
    arguments.add_argument("--set", action="append", default=[])
    given = arguments.parse_args()
    job = load_job(Path("job.toml"), given.set).spec
    train(job, given.rank, given.world, given.store, given.steps)


if __name__ == "__main__":
    main()
