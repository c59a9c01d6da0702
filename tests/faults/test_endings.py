"""How jobs end with real trainers, shards and pipe commands: when asked, when killed, when something hangs.

Ctrl-C on a followed file and kill -9 of the launcher, of a shard and of a lone trainer's peer are in
tests/integration/test_run_processes.py; what the launcher decides, in the unit tests of service.cluster.
"""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from headrace.deadline import Deadline
from tests.integration.running_job import RunningJob, assert_gone, assert_gone_pids, assert_unanswered
from tests.integration.stream_job import write_job

CLICKS = Path(__file__).parents[2] / "deploy" / "examples" / "clicks" / "job.toml"
TWO_BY_TWO = "cluster={trainers=2, shards=2}"
HANGS = """
import os, pathlib, subprocess, time
away = subprocess.Popen(["sleep", "600"], start_new_session=True)
pathlib.Path("hanging.new").write_text(f"{os.getpid()} {away.pid}")
os.rename("hanging.new", "hanging")
time.sleep(600)
"""


@pytest.fixture
def start(tmp_path):
    """Starts jobs; kills what a test leaves."""
    started = []

    def starting(job, *settings):
        started.append(RunningJob(job, tmp_path, *settings))
        return started[-1]

    yield starting
    for job in started:
        job.kill()


@pytest.fixture
def hanging(start, tmp_path):
    """A job whose pipe command hangs, and the numbers of its process and of one in a session of its own."""
    job = write_job(tmp_path, num_parts=1)
    (tmp_path / "pipe.py").write_text(HANGS)
    running = start(job, 'pipe.command=["python", "pipe.py"]')
    return running, hanging_pids(tmp_path)


def hanging_pids(folder):
    """The numbers of the pipe command's processes, once it hangs."""
    pids = folder / "hanging"
    deadline = Deadline.after(30)
    while not pids.exists():
        deadline.check("waiting for the pipe command to hang")
        time.sleep(0.02)
    return [int(pid) for pid in pids.read_text().split()]


# -- asked to end


@pytest.mark.long
def test_sigterm_ends_an_endless_stream_on_several_workers_after_its_pass_with_a_report(start):
    job = start(CLICKS, TWO_BY_TWO)
    job.until_events(1)
    sockets = job.sockets()
    assert len(sockets) == 5
    job.process.send_signal(signal.SIGTERM)
    code, said = job.end(within_s=30)
    assert code == 0, said
    assert "done: stopped after the pass in training" in said
    assert job.report["samples"] == job.report["metrics"]["life"]["ctr"]["count"] > 0
    assert job.report["rejected"] == {}
    assert not (job.store / "workers").exists()
    assert_gone(job)
    assert_unanswered(sockets)


@pytest.mark.slow
def test_ctrl_c_while_workers_start_ends_well(start):
    job = start(CLICKS)
    deadline = Deadline.after(30)
    while "trainer-0" not in job.workers():
        deadline.check("waiting for the trainer to start")
        time.sleep(0.02)
    job.process.send_signal(signal.SIGINT)
    code, said = job.end(within_s=30)
    assert code == 0, said
    assert "done: stopped" in said
    assert_gone(job)


def test_a_second_ctrl_c_ends_a_job_that_hangs_in_its_pipe_command(hanging):
    job, pids = hanging
    job.process.send_signal(signal.SIGINT)
    job.process.send_signal(signal.SIGTERM)
    code, said = job.end(within_s=10)
    assert code == 1
    assert "error: stopped at the second request, in the middle of a pass" in said
    assert_gone(job, *pids)


# -- killed


@pytest.mark.slow
def test_kill_9_of_the_rank0_leaves_nothing_of_its_generation_and_another_trains(start):
    job = start(CLICKS, TWO_BY_TWO)
    trained = job.until_events(1)
    sockets, workers = job.sockets(), job.workers()
    assert len(sockets) == 5
    os.kill(workers["trainer-0"], signal.SIGKILL)
    job.until_said("launcher| trainer-0 ended first: killed by SIGKILL; restarting, 1 of 5")
    assert_gone_pids(*workers.values())
    assert_unanswered(sockets)
    job.until_events(trained + 1)
    job.process.send_signal(signal.SIGTERM)
    code, said = job.end(within_s=30)
    assert code == 0, said
    assert job.report["samples"] > 0
    assert not (job.store / "live").exists()
    assert_gone(job)


