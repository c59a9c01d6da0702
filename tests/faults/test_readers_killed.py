"""Jobs whose readers die, with their trainers and shards, have the digests of a job without readers."""

import os
import signal
import time

import pytest

from headrace.deadline import Deadline
from headrace.service.faults.deaths import AtInstant
from headrace.service.faults.injection import Deaths, run
from headrace.service.faults.rounds import FALLBACK
from tests.faults.test_kills import assert_nothing_left, job_at, report, said_by
from tests.integration.running_job import RunningJob, assert_gone
from tests.integration.stream_job import write_job
from tests.jobs import changed

pytestmark = [pytest.mark.usefixtures("warm"), pytest.mark.long]

NUM_DEATHS = 10
PASSES = "passes.max_events=37"
SLOW_PIPE = 'pipe.command=["sh", "-c", "sleep 0.2; exec cat"]'
"""Each pass takes so long at least."""
PLACES = [pytest.param(1, 0, marks=pytest.mark.slow), (2, 2)]
READERS = {"reader-0", "reader-1", "reader-2"}
SLOWLY = 'pipe.command=["sh", "-c", "if [ -e slowly ]; then sleep 2; fi; exec cat"]'
"""Each pass takes so long at least as long as there is a file "slowly"."""


@pytest.mark.timeout(480)
@pytest.mark.parametrize(("trainers", "shards"), PLACES, ids=["embedded", "2 trainers x 2 shards"])
def test_ten_deaths_of_a_reader_and_the_others_change_nothing(tmp_path, trainers, shards):
    """With one reader, whose death ends its generation. The deaths use up twenty of the forty passes, or fewer."""
    write_job(tmp_path, num_lines=500)
    calm_job = job_at(tmp_path, "calm", trainers, shards, PASSES)
    job = job_at(tmp_path, "killed", trainers, shards, PASSES, SLOW_PIPE, "cluster.readers=1")
    planned = [
        AtInstant(("reader-0", f"trainer-{trainers - 1}")[at % 2], at % 3, 0.03 * at) for at in range(NUM_DEATHS)
    ]
    said = []
    calm, killed = Deaths(calm_job.store, iter([])), Deaths(job.store, iter(planned), FALLBACK)
    assert run(calm_job, calm, said_by(said)).code == 0, said[-20:]
    outcome = run(job, killed, said_by(said))
    assert outcome.code == 0, (outcome, said[-20:])
    assert len(killed.died) == len(planned) and not killed.unasked
    assert killed.closes == calm.closes
    assert report(job.store) == report(calm_job.store)
    assert_nothing_left(job.store, generation=len(planned) + 1)


@pytest.mark.timeout(240)
def test_readers_that_die_are_started_again_and_the_last_one_restarts_the_workers(tmp_path):
    path, slowly = write_job(tmp_path, num_lines=1_000), tmp_path / "slowly"
    slowly.touch()
    path.write_text(changed(path.read_text(), {"train.matmul": "mkl"}))
    settings = "passes.max_events=100", "pipe.processes=3", "cluster.trainers=2", "cluster.shards=1", SLOWLY
    calm = RunningJob(path, tmp_path / "calm", *settings)
    killed = RunningJob(path, tmp_path / "killed", *settings, "cluster.readers=3")
    try:
        killed.until_events(200)
        for number in (1, 0):
            os.kill(killed.workers()[f"reader-{number}"], signal.SIGKILL)
            killed.until_said(f"reader-{number} does not run (killed by SIGKILL): the others take over")
        for words in ("reader-1 is started", "reader-0 is started"):  # the one or the other may have been said before
            if not any(words in line for line in killed.said):
                killed.until_said(words)
        deadline = Deadline.after(10)
        while not READERS <= (workers := killed.workers()).keys():  # one that was just forked has no title yet
            deadline.check("waiting for the titles of the readers")
            time.sleep(0.01)
        for number in (1, 0, 2):
            os.kill(workers[f"reader-{number}"], signal.SIGKILL)
        killed.until_said("restarting")
        slowly.unlink()
        for job in (calm, killed):
            code, said = job.end(120)
            assert code == 0, said
        assert killed.report["digest"] == calm.report["digest"]
        assert "".join(killed.said).count("; restarting") == 1
        assert_gone(killed)
    finally:
        calm.kill()
        killed.kill()
