"""Readers on machines of their own: trainers elsewhere need neither generator nor source files, and have the bits of
one machine."""

import shutil

import pytest

from tests.integration.stream_job import headrace
from tests.machines.test_external import TWO_BY_TWO, compared, example

pytestmark = pytest.mark.long
EVENTS = 500
READERS = "reader-0", "reader-1"
SLOW = "import os, time\n\nif os.path.exists('slowly'):\n    time.sleep(4)\n"
"""Each pass takes so long at least while there is a file "slowly"."""


@pytest.mark.timeout(480)
def test_readers_of_another_machine_feed_trainers_that_have_no_file_of_the_stream(world, tmp_path):
    (head, second, third), job_of = world
    settings = *example("news", tmp_path, EVENTS), "pipe.processes=2", "passes.max_events=10"
    expected = headrace(tmp_path / "job.toml", *settings, *TWO_BY_TWO).report
    for machine in (head, second):
        example("news", machine.tmp, EVENTS)
        generator = machine.tmp / "generator.py"
        generator.write_text(SLOW + generator.read_text())
        (machine.tmp / "slowly").touch()
    job = job_of(*settings, "cluster.readers=2", node_timeout_s=8.0)
    token, launcher = job.token(), job.run()
    launcher.until("waits for 6 of 6 workers: trainer-0, trainer-1, shard-0, shard-1, reader-0, reader-1")
    places = [(third, "trainer"), (third, "shard"), (head, "trainer"), (head, "shard")]
    agents = [job.agent(machine, "--role", role, token=token) for machine, role in places]
    (second.tmp / "generator.py").write_text("# another one\n" + (head.tmp / "generator.py").read_text())
    for _ in range(2):
        job.agent(second, "--role", "reader", token=token)
    assert launcher.end() == 2, launcher.said
    assert "reads generator.py, and at its machine its first bytes have the digest" in launcher.said
    assert [agent.end() for agent in agents] == [2] * 4

    shutil.copy(head.tmp / "generator.py", second.tmp)
    launcher = job.run()
    agents = [job.agent(machine, "--role", role, token=token) for machine, role in places]
    reader = job.agent(second, "--role", "reader", token=token)
    launcher.until("waits for 1 of 6 workers: reader-1; starts without it after ")
    launcher.until("reader-1 does not run (no worker has come for it): the others take over until it is started", 60)
    launcher.until("reader 0 of 2 serves at 10.77.0.11:", 120)
    launcher.until("training", 120)
    agents.append(job.agent(head, "--role", "reader", token=token))
    launcher.until("reader-1 is started")
    launcher.until("reader 1 of 2 serves at 10.77.0.10:")
    launcher.until("trainer-1: reader-1 serves again, at ")
    reader.kill()
    launcher.until("reader-0 does not run", 60)
    agents.append(job.agent(second, "--role", "reader", token=token))
    launcher.until("reader-0 is started")
    launcher.until_often("reader 0 of 2 serves at 10.77.0.11:", 2)
    launcher.until(": reader-0 serves again, at ")
    for machine in (head, second):
        (machine.tmp / "slowly").unlink()
    assert launcher.end(240) == 0, launcher.said
    assert [agent.end() for agent in agents] == [0] * 6
    assert compared(job.report) == compared(expected)
    assert "restarting" not in launcher.said, launcher.said
    assert not (third.tmp / "data").exists() and not (third.tmp / "generator.py").exists()
    links = job.report["links"]
    received = [{name: links[f"trainer-{rank}"][name]["received_bytes"] for name in READERS} for rank in range(2)]
    assert all(any(each[name] for each in received) for name in READERS), received
