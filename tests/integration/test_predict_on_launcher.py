"""Predictions on the launcher of a job: real workers, in the numbers of the job, write the bytes of one process."""

import queue
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from headrace.errors import SpecError
from headrace.service.cluster.store import claimed
from headrace.service.predict.prediction import predict
from headrace.service.spec.job import load_job
from headrace.trainer.checkpoint.commits import Commits
from headrace.trainer.predict.output_files import PredictionOutput
from tests.contract.predict_world import content, make_world
from tests.contract.test_predict_measures import JOINED, joined_lines, write_lines
from tests.fakes.agents import AgentProcess
from tests.fakes.warm import warm_environment
from tests.integration.stream_job import headrace, write_job

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    made = make_world(tmp_path_factory.mktemp("world"), num_lines=100)
    with claimed(made.job.store, made.job.spec.name, fresh=False):
        shutil.copytree(made.commit.parent, made.job.store / "commits")
        (made.job.store / "log").mkdir()
    return made


def test_on_the_jobs_launcher_with_its_numbers_of_workers_the_bytes_are_the_same(world, tmp_path):
    job, lines = load_job(world.job.folder / "job.toml", ["cluster={trainers=2, shards=2}"]), []
    asked = world.request(tmp_path / "out", version=world.commit.name, on="cluster")
    predict(job, asked, lambda *_: None, threading.Event(), lambda worker, text: lines.append(worker))
    alone = world.request(tmp_path / "alone", version=world.commit.name)
    predict(job, alone, lambda *_: None, threading.Event())
    assert content(tmp_path / "out") == content(tmp_path / "alone")
    assert {*lines} >= {"shard-0", "shard-1", "predictor-0", "predictor-1"}
    assert not [*job.store.glob("live/*")] and Commits(job.store).holders() == {}


@pytest.mark.timeout(500)
def test_an_elastic_job_predicts_with_as_many_workers_as_there_are(world, tmp_path):
    elastic = "cluster={trainers={min=1, max=3}, shards=1, launcher='external', node_timeout='5s'}"
    job, lines, agents = load_job(world.job.folder / "job.toml", [elastic]), queue.SimpleQueue(), []
    asked, cancelled = world.request(tmp_path / "out", version=world.commit.name, on="cluster"), threading.Event()
    with ThreadPoolExecutor(1) as thread:
        made = thread.submit(predict, job, asked, lambda *_: None, cancelled, lambda *line: lines.put(line))
        waits = lines.get(timeout=60)[1]
        address = re.search(r"waits for 4 of 4 workers: .* --join (\S+)", waits)[1]
        try:
            for role in ("shard", "trainer"):
                token = job.store / "identity" / "join_token"
                agents.append(AgentProcess(address, token, tmp_path / role, "--role", role, **warm_environment()))
            made.result(400)
        finally:
            cancelled.set()
            for agent in agents:
                agent.kill()
    predict(job, world.request(tmp_path / "alone", version=world.commit.name), lambda *_: None, threading.Event())
    assert content(tmp_path / "out") == content(tmp_path / "alone")
    said = [lines.get() for _ in range(lines.qsize())]
    fewer = "the prediction goes on with 1 trainer in place of 3: nothing was heard of the others for 5 s"
    assert ("launcher", f"{fewer} (cluster.node_timeout)") in said
    assert {worker for worker, _ in said} & {f"predictor-{rank}" for rank in range(3)} == {"predictor-0"}


def test_while_the_job_runs_its_launcher_is_refused_and_this_machine_is_the_way_out(world, tmp_path):
    asked = world.request(tmp_path / "out", on="cluster")
    with claimed(world.job.store, world.job.spec.name, fresh=False):
        with pytest.raises(SpecError, match='is in use by a run .*or meanwhile with on = "here"'):
            predict(world.job, asked, lambda *_: None, threading.Event())


def test_a_job_with_a_join_predicts_with_the_version_that_it_has_trained(tmp_path):
    rng = np.random.default_rng(4)
    path = write_job(tmp_path, spec=JOINED)
    write_lines(tmp_path, parts := joined_lines(rng), rng)
    predicted = 'predict={input={paths=["part-*.txt"]}, output="out", shards=1}'
    done = headrace(path, predicted, "cluster.shards=1", timeout_s=250)
    assert done.code == 0, done.output
    metrics = PredictionOutput(tmp_path / "out").metrics()
    assert metrics["join"]["clicks"] == sum(click for part in parts for *_, click in part)
    assert metrics["tasks"]["ctr"]["count"] > 100 and 0 < metrics["join"]["joined"] <= metrics["join"]["clicks"]
