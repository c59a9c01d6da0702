"""`headrace run` with the real workers: it trains, it stops at a request, and it leaves no process behind."""

import os
import signal

import pytest

from headrace.lifecycle import ExitCode
from tests.integration.running_job import RunningJob, assert_gone, assert_gone_pids

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
ENDLESS = ("sources.lines.follow=true", 'sources.lines.poll="10ms"')


def lines(begin, end):
    return "".join(f"1 {n % 97} 2 {n % 41} {n % 13} 1 {int(n % 97 < 30)}\n" for n in range(begin, end))


@pytest.fixture
def start(tmp_path):
    """Starts jobs over the same stream and store; kills what a test leaves."""
    (tmp_path / "job.toml").write_text(SPEC)
    (tmp_path / "lines.txt").write_text(lines(0, NUM_LINES))
    started = []

    def starting(*settings):
        started.append(RunningJob(tmp_path / "job.toml", tmp_path, *settings))
        return started[-1]

    yield starting
    for job in started:
        job.kill()


@pytest.mark.long
@pytest.mark.parametrize("cluster", ["cluster={}", TWO_BY_TWO])
def test_a_bounded_stream_is_trained_to_its_end(start, cluster):
    job = start(cluster)
    code, said = job.end()
    assert code == 0, said
    report = job.report
    assert (report["events"], report["samples"], report["rejected"]) == (NUM_LINES, NUM_LINES, {})
    assert "done: the stream is drained\nevents    3,000\nsamples   3,000\n" in said
    assert report["metrics"]["life"]["ctr"]["auc"] > 0.6
    assert not (job.store / "workers").exists()
    assert_gone(job)


@pytest.mark.slow
def test_ctrl_c_ends_an_endless_job_after_its_pass_with_a_report(start):
    job = start(*ENDLESS)
    job.until_events(1)
    job.process.send_signal(signal.SIGINT)
    code, said = job.end()
    assert code == 0, said
    assert "done: stopped after the pass in training\n" in said
    assert job.report["events"] > 0
    assert_gone(job)


@pytest.mark.long
def test_kill_9_of_the_launcher_leaves_nobody(start):
    job = start(*ENDLESS, TWO_BY_TWO)
    job.until_events(1)
    assert sorted(job.workers()) == ["shard-0", "shard-1", "trainer-0", "trainer-1"]
    job.process.kill()
    assert_gone(job)


@pytest.mark.long
def test_kill_9_of_any_worker_starts_all_of_them_again_and_every_event_is_trained_once(start, tmp_path):
    job = start(*ENDLESS, TWO_BY_TWO)
    trained = job.until_events(NUM_LINES)
    for number, victim in enumerate(["shard-1", "trainer-0", "trainer-1"], start=1):
        before = job.workers()
        os.kill(before[victim], signal.SIGKILL)
        # At once, however often: each generation went on from where the one before it was.
        job.until_said(f"launcher| {victim} ended first: killed by SIGKILL; restarting, {number} of 5")
        assert_gone_pids(*before.values())
        with (tmp_path / "lines.txt").open("a") as stream:
            stream.write(lines(trained, trained + 500))
        trained = job.until_events(trained + 500)
        assert sorted(job.workers()) == sorted(before)
        assert not set(job.workers().values()) & set(before.values())
    job.process.send_signal(signal.SIGINT)
    code, said = job.end()
    assert code == 0, said
    assert "done: stopped after the pass in training\n" in said
    assert job.report["events"] == job.report["samples"] == trained == NUM_LINES + 1500
    assert_gone(job)


@pytest.mark.slow
def test_restarts_are_bounded_and_the_end_names_the_worker(start):
    job = start(*ENDLESS, TWO_BY_TWO, "cluster.max_restarts=0")
    job.until_events(1)
    os.kill(job.workers()["shard-1"], signal.SIGKILL)
    code, said = job.end()
    assert code == ExitCode.BUG
    assert "error: shard-1 ended first: killed by SIGKILL" in said
    assert_gone(job)


@pytest.mark.slow
def test_another_jobs_store_is_refused_and_left_alone(start):
    job = start()
    assert job.end()[0] == 0
    code, said = start('name="dog"').end()
    assert code == ExitCode.BAD_CONFIG
    assert "holds a run of job 'cat', not of 'dog'; give --fresh" in said
    assert job.report["events"] == NUM_LINES
