"""Jobs whose workers a Ray cluster places: the bits of the local launcher, and words while it lacks what they need."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from tests import ray_cluster
from tests.fakes.agents import children_of
from tests.integration.hosted_service import CONFIG, HostedService, closes
from tests.integration.running_job import RunningJob, assert_gone_pids
from tests.integration.test_external_jobs import PASS, SMALL_STEPS, kill, until
from tests.integration.test_run_processes import SPEC, lines
from tests.ray_cluster import HostCluster

pytestmark = pytest.mark.long
SEED, NUM_LINES = 20261123, 6_000
TWO_BY_TWO = ("cluster.trainers=2", "cluster.shards=2", *SMALL_STEPS)
ONE_BY_ONE = ("cluster.trainers=1", "cluster.shards=1", *SMALL_STEPS, "passes.max_events=200")


def digest_of(job: RunningJob) -> str:
    code, said = job.end(110)
    assert code == 0, said
    assert job.report["events"] == NUM_LINES
    return job.report["digest"]


class World:
    """A Ray cluster of this machine, and jobs on it."""

    def __init__(self, cluster: HostCluster) -> None:
        self.cluster, self.jobs = cluster, []

    def run(self, folder: Path, *settings: str) -> RunningJob:
        """Start a job in a new folder."""
        folder.mkdir()
        (folder / "job.toml").write_text(SPEC)
        (folder / "lines.txt").write_text(lines(0, NUM_LINES))
        self.jobs.append(RunningJob(folder / "job.toml", folder, *settings))
        return self.jobs[-1]

    def on_ray(self, folder: Path, *settings: str) -> RunningJob:
        """Start a job on the cluster."""
        to = ("cluster.launcher=ray", f"cluster.ray_address={self.cluster.address}", 'cluster.node_timeout="5s"')
        return self.run(folder, *to, "commit.every_passes=1", "cluster.max_restarts=50", *settings)

    def end(self) -> None:
        for job in self.jobs:
            job.kill()


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster.running(4) as running:
        yield running


@pytest.fixture
def world(cluster):
    world = World(cluster)
    yield world
    world.end()


@pytest.fixture(scope="module")
def digest(tmp_path_factory):
    """Of the job of one trainer on the local launcher."""
    world = World(None)
    try:
        return digest_of(world.run(tmp_path_factory.mktemp("local") / "job", *ONE_BY_ONE))
    finally:
        world.end()


def actors(cluster: HostCluster) -> list[int]:
    """Process numbers of the job's agents on the cluster."""
    return [pid for pid in cluster.pids() if command_of(pid).startswith("ray::PlacedAgent")]


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def train_on(job: RunningJob) -> None:
    """Wait until it has closed another pass."""
    log = job.store / "log"
    before = len(closes(job.store)) if log.exists() else 0
    until(lambda: log.exists() and len(closes(job.store)) > before, "it has closed another pass", 90)


