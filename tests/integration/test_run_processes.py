"""`millrace run` with the real workers: it trains, it stops when asked, and it leaves nobody behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from millrace.deadline import Deadline
from millrace.lifecycle import ExitCode

SPEC = """
name = "cat"
[sources.lines]
kind = "files"
paths = ["lines.txt"]
[pipe]
command = ["cat"]
[[slots]]
names = ["user", "item"]
[[slots]]
name = "click"
kind = "meta"
[[tasks]]
name = "ctr"
label = "click"
[tables.default]
dim = 4
[model]
name = "lr"
[passes]
max_events = 500
[train]
batch_size = 128
[store]
path = "store"
"""
NUM_LINES = 3000
TWO_BY_TWO = "cluster={trainers=2,shards=2}"
ENDLESS = "sources.lines.follow=true"


class Job:
    """A job in a folder, run by the command line."""

    def __init__(self, folder):
        self.folder = folder
        self.process = None

    def start(self, *overrides):
        arguments = [part for override in overrides for part in ("--set", override)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "service", "run", str(self.folder / "job.toml"), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def end(self):
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err

    def until_trained(self):
        for line in self.process.stderr:
            if line.startswith("training") and "events 0 " not in line:
                return
        raise AssertionError("the job ended before it trained")

    def until_said(self, words):
        for line in self.process.stderr:
            if words in line:
                return
        raise AssertionError(f"the job ended before it said {words!r}")

    def workers(self):
        """Process numbers by name."""
        found = {}
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = re.split(rb"[\0 ]", path.read_bytes())  # a title is one text
            except (FileNotFoundError, ProcessLookupError):
                continue
            for word in words:
                if word.startswith(os.fsencode(self.folder / "store" / "workers")):
                    found[Path(os.fsdecode(word)).stem] = int(path.parent.name)
        return found

    def assert_nobody_left(self):
        deadline = Deadline.after(10)
        while left := self.workers():
            deadline.check(f"waiting for {left} to be gone")
            time.sleep(0.02)


@pytest.fixture
def job(tmp_path):
    (tmp_path / "job.toml").write_text(SPEC)
    lines = (f"1 {n % 97} 2 {n % 41} {n % 13} 1 {int(n % 97 < 30)}\n" for n in range(NUM_LINES))
    (tmp_path / "lines.txt").write_text("".join(lines))
    job = Job(tmp_path)
    yield job
    if job.process is not None:
        job.process.kill()
        job.process.communicate()
    for pid in job.workers().values():
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("cluster", ["cluster={}", TWO_BY_TWO])
def test_a_bounded_stream_is_trained_to_its_end(job, cluster):
    job.start(cluster)
    code, out, err = job.end()
    assert code == 0, err
    report = json.loads((job.folder / "store" / "report.json").read_text())
    assert (report["events"], report["samples"], report["rejected"]) == (NUM_LINES, NUM_LINES, {})
    assert out.startswith("done: the stream is drained\nevents    3,000\nsamples   3,000\n")
    assert report["metrics"]["life"]["ctr"]["auc"] > 0.6
    assert not (job.folder / "store" / "workers").exists()
    job.assert_nobody_left()


def test_ctrl_c_ends_an_endless_job_after_its_pass_with_a_report(job):
    job.start(ENDLESS)
    job.until_trained()
    job.process.send_signal(signal.SIGINT)
    code, out, err = job.end()
    assert code == 0, err
    assert out.startswith("done: stopped after the pass in training\n")
    assert json.loads((job.folder / "store" / "report.json").read_text())["events"] > 0
    job.assert_nobody_left()


def test_kill_9_of_the_launcher_leaves_nobody(job):
    job.start(ENDLESS, TWO_BY_TWO)
    job.until_trained()
    assert sorted(job.workers()) == ["shard-0", "shard-1", "trainer-0", "trainer-1"]
    job.process.kill()
    job.assert_nobody_left()


@pytest.mark.parametrize("victim", ["shard-1", "trainer-0", "trainer-1"])
def test_kill_9_of_a_worker_starts_all_of_them_again(job, victim):
    job.start(ENDLESS, TWO_BY_TWO)
    job.until_trained()
    before = job.workers()
    os.kill(before[victim], signal.SIGKILL)
    job.until_said(f"launcher| {victim} ended first: killed by SIGKILL; restarting, 1 of 5")
    job.until_trained()
    after = job.workers()
    assert sorted(after) == sorted(before)
    assert not set(after.values()) & set(before.values())
    job.process.send_signal(signal.SIGINT)
    code, out, err = job.end()
    assert code == 0, err
    assert out.startswith("done: stopped after the pass in training\n")
    assert json.loads((job.folder / "store" / "report.json").read_text())["events"] == NUM_LINES
    job.assert_nobody_left()


def test_restarts_are_bounded_and_the_end_names_the_worker(job):
    job.start(ENDLESS, TWO_BY_TWO, "cluster.max_restarts=0")
    job.until_trained()
    os.kill(job.workers()["shard-1"], signal.SIGKILL)
    code, _, err = job.end()
    assert code == ExitCode.BUG
    assert "error: shard-1 ended first: killed by SIGKILL" in err
    job.assert_nobody_left()


def test_another_jobs_store_is_refused_and_left_alone(job):
    job.start()
    assert job.end()[0] == 0
    job.start('name="dog"')
    code, _, err = job.end()
    assert code == ExitCode.BAD_CONFIG
    assert "holds a run of job 'cat', not of 'dog'; give --fresh" in err
    assert (job.folder / "store" / "report.json").exists()
