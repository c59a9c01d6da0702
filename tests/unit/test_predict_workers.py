"""The workers of a prediction: a shard that does not answer while it reads rows is a death, after which they start
again."""

import socket
from contextlib import closing
from types import SimpleNamespace

import pytest

from headrace.pserver.config import Wire
from headrace.service.cluster.runtime import Resources, WorkerRole, WorkerSpec
from headrace.service.cluster.worker_plan import PredictionWorkers
from headrace.service.predict import worker_group
from headrace.service.predict.worker_group import PredictionFailed, WorkerDied, WorkerGroup
from headrace.service.spec.job import load_job
from headrace.trainer.checkpoint.commits import write_manifest
from tests.fakes.manifests import manifest_of
from tests.integration.stream_job import write_job


class Machines:
    """A launcher whose workers have started on machines that are silent: `address` is what each of them has told."""

    def __init__(self, address, ended=()):
        self._address, self._ended = address, ended
        self.rendezvous = self

    def prepare(self, specs, generation):
        pass

    def waits_for(self):
        return None

    def address(self, spec):
        return self._address

    def start(self, specs, generation, *, on_line, on_exit):
        for name, code in self._ended:
            on_exit(name, code)
        kept = {"kill": lambda within_s=0: True, "last_lines": lambda: ["error: the rows are damaged"]}
        return [SimpleNamespace(name=spec.name, **kept) for spec in specs]


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start a shard and a predictor by a launcher."""
    monkeypatch.setattr(worker_group, "START_S", 1.0)
    job, commit = load_job(write_job(tmp_path, num_lines=1)), tmp_path / "t1-0000000003-g1"
    commit.mkdir()
    write_manifest(commit, manifest_of(commit.name))

    def spec(role):
        return WorkerSpec(
            role=role, number=0, command=(), config={}, folder=tmp_path, run_folder=tmp_path, resources=Resources()
        )

    plan = PredictionWorkers(
        generation=1,
        shards=(spec(WorkerRole.SHARD),),
        predictors=(spec(WorkerRole.PREDICTOR),),
        wire=Wire.FLOAT32,
        secret="s",
    )

    def run(launcher):
        with WorkerGroup(job, launcher, lambda *_: None, lambda: None) as group:
            group.run(plan, commit, lambda: None)

    return run


def test_a_shard_whose_machine_is_gone_while_it_reads_rows_has_died(start):
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        gone = listener.getsockname()[1]
    with pytest.raises(WorkerDied, match="the shards have not read the rows: shard 0 at .* did not answer"):
        start(Machines(f"127.0.0.1:{gone}"))


def test_a_shard_that_never_listens_has_died(start):
    with pytest.raises(WorkerDied, match="the shards have not read the rows: shards did not come up within 1 s"):
        start(Machines(None))


def test_a_shard_that_has_told_why_it_ended_is_believed(start):
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        gone = listener.getsockname()[1]
    with pytest.raises(PredictionFailed, match="the rows are damaged"):
        start(Machines(f"127.0.0.1:{gone}", ended=[("shard-0", 1)]))