def test_workers_on_ray_give_the_digest_of_the_local_launcher_and_leave_nothing(world, tmp_path):
    digest = digest_of(world.run(tmp_path / "local", *TWO_BY_TWO))
    job = world.on_ray(tmp_path / "job", *TWO_BY_TWO)
    job.until_said(f"waits for the Ray cluster at {world.cluster.address}, which starts 4 workers")
    job.until_events(PASS, 90)
    placed = actors(world.cluster)
    workers = [pid for actor in placed for pid in children_of(actor)]
    assert len(placed) == 4 and len(workers) >= 4
    assert digest_of(job) == digest
    assert_gone_pids(*workers)
    until(lambda: not actors(world.cluster), "Ray has ended the actors")
    secret = (job.store / "identity" / "join_token").read_text().strip().rpartition(".")[2].encode()
    told = [path for path in world.cluster.folder.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(told) > 10 and not [path for path in told if secret in path.read_bytes()]
    assert not [line for line in job.said if "ray::" in line or "(raylet)" in line or "ray.init" in line]


def test_a_service_runs_a_submitted_job_on_the_ray_clusters_that_it_allows(world, digest, tmp_path):
    config = CONFIG.replace("[allow]", f'[allow]\nray_addresses = ["{world.cluster.address}"]')
    service = HostedService(tmp_path, config)
    service.start()
    try:
        data = tmp_path / "data"
        (data / "lines.txt").write_text(lines(0, NUM_LINES))
        (data / "job.toml").write_text(SPEC)
        submit = [sys.executable, "-m", "headrace.service", "submit", str(data / "job.toml"), "--base", str(data)]
        for setting in (*ONE_BY_ONE, "cluster.launcher=ray"):
            submit += ["--set", setting]
        at = {**os.environ, "HEADRACE_URL": str(service.http.base_url)}
        other = subprocess.run(
            [*submit, "--set", "cluster.ray_address=10.0.0.1:6379"], env=at, capture_output=True, text=True
        )
        assert (
            f"'10.0.0.1:6379' is not allowed here; allowed: {world.cluster.address} (allow.ray_addresses)"
            in other.stderr
        )
        here = [*submit, "--set", f"cluster.ray_address={world.cluster.address}"]
        assert subprocess.run(here, env=at, capture_output=True, text=True).stdout == "cat\n"
        ended = service.until("/jobs/cat", lambda job: job["phase"] in ("ended", "failed"))
        assert ended["outcome"]["code"] == 0, ended
        report = json.loads((data / "store" / "report.json").read_text())
        assert report["digest"] == digest
        said = [line["text"] for line in service.ask("GET", "/jobs/cat/output?limit=200")["items"]]
        assert any(f"waits for the Ray cluster at {world.cluster.address}, which starts 2 workers" in s for s in said)
        assert service.end() == 0
    finally:
        service.kill()
        service.http.close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_deaths", [pytest.param(num, marks=pytest.mark.slow) for num in (2, 10)])
def test_deaths_by_a_seed_change_no_bit(world, digest, tmp_path, num_deaths):
    """Of workers, of their actors, and of the process that holds the launcher's connection to Ray."""
    draw = Random(SEED)
    job = world.on_ray(tmp_path / "job", *ONE_BY_ONE)
    for death in range(1, num_deaths + 1):
        train_on(job)
        placed = actors(world.cluster)
        (connection,) = [
            p for p in children_of(job.process.pid) if "headrace.service.cluster.ray_driver" in command_of(p)
        ]
        match kind := draw.choice(("worker", "actor", "connection")):
            case "worker":
                kill(children_of(draw.choice(placed))[0])
            case "actor":
                kill(draw.choice(placed))
            case "connection":
                kill(connection)
        job.until_said(f", {death} of 50")
        print(death, kind)
    assert digest_of(job) == digest


def test_a_cluster_that_dies_is_waited_for_with_words(world, digest, tmp_path):
    job = world.on_ray(tmp_path / "job", *ONE_BY_ONE)
    job.until_events(PASS, 90)
    world.cluster.kill()
    job.until_said("; restarting, 1 of 50")
    job.until_said(f"waits for the Ray cluster at {world.cluster.address}: ")
    job.until_said("Connection refused; this is tried again")
    world.cluster.start()
    assert digest_of(job) == digest


def test_a_cluster_that_lacks_what_a_job_needs_is_waited_for_with_words(world, tmp_path):
    job = world.on_ray(
        tmp_path / "job", *TWO_BY_TWO, "cluster.resources.shard.cores=2", "cluster.resources.trainer.gpus=1"
    )
    job.until_said(
        f"waits for 2 more cores and 2 more GPUs on the Ray cluster at {world.cluster.address}, "
        "which has 4 cores (4 free) and no GPUs on 1 node"
    )
    job.process.send_signal(signal.SIGINT)
    code, said = job.end()
    assert code == 0 and "stopped before training began" in said


def test_a_head_that_accepts_and_never_answers_is_told_within_seconds(world, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        job = world.on_ray(tmp_path / "job", *ONE_BY_ONE, f"cluster.ray_address={address}")
        job.until_said(f"waits for the Ray cluster at {address}, which does not answer", 30)
        job.process.send_signal(signal.SIGINT)
        code, said = job.end()
        assert code == 0 and "stopped before training began" in said
