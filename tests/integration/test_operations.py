"""A running job is told things: they act at a close, a restart repeats them there, and a rerun comes out alike."""

import os
import signal
import subprocess
import sys
import time

import pytest

from millrace.deadline import Deadline
from millrace.errors import DeadlineExceeded, Unavailable
from service.past.asking import NotRunning, chief
from tests.integration.followed_job import FollowedJob, closes
from trainer.history import History
from trainer.log import read

RULE = ("tables.default.delete_after_days=1", "tables.default.max_shrink_fraction=0.9")
RARELY = ("commit.every_passes=1000", 'commit.every="1000s"')


@pytest.fixture
def followed(tmp_path):
    return FollowedJob(tmp_path, 6)


@pytest.fixture
def start(followed):
    jobs = []

    def started(*settings):
        jobs.append(followed.start(*settings))
        return jobs[-1]

    yield started
    for job in jobs:
        job.kill()


def until(job, true_of, what):
    """Ask its chief, which may be starting, until `true_of` its status."""
    deadline = Deadline.after(60)
    while True:
        try:
            with chief(job.store) as client:
                if true_of(status := client.status(Deadline.after(5))):
                    return status
        except (Unavailable, DeadlineExceeded, NotRunning):
            pass
        assert not deadline.passed(), f"it never came to {what}:\n{''.join(job.said)}"
        time.sleep(0.05)


def say(followed, store, command, *words, code=0):
    """`millrace COMMAND JOB WORDS`; what it prints."""
    line = [sys.executable, "-m", "service", command, str(followed.spec), *words, "--set", f"store.path={store}"]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=110, stdin=subprocess.DEVNULL)
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def acted(store):
    """By version, what acted there."""
    history = History.of(read(store / "log"))
    return {
        version: ops
        for version, records in history.operations_by_version().items()
        if (ops := [record.body["op"] for record in records if record.body["op"] not in ("spec", "partitions", "restore")])
    }


@pytest.mark.parametrize("shards", [0, 2])
def test_what_was_set_while_a_job_ran_acts_again_after_kill_9_and_in_a_rerun(followed, start, shards):
    job = start(*RARELY, *RULE, f"cluster.shards={shards}")
    followed.arrive(2)
    until(job, lambda status: status["version"] == 2, "version 2")
    first = say(followed, job.store, "commit").strip()
    said = say(followed, job.store, "set", "tables.default.optimizer.lr=0.2", "train.dense_optimizer.lr=0.01")
    assert "tables.default.optimizer.lr = 0.2 acts from version 3 on" in said  # nothing came: a pass of no events
    followed.arrive(3)
    until(job, lambda status: status["version"] >= 4, "version 4")
    assert "day 1 begins" in say(followed, job.store, "day-tick")
    assert "day 3 begins" in say(followed, job.store, "day-tick", "--to", "3")
    followed.arrive(4)
    before = until(job, lambda status: status["events"] == 400 and not status["operations"]["shrinking"]["counting"], "4")
    assert before["overrides"] == {"tables.default.optimizer.lr": 0.2, "train.dense_optimizer.lr": 0.01}
    assert any("shrink" in ops for ops in acted(job.store).values())
    os.kill(job.workers()["trainer-0"], signal.SIGKILL)  # nothing of this is committed: it is trained again
    job.until_said("restarting")
    after = until(job, lambda status: status["version"] == before["version"], "the replay's end")
    for same in ("tables", "overrides", "day", "operations"):
        assert after[same] == before[same], same
    followed.arrive(6)
    until(job, lambda status: status["events"] == 600, "the last pass")
    job.process.send_signal(signal.SIGTERM)
    code, output = job.end()
    assert code == 0 and "differs" not in output, output
    said = say(followed, job.store, "rerun", "--from", first)
    number = max(closes(job.store)) - 2
    assert f"{number} of {number} passes are identical" in said
