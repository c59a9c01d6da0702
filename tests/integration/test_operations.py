"""A running job is told things: they act at a close, a restart repeats them there, and a rerun comes out alike."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from headrace.deadline import Deadline
from headrace.errors import DeadlineExceeded, Unavailable
from headrace.rpc.job_client import JobClient, NotRunning
from headrace.trainer.journal.job_history import JobHistory
from headrace.trainer.journal.log import read
from headrace.trainer.journal.records import ActingOperation
from tests.integration.followed_job import FollowedJob, closes
from tests.integration.stream_job import headrace

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


def until(job, true_of, what, within_s=60.0):
    """Ask its rank 0, which may be starting, until `true_of` its status."""
    deadline = Deadline.after(within_s)
    while True:
        try:
            with JobClient(job.store).rank0() as client:
                if true_of(status := client.status(Deadline.after(5))):
                    return status
        except (Unavailable, DeadlineExceeded, NotRunning):
            pass
        assert not deadline.passed(), f"it never came to {what}:\n{''.join(job.said)}"
        time.sleep(0.05)


def say(followed, store, command, *words, code=0):
    """`headrace COMMAND JOB WORDS`; what it prints."""
    line = [
        sys.executable,
        "-m",
        "headrace.service",
        command,
        str(followed.spec),
        *words,
        "--set",
        f"store.path={store}",
    ]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=110, stdin=subprocess.DEVNULL)
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def acted(store):
    """By version, what acted there."""
    history = JobHistory.of(read(store / "log"))
    return {
        version: ops
        for version, records in history.operations_by_version().items()
        if (ops := [record.content.op for record in records if isinstance(record.content, ActingOperation)])
    }


@pytest.mark.long
@pytest.mark.parametrize("shards", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_what_was_set_while_a_job_ran_acts_again_after_kill_9_and_in_a_rerun(followed, start, shards):
    job = start(*RARELY, *RULE, f"cluster.shards={shards}")
    followed.arrive(2)
    until(job, lambda status: status["version"] == 2, "version 2")
    first = say(followed, job.store, "commit").strip()
    said = say(followed, job.store, "set", "tables.default.optimizer.lr=0.2", "dense.optimizer.lr=0.01")
    assert "tables.default.optimizer.lr = 0.2 acts from version 3 on" in said  # nothing came: a pass of no events
    followed.arrive(3)
    until(job, lambda status: status["version"] >= 4, "version 4")
    say(followed, job.store, "freeze", "b")
    assert "day 1 begins" in say(followed, job.store, "day-tick")
    assert "day 3 begins" in say(followed, job.store, "day-tick", "--to", "3")
    followed.arrive(4)
    before = until(job, lambda told: told["events"] == 400 and not told["operations"]["shrinking"]["counting"], "rest")
    assert before["overrides"] == {"tables.default.optimizer.lr": 0.2, "dense.optimizer.lr": 0.01}
    assert before["tables"]["default"]["frozen"] == ["b"]
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
    (table,) = json.loads(say(followed, job.store, "tables", "--json"))
    assert table["frozen"] == ["b"], "of the commit, as the job does not run"
    said = say(followed, job.store, "rerun", "--from", first)
    number = max(closes(job.store)) - 2
    assert f"{number} of {number} passes are identical" in said


@pytest.mark.slow
def test_what_waits_when_a_job_is_asked_to_stop_acts_in_the_next_run_and_at_a_streams_end(followed, start):
    job = start(*RARELY)
    followed.arrive(2)
    until(job, lambda status: status["version"] == 2, "version 2")
    told = json.loads(say(followed, job.store, "explain", "a", "3", "--json"))
    assert told["row"] and told["last_seen_day"] == 0 and told["leaves_after_days"] is None
    with JobClient(job.store).rank0() as client:  # the stop comes before the close at which it would act
        wish = {"op": "forget", "id": "x", "slot": "a", "sign": 3}
        job.process.send_signal(signal.SIGTERM)
        client.operate({"do": "ask", "operation": wish}, Deadline.after(5))
    code, output = job.end()
    assert code == 0, output
    assert acted(job.store).get(None, acted(job.store).get(3)) == ["forget"]
    again = headrace(followed.spec, "sources.lines.follow=false", store=str(job.store))  # the stream ends now
    assert again.code == 0, again.output
    (version,) = acted(job.store)
    assert version == max(closes(job.store)) and again.report["passes"] == version
    assert closes(job.store)[version]["events"] == 0


@pytest.mark.long
def test_a_forgotten_value_has_no_row_and_its_dead_letters_and_kept_samples_go(followed, start):
    keep = 'passes.keep="8MiB"', 'passes.keep_in="kept"'
    job = start(*RARELY, "pipe.max_bad_fraction=0.9", *keep)
    followed.arrive(2)
    with (followed.folder / "part-0.txt").open("a") as stream:
        stream.write("2 0.5 0.5 1 7 1 nobody 1 3 1 1 1 12\n")
    followed.arrive(3)
    until(job, lambda status: status["rejected"], "a rejected event")
    there = len(list((followed.folder / "kept").glob("*.arrow")))
    said = say(followed, job.store, "forget", "a", "7", *(word for each in keep for word in ("--set", each)))
    gone = there - len(list((followed.folder / "kept").glob("*.arrow")))
    assert gone > 0 and f"files of kept samples with this value, deleted: {gone}" in said
    assert "the value has no row from version" in said and "dead letters with this value, deleted: 1" in said
    assert "sign" not in said
    told = say(followed, job.store, "explain", "a", "7")
    assert "it has no row" in told
    assert "clear b: acts from version" in say(followed, job.store, "clear", "b")
    refused = say(followed, job.store, "forget", "aa", "7", code=2)
    assert "there is no sparse slot 'aa'; did you mean 'a'?" in refused
    refused = say(followed, job.store, "set", "tables.default.dim=8", code=2)
    assert "tables.default.dim: cannot be set while the job runs; these can: tables.*.optimizer.lr" in refused


@pytest.mark.slow
def test_too_many_rows_wait_for_an_operator_until_he_lets_them_go(followed, start):
    job = start(*RARELY, "tables.default.delete_after_days=1", "tables.default.max_shrink_fraction=0.01")
    followed.arrive(2)
    until(job, lambda status: status["version"] == 2, "version 2")
    say(followed, job.store, "day-tick", "--to", "3")
    status = until(job, lambda status: status["operations"]["shrinking"]["held"], "a shrink that waits")
    held = status["operations"]["shrinking"]["held"]["default"]
    assert held["fraction"] == 1.0 and held["rows"] == status["tables"]["default"]["rows"] > 0
    assert sum(status["tables"]["default"]["rows_by_slot"].values()) == held["rows"]
    dry = say(followed, job.store, "shrink", "--dry-run")
    assert (
        f"{held['rows']:,} of {held['rows']:,} rows would be deleted (100.0%; more than max_shrink_fraction = 1.0%"
        in dry
    )
    refused = say(followed, job.store, "shrink", code=1)
    assert "a shrink would remove" in refused and "--allow" in refused
    assert "is shrunk from version" in say(followed, job.store, "shrink", "--allow")
    status = until(job, lambda status: not status["operations"]["shrinking"]["held"], "nothing waits")
    assert status["tables"]["default"]["rows"] == 0


@pytest.mark.long
def test_a_job_that_does_not_run_says_so(followed):
    ran = headrace(followed.spec, store="ended")
    assert ran.code == 0, ran.output
    said = say(followed, followed.folder / "ended", "set", "tables.default.decay=0.5", code=1)
    assert "no run is active" in said
