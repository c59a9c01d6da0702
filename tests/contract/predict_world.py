"""A small job's data and a commit for it, made in this process; its prediction workers, run in this process, too."""

import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from headrace.config import validate
from headrace.dataset.spec.schema import Schema
from headrace.deadline import Deadline
from headrace.pserver.client.connection import ShardCaller
from headrace.pserver.client.remote import RemoteShards
from headrace.pserver.config import ShardProcess
from headrace.pserver.server.commands import RestoreCommit
from headrace.pserver.server.shard_server import ShardServer
from headrace.service.predict.prediction import PlannedPrediction
from headrace.service.spec.job import LoadedJob, load_job
from headrace.trainer.checkpoint.commits import read_commit
from headrace.trainer.exports.reader import open_export
from headrace.trainer.features.default_rows import PREFIX, widths_of
from headrace.trainer.importing.export_source import ExportSource
from headrace.trainer.importing.first_commit import make_first_commit
from headrace.trainer.importing.selection import ImportSelection, TensorSelection
from headrace.trainer.predict.config import PredictionRequest, PredictWorker
from headrace.trainer.predict.output_files import PredictionOutput
from headrace.trainer.predict.prediction_plan import PredictionPlan, fingerprint_of, segments_of
from headrace.trainer.predict.worker import run
from headrace.trainer.train.model_building import build_model
from tests.fakes.exports import write_export
from tests.integration.stream_job import SPEC, write_job

SECRET = "secret"
ARROW = SPEC.replace('command = ["cat"]', 'command = ["python", "generator.py"]\nprotocol = "arrow"\nbatch_events = 32')
"""The same lines through a generator that gives each event none, one or two samples."""
GENERATOR = """
import sys

from headrace.dataset.generator import DataGenerator


class Lines(DataGenerator):
    def generate(self, event):
        words = event.decode().split()
        samples, at = {}, 0
        for slot in ("d", "a", "b", "history", "click", "group"):
            count = int(words[at])
            samples[slot] = words[at + 1 : at + 1 + count]
            at += 1 + count
        if samples["a"] == ["7"]:
            raise ValueError("seven")
        numbers = {name: [float(v) if name in ("d", "click", "group") else int(v) for v in values]
                   for name, values in samples.items()}
        for _ in range(int(samples["b"][0]) % 3):
            yield numbers


Lines().run()
"""


@dataclass(frozen=True)
class World:
    """What a prediction needs but processes."""

    job: LoadedJob
    commit: Path

    def request(self, output: Path | str, **asked: Any) -> PredictionRequest:
        """Of all the job's lines, in small segments and batches."""
        raw = {"input": {"paths": ["part-*.txt"]}, "output": str(output), "segment_events": 150, "batch_size": 32}
        return validate(PredictionRequest, {**raw, **asked})

    def plan(self, request: PredictionRequest) -> PredictionPlan:
        """Fix it, as the first step of a prediction does."""
        output = self.output(request)
        output.work.mkdir(parents=True, exist_ok=True)
        segments = segments_of(request.input, self.job.spec, self.job.folder, request.segment_events)
        plan = PredictionPlan(fingerprint_of(request, self.job.spec), {"commit": "it"}, segments)
        plan.write(output.place)
        return plan

    def worker(self, request: PredictionRequest, rank: int, shards: Sequence[str]) -> PredictWorker:
        """What a worker is told."""
        live = self.output(request).work / "live"
        shutil.rmtree(live, ignore_errors=True)
        return PredictWorker(
            job=self.job.full,
            folder=self.job.folder,
            request=request,
            output=request.output,
            commit=self.commit,
            rank=rank,
            shards=tuple(shards),
            secret=SECRET,
            live=live,
            cores=1e6,
        )

    def output(self, request: PredictionRequest) -> PredictionOutput:
        """The files of its output."""
        return PredictionOutput(request.output, self.job.folder / "scratch")

    def predict(self, output: Path | str, **asked: Any) -> dict[str, Any]:
        """Every part, worker after worker, and what is told of them; the manifest."""
        request = self.request(output, **asked)
        plan = self.plan(request)
        with ExitStack() as held:
            addresses = self._shards(request, held)
            for rank in range(request.trainers):
                run(self.worker(request, rank, addresses))
        return self.complete(request, plan)

    def complete(self, request: PredictionRequest, plan: PredictionPlan) -> dict[str, Any]:
        """Metrics, manifest, DONE."""
        output = self.output(request)
        return PlannedPrediction(self.job, request, output, plan, lambda *_: None, lambda: None).complete()

    def _shards(self, request: PredictionRequest, held: ExitStack) -> list[str]:
        spec, folder = self.job.spec, self.output(request).work
        groups = {slot.name: slot.group for slot in Schema.of(spec.slots).sparse}
        servers = []
        for shard in range(request.num_shards):
            config = ShardProcess(
                shard=shard,
                num_shards=request.num_shards,
                num_ranks=request.trainers,
                tables=spec.tables,
                groups=groups,
                seed=spec.seed,
                secret=SECRET,
                live=folder / f"live-{shard}",
            )
            servers.append(held.enter_context(ShardServer(config)))
        if servers:
            addresses, deadline = [server.address for server in servers], Deadline.after(60)
            me = ShardCaller(rank=0, world=request.trainers, generation=1, secret=SECRET)
            shards = RemoteShards(addresses, spec.tables, me, deadline)
            commit = read_commit(self.commit)
            shards.call(RestoreCommit(commit.folder, commit.shards, commit.version), deadline)
            shards.close()
        return [server.address for server in servers]


def make_world(folder: Path, spec: str = SPEC, num_lines: int = 300) -> World:
    """A job with `num_lines` lines or a few less in each of three files, and rows for half of its signs."""
    path = write_job(folder, num_lines=num_lines, spec=spec)
    (folder / "generator.py").write_text(GENERATOR)
    job = load_job(path)
    rng = np.random.default_rng(11)
    signs = {"a": 20, "b": 300, "history": 50}
    width = job.spec.tables["default"].dim + 1
    rows = {(slot, sign): rng.normal(0, 0.5, width) for slot, most in signs.items() for sign in range(0, most, 2)}
    schema = Schema.of(job.spec.slots)
    shapes = {
        n: each.shape for n, each in build_model(job.spec, schema, folder, torch.device("cpu")).named_parameters()
    }
    shapes |= {PREFIX + table: (width,) for table, width in widths_of(schema, job.spec.tables).items()}
    dense = {name: rng.normal(0, 0.5, shape) for name, shape in shapes.items()}
    export = write_export(folder / "exports", "base", 3, rows, dense=dense, dim=width - 1)
    source = ExportSource(open_export(str(export), folder / "fetched"))
    choice = ImportSelection.of(schema, job.spec.tables, (), None)
    made = folder / "made"
    made.mkdir()
    commit = make_first_commit(made, job.spec, job.raw, source, choice, TensorSelection(tuple(dense), {}, ())).commit
    return World(job, commit)


def content(output: Path) -> dict[str, bytes]:
    """Every file of an output."""
    return {str(path.relative_to(output)): path.read_bytes() for path in sorted(output.rglob("*")) if path.is_file()}


def rows_of(output: Path) -> pa.Table:
    """All parts."""
    return pa.concat_tables([pq.read_table(path) for path in sorted(output.glob("part-*.parquet"))])
