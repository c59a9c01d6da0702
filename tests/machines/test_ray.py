"""A job on machines that form a Ray cluster: the bits of loopback, also where nodes die and others take their place."""

import time
from pathlib import Path

import pytest

from headrace.deadline import Deadline
from tests import ray_cluster, s3_server
from tests.integration.hosted_service import closes
from tests.integration.stream_job import headrace
from tests.machines.external_job import ExternalJob, Output, object_store
from tests.machines.network import Machine
from tests.machines.test_external import compared, example

pytestmark = [pytest.mark.long, pytest.mark.slow]  # three minutes; tests/integration/test_ray_jobs.py is of one node
RAY_PORT = 6379
NUM_EVENTS = 6_000
"""Enough to be in the middle of the stream when the second node dies."""


def join_ray(machine: Machine, head: Machine, cores: int) -> None:
    """Start Ray on a machine, as a user does."""
    if machine is head:
        command = ray_cluster.head_command(head.address, RAY_PORT, cores, "/tmp/ray")
    else:
        command = ray_cluster.node_command(machine.address, f"{head.address}:{RAY_PORT}", cores, "/tmp/ray")
    environment = {**s3_server.ENVIRONMENT, **ray_cluster.ENVIRONMENT}
    said = machine.tmp / "ray-start"
    with said.open("w") as output:
        code = machine.start(command, environment=environment, stdout=output, stderr=output).wait(60)
    assert code == 0, said.read_text()


def num_placed(machine: Machine) -> int:
    """How many workers of the job a machine runs."""
    commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in machine.pids()]
    return sum(command.startswith(b"ray::PlacedAgent") for command in commands)


def train_on(job: ExternalJob, launcher: Output, passes: int = 2) -> None:
    """Wait until the job has closed so many more passes."""
    store, deadline = job.head.tmp / "store", Deadline.after(90)
    before = len(closes(store)) if (store / "log").exists() else 0
    while not (store / "log").exists() or len(closes(store)) < before + passes:
        assert launcher.process.poll() is None and not deadline.passed(), launcher.said
        time.sleep(0.05)


@pytest.mark.timeout(240)
def test_workers_on_three_nodes_have_the_bits_of_loopback_also_where_nodes_die(machines, tmp_path):
    head, second, third, fourth, disk = machines(5)
    settings = (*example("criteo", tmp_path, NUM_EVENTS), "passes.max_events=100")
    expected = headrace(tmp_path / "job.toml", *settings, "cluster.trainers=1", "cluster.shards=3").report
    example("criteo", head.tmp, NUM_EVENTS)
    for machine, cores in ((head, 1), (second, 2), (third, 2)):
        join_ray(machine, head, cores)
    at = f"{head.address}:{RAY_PORT}"
    with object_store(disk) as address:
        on_ray = ("cluster.launcher='ray'", f"cluster.ray_address='{at}'")
        job = ExternalJob(head, address("ray"), *settings, *on_ray, trainers=1, shards=3)
        launcher = job.run()
        launcher.until(f"waits for the Ray cluster at {at}, which starts 4 workers")
        train_on(job, launcher)
        assert num_placed(head) == 1, "rank 0"
        assert sorted(num_placed(machine) for machine in (second, third)) == [1, 2]
        third.die()
        launcher.until(f"waits for 1 more core on the Ray cluster at {at}, which has 3 cores (3 free) on 2 nodes")
        join_ray(fourth, head, 2)
        join_ray(third, head, 2)
        train_on(job, launcher)
        second.die()
        launcher.until("restarting, 2 of 5")
        assert launcher.end() == 0, launcher.said
        assert compared(job.report) == compared(expected)
