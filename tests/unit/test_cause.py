"""A job that fails, restarts or waits says why, and what to do."""

import pytest

from headrace.lifecycle import cause_in
from headrace.service.monitor.cause import MAX_CHARACTERS, cause_of_end, cause_of_trouble, cause_of_wait
from headrace.trainer.job_status import CommitStatus, StallStatus, Status

DIED = "trainer-0 ended first: exit code 1"


def test_the_sentence_of_a_death_is_its_error_or_the_exception_of_its_traceback():
    assert cause_in(["pass 1", "error: no such file", "make it"]) == "no such file\nmake it"
    traced = [
        "Traceback (most recent call last):",
        '  File "a.py", line 1',
        "    run()",
        "ValueError: 3 columns",
        "bye",
    ]
    assert cause_in(traced) == "ValueError: 3 columns"
    assert cause_in(["pass 1"]) == cause_in([]) == ""


def test_a_failed_job_says_the_error_of_the_worker_that_fell_first():
    found = cause_of_end(1, DIED, ["pass 3", "error: pipe: the command ended with 1"])
    assert (found.kind, found.text) == ("failed", "pipe: the command ended with 1")
    assert "Restart" in found.advice
    assert cause_of_end(0, "the stream is drained", []) is None
    assert len(cause_of_end(1, DIED, ["error: " + "x" * 9_000]).text) == MAX_CHARACTERS


@pytest.mark.parametrize(("code", "word"), [(2, "job file"), (70, "fault"), (75, "reached"), (3, "fault")])
def test_what_to_do_follows_the_exit_code(code, word):
    found = cause_of_end(code, DIED, [])
    assert found.text == DIED and word in found.advice


def test_a_worker_that_was_killed_is_about_memory():
    assert "memory" in cause_of_end(70, "shard-1 ended first: killed by SIGKILL", []).advice
    killed = Status(state="restarting", restarts=1, last_death="shard-1 ended first: killed by SIGKILL")
    assert "memory" in cause_of_wait(killed).advice


def test_a_restart_says_its_error_and_where_training_goes_on():
    status = Status(
        state="restarting", restarts=2, last_death=DIED, last_error="the broker is gone", commit=CommitStatus(version=7)
    )
    found = cause_of_wait(status)
    assert (found.kind, found.text) == ("restarting", "the broker is gone")
    assert "version 7" in found.advice
    assert cause_of_wait(Status(state="starting", restarts=1, last_death=DIED)).text == DIED
    assert cause_of_wait(Status(state="training", restarts=1, last_death=DIED)) is None  # it is over


def test_a_job_that_waits_says_for_what():
    shard = cause_of_wait(Status(state="training", stalled=StallStatus(waits_for="shards", shards=[1], max_s=5)))
    assert (shard.kind, "shard-1" in shard.text) == ("waiting", True)
    for waits_for in ("workers", "store"):
        assert cause_of_wait(Status(stalled=StallStatus(waits_for=waits_for, text="it waits"))).text == "it waits"
    assert "No event" in cause_of_wait(Status(state="training", idle_s=31.0)).text
    assert cause_of_wait(Status(state="training", idle_s=1.0)) is None


def test_a_broken_job_says_its_trouble():
    assert cause_of_trouble("job.json differs").text == "job.json differs"
    assert cause_of_trouble("") is None