def test_kill_9_of_the_launcher_ends_a_pipe_command_that_hangs(hanging):
    job, pids = hanging
    job.process.kill()
    assert_gone(job, *pids)


def test_kill_9_of_a_trainer_ends_a_pipe_command_that_hangs_before_another_is_started(hanging):
    job, pids = hanging
    (job.store.parent / "hanging").unlink()
    os.kill(job.workers()["trainer-0"], signal.SIGKILL)
    job.until_said("launcher| trainer-0 ended first: killed by SIGKILL; restarting, 1 of 5")
    assert_gone_pids(*pids)
    others = hanging_pids(job.store.parent)
    job.process.send_signal(signal.SIGINT)
    job.process.send_signal(signal.SIGTERM)
    assert job.end(within_s=10)[0] == 1
    assert_gone(job, *pids, *others)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["shard-0", "trainer-1"])
def test_a_worker_that_is_stopped_outlives_neither_its_generation_nor_the_job(start, victim):
    job = start(CLICKS, TWO_BY_TWO)
    trained = job.until_events(1)
    workers = job.workers()
    os.kill(workers[victim], signal.SIGSTOP)
    os.kill(workers["trainer-0"], signal.SIGKILL)
    job.until_said("launcher| trainer-0 ended first: killed by SIGKILL; restarting, 1 of 5")
    assert_gone_pids(*workers.values())
    job.until_events(trained + 1)
    os.kill(job.workers()[victim], signal.SIGSTOP)
    job.process.send_signal(signal.SIGINT)
    job.process.send_signal(signal.SIGTERM)
    assert job.end(within_s=10)[0] == 1
    assert_gone(job)


# -- stopped


@pytest.mark.long
@pytest.mark.parametrize(
    ("victim", "told"),
    [
        # The other shard waits for a trainer that waits for this one; so may rank 0, if it had its answer before.
        (
            "shard-1",
            "no answer from .*shard-1|another trainer does not answer: .* or for a shard|close takes so long: a",
        ),
        # It may be stopped with its gradients not sent, or in a close.
        (
            "trainer-1",
            "another trainer does not answer|or waiting for another trainer|close takes so long: a worker is",
        ),
        ("trainer-0", "trainer-0 does not answer: it is stopped, or busy"),
    ],
)
def test_a_worker_that_is_stopped_is_an_alarm_until_it_goes_on(start, victim, told):
    job = start(CLICKS, TWO_BY_TWO, 'train.step_deadline="32s"', 'commit.every="1h"')
    job.until_events(1)
    stopped = job.workers()[victim]
    os.kill(stopped, signal.SIGSTOP)
    assert re.search(told, job.until_said("stands still, for more than 8 s: ", within_s=40))
    os.kill(stopped, signal.SIGCONT)
    job.until_said("alarm over: pass ")
    job.process.send_signal(signal.SIGTERM)
    code, said = job.end(within_s=30)
    assert code == 0, said


@pytest.mark.long
def test_a_pipe_command_that_gives_nothing_is_an_alarm(start, tmp_path):
    job = write_job(tmp_path, num_parts=1)
    (tmp_path / "pipe.py").write_text(HANGS)
    running = start(job, 'pipe.command=["python", "pipe.py"]', 'train.step_deadline="8s"')
    hanging_pids(tmp_path)
    running.until_said("stands still, for more than 2 s: no samples come from the source or the pipe command")


SWEARS = """
import sys
sys.stderr.write("\\x1b]0;owned\\x07\\x1b[2J done: all is well\\r\\n")
sys.stderr.flush()
sys.exit(3)
"""


@pytest.mark.long
def test_a_pipe_command_cannot_write_to_the_terminal_as_it_likes(start, tmp_path):
    job = write_job(tmp_path, num_parts=1)
    (tmp_path / "pipe.py").write_text(SWEARS)
    running = start(job, 'pipe.command=["python", "pipe.py"]', "pipe.tries=1")
    code, said = running.end(within_s=60)
    assert code == 1
    assert "\x1b" not in said and "\x07" not in said
    assert said.count("\\x1b]0;owned\\x07\\x1b[2J done: all is well") >= 2, "logged, and told as last words"
