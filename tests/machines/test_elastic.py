"""A machine of an elastic job dies and comes back: the job goes on with fewer trainers, then with more."""

import re
import time

import pytest

from tests.integration.stream_job import SPEC, write_job
from tests.jobs import changed

pytestmark = pytest.mark.long
SLOW_PIPE = {"pipe.command": ["sh", "-c", "sleep 1; exec cat"]}
NUM_LINES = 500
SETTINGS = (
    *("cluster.trainers={min=1, max=3}", 'cluster.elastic_wait="1s"', "cluster.max_restarts=100"),
    *("passes.max_events=50", "train.threads=1", "train.batch_size=8", "train.matmul=mkl"),
    "commit={every='600s', every_passes=4, keep=2}",
)


def until_trains(launcher, trainers: int, since: int, within_s: float = 240.0) -> float:
    """Wait until so many train, `since` which line on; the seconds."""
    begun_s, line = time.monotonic(), re.compile(rf"^training .* {trainers} trainers \(of 1 to 3", re.M)
    while line.search(launcher.said[since:]) is None:
        assert time.monotonic() - begun_s < within_s, launcher.said
        time.sleep(0.05)
    return time.monotonic() - begun_s


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_machine_that_dies_and_comes_back_is_missed_and_taken_again(world):
    (head, second, third), job_of = world
    for machine in (head, second, third):
        write_job(machine.tmp, num_lines=NUM_LINES, spec=changed(SPEC, SLOW_PIPE))
    job = job_of(*SETTINGS, shards=1, node_timeout_s=8.0)
    token, launcher = job.token(), job.run()
    launcher.until("waits for 4 of 4 workers")
    job.agent(head, "--role", "shard", token=token)
    for machine in (head, second, third):
        job.agent(machine, "--role", "trainer", token=token)
    until_trains(launcher, 3, 0)
    third.die()
    lost_s = until_trains(launcher, 2, len(launcher.said))
    write_job(third.tmp, num_lines=NUM_LINES, spec=changed(SPEC, SLOW_PIPE))
    job.agent(third, "--role", "trainer", token=token)
    joined_s = until_trains(launcher, 3, len(launcher.said))
    print(f"fewer after {lost_s:.1f} s, more after {joined_s:.1f} s")
    assert launcher.end(400) == 0, launcher.said
    assert job.report["events"] == 3 * NUM_LINES - 21
    assert "differ" not in launcher.said
    assert "goes on with 2 trainers in place of 3: nothing was heard of the others for 8 s" in launcher.said
    assert "goes on with 3 trainers in place of 2: 1 worker has joined" in launcher.said
