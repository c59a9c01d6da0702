"""A job on several machines without a common folder: workers join with the token, and the bits are those of one."""

import gzip
import shutil
import sys
from itertools import islice

import pytest

from tests.e2e.test_examples import CRITEO, EXAMPLES, NEWS
from tests.faults.test_kills import COMPARED
from tests.integration.stream_job import headrace, write_job
from tests.machines.external_job import HEADRACE
from tests.machines.test_secure_wire import PLAIN_CALL, SCAN

pytestmark = pytest.mark.long
EVERY_3 = 'commit={every="600s", every_passes=3, keep=2}'
TWO_BY_TWO = "cluster.trainers=2", "cluster.shards=2"
SOURCES = {"criteo": (CRITEO, 3_000, 300), "news": (NEWS, 1_000, 100)}
"""The data of an example, its events that are trained, and those of a pass."""
PORTS = {"trainer": 29_500, "shard": 29_501}


def example(name, folder, num_events=None):
    """An example with the first lines of its data in a folder, and the settings for them."""
    data, default, each = SOURCES[name]
    if not data.exists():
        pytest.skip(f"needs {data}; name its folder in HEADRACE_DATA")
    for file in ("job.toml", "generator.py"):
        shutil.copy(EXAMPLES / name / file, folder)
    (folder / "data").mkdir(exist_ok=True)
    with gzip.open(data) as lines:
        content = b"".join(islice(lines, num_events or default))
    (folder / "data" / data.name).write_bytes(gzip.compress(content, 1, mtime=0))  # the same bytes on each machine
    return EVERY_3, f"passes.max_events={each}", "train.threads=1", "train.matmul=mkl"  # measured: two tables, two sums


def loopback_and_machines(name, folder, world, **more):
    """The report of an example with four workers, run in `folder` on this machine, and the same job on three."""
    (head, second, _), job_of = world
    settings = example(name, folder)
    expected = headrace(folder / "job.toml", *settings, *TWO_BY_TWO).report
    for machine in (head, second):
        example(name, machine.tmp)
    return expected, job_of(*settings, **more)


def four_agents(job, token, world):
    """Two trainers and two shards on three machines, of which one has no file of the job."""
    (head, second, third), _ = world
    places = ((third, "shard"), (second, "shard"), (second, "trainer"), (head, "trainer"))
    return [job.agent(machine, "--role", role, token=token) for machine, role in places]


def compared(report):
    return {key: report[key] for key in COMPARED}


def test_a_worker_joins_from_another_machine_and_strangers_do_not(world, tmp_path):
    (head, other, strange), job_of = world
    write_job(tmp_path)
    expected = headrace(tmp_path / "job.toml", EVERY_3).report
    write_job(head.tmp)
    job = job_of(EVERY_3, trainers=1, shards=1)
    stale = job.token()
    token = job.token("--rotate")
    launcher = job.run()
    launcher.until("waits for 2 of 2 workers: trainer-0, shard-0; `headrace worker --join 10.77.0.10:7070")
    refused = job.agent(strange, token=stale)
    assert refused.end() == 1 and "it was rotated, or is of another job; copy the present one" in refused.said
    of_another = job.agent(strange, token=f"headrace-1.{'0' * 64}.{token.rpartition('.')[2]}")
    assert of_another.end() == 1 and "the token is of another job, or the authority was replaced" in of_another.said
    assert strange.call(sys.executable, "-c", SCAN, job.address) == ""
    assert strange.call(sys.executable, "-c", PLAIN_CALL, job.address) == "UNAVAILABLE\n"
    agents = [job.agent(machine, token=token) for machine in (other, head)]
    assert launcher.end() == 0, launcher.said
    assert [agent.end() for agent in agents] == [0, 0]
    assert compared(job.report) == compared(expected)
    assert "shard-0: shard 0 of 1 serves at 10.77.0.11:" in launcher.said
    assert not (other.tmp / "store" / "log").exists() and not [*(other.tmp / "store" / "live").iterdir()]
    for words in ("the join token is not valid", "a port scan?", "does not speak TLS"):
        assert f"refused {strange.address}: " in launcher.said and words in launcher.said


@pytest.mark.parametrize("name", [pytest.param("criteo", marks=pytest.mark.slow), "news"])
def test_four_workers_on_three_machines_have_the_bits_of_loopback(world, tmp_path, name):
    (_, _, third), _ = world
    expected, job = loopback_and_machines(name, tmp_path, world)
    token, launcher = job.token(), job.run()
    launcher.until("waits for 4 of 4 workers")
    agents = four_agents(job, token, world)
    assert launcher.end() == 0, launcher.said
    assert [agent.end() for agent in agents] == [0] * 4
    assert compared(job.report) == compared(expected)
    assert not (third.tmp / "job.toml").exists()


@pytest.mark.slow
def test_torchrun_on_three_machines_gives_the_same_bits(world, tmp_path):
    (head, second, third), _ = world
    expected, job = loopback_and_machines("criteo", tmp_path, world)
    token, launcher = job.token(), job.run()
    launcher.until("waits for 4 of 4 workers")
    nodes = {"trainer": (head, second), "shard": (second, third)}
    runs = [
        torchrun(job, token, machine, role, node, pair[0].address)
        for role, pair in nodes.items()
        for node, machine in enumerate(pair)
    ]
    assert launcher.end() == 0, launcher.said
    assert [run.end() for run in runs] == [0] * 4
    assert compared(job.report) == compared(expected)


def torchrun(job, token, machine, role, node, first):
    command = ("--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1", f"--master-addr={first}")
    port = f"--master-port={PORTS[role]}"
    worker = (sys.executable, *HEADRACE, *job.words(machine, token), "--role", role)
    return job.start(machine, "-m", "torch.distributed.run", *command, port, "--no-python", *worker)
