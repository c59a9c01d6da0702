"""Rank 0's part of a resize whose workers stand by: commits while rows are moved, the log once few are left."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import NotYet
from headrace.trainer.rank0.operations import ClosingPass
from headrace.trainer.rank0.resize_messages import (
    PrepareWorkers,
    WorkersFailed,
    WorkersMoved,
    decode_message,
    encode_message,
)
from headrace.trainer.rank0.resizing import MAX_ROUNDS, SMALL_S, NextStep, ResizeFailed, ResizePreparation, next_step
from headrace.trainer.spec.changes import SHARDS, TRAINERS

KEYS = {SHARDS: 3, TRAINERS: 1}
ASKED = PrepareWorkers("a", shards=3, trainers=1)


class Commits:
    """Stands for the committer."""

    def __init__(self, version):
        self.version, self.idle, self.asked = version, True, 0

    def ask(self):
        self.asked += 1


def closing_pass(version):
    facts = {"day": 0, "event_time_s": None, "pass_times_s": None, "wall_s": 0.0, "num_samples": 1}
    facts["ended"] = False
    return ClosingPass(version=version, stats={}, positions={}, metrics={}, **facts)


def prepared(version=10):
    commits, resizing = Commits(version), ResizePreparation()
    resizing.begin(commits)
    resizing.ask("a", KEYS)
    return commits, resizing


def report(resizing, version, rounds=0, took_s=0.0, id_="a"):
    resizing.exchange(WorkersMoved(id_, version, rounds, took_s, "moving"))


@pytest.mark.parametrize(
    ("moved", "committed", "closed", "idle", "step"),
    [
        (WorkersMoved("a"), 10, 12, True, NextStep.WAIT),
        (WorkersMoved("a", version=8), 10, 12, True, NextStep.WAIT),
        (WorkersMoved("a", version=10), 10, 12, False, NextStep.WAIT),
        (WorkersMoved("a", version=10, took_s=60.0), 10, 12, True, NextStep.COMMIT),
        (WorkersMoved("a", version=10), 10, 10, True, NextStep.LOG),
        (WorkersMoved("a", version=10, rounds=1, took_s=SMALL_S), 10, 12, True, NextStep.LOG),
        (WorkersMoved("a", version=10, rounds=1, took_s=9.0), 10, 12, True, NextStep.COMMIT),
        (WorkersMoved("a", version=10, rounds=2, took_s=4.0, before_s=9.0), 10, 12, True, NextStep.COMMIT),
        (WorkersMoved("a", version=10, rounds=2, took_s=8.0, before_s=9.0), 10, 12, True, NextStep.LOG),
        (WorkersMoved("a", version=10, rounds=MAX_ROUNDS, took_s=9.0, before_s=99.0), 10, 12, True, NextStep.LOG),
    ],
)
def test_rows_move_from_commit_to_commit_until_few_are_left(moved, committed, closed, idle, step):
    assert next_step(moved, committed, closed, idle=idle) is step


@given(st.lists(st.floats(0, 100), min_size=MAX_ROUNDS, max_size=MAX_ROUNDS))
def test_the_rounds_end_however_long_each_takes(took):
    found = [
        next_step(WorkersMoved("a", 10 + n, n, took_s), 10 + n, 99, idle=True) for n, took_s in enumerate([0.0, *took])
    ]
    assert found[-1] is NextStep.LOG and set(found) <= {NextStep.COMMIT, NextStep.LOG}


def test_a_resize_is_logged_at_the_close_at_which_few_rows_are_left():
    commits, resizing = prepared()
    assert resizing.exchange(None) is None, "a commit may be in flight that does not record its changes"
    resizing.between(11)
    assert resizing.exchange(None) == ASKED and resizing.changes_since() == 10 and resizing.keeps_commits
    assert not resizing.due(closing_pass(12), ()) and commits.asked == 0
    report(resizing, 10)
    resizing.between(12)
    assert commits.asked == 1 and not resizing.due(closing_pass(13), ())
    commits.version = 13
    assert not resizing.due(closing_pass(14), ())
    report(resizing, 13, rounds=1, took_s=0.1)
    (operation,) = resizing.due(closing_pass(15), ())
    assert (operation.id, operation.keys) == ("a", KEYS)
    assert not resizing.due(closing_pass(16), ()), "once"
    assert resizing.progress().state == "handing over" and resizing.keeps_commits


def test_changes_are_recorded_since_the_newest_commit_of_the_request():
    commits, resizing = prepared()
    commits.idle = False
    resizing.between(12)
    assert resizing.exchange(None) is None
    commits.idle, commits.version = True, 12
    assert resizing.changes_since() == 12 and resizing.exchange(None) == ASKED
    commits.version = 20
    assert resizing.changes_since() == 12
    report(resizing, 20)
    assert resizing.changes_since() == 20, "the new shards have the rest"


@pytest.mark.parametrize("may", [True, False])
def test_the_last_rows_are_handed_over_once_the_log_has_the_resize(may):
    resizing = ResizePreparation(hands_over=may)
    resizing.begin(Commits(10))
    resizing.ask("a", KEYS)
    resizing.between(10)
    report(resizing, 10)
    assert not resizing.hands_over
    assert resizing.due(closing_pass(10), ())
    assert resizing.hands_over is may


def test_without_events_a_pass_without_events_carries_it():
    _, resizing = prepared()
    assert not resizing.wants_pass(ended=False)
    resizing.between(10)
    report(resizing, 10)
    assert resizing.wants_pass(ended=False) and not resizing.wants_pass(ended=True)


def test_workers_that_fail_end_the_request_with_their_reason_and_nothing_else():
    _, resizing = prepared()
    resizing.between(10)
    resizing.exchange(WorkersFailed("other", "not ours"))
    assert resizing.keeps_commits
    assert resizing.exchange(WorkersFailed("a", "trainer-0 ended first: exit code 1")) is None
    assert resizing.progress() is None and resizing.changes_since() is None and not resizing.keeps_commits
    with pytest.raises(ResizeFailed, match="goes on as before, since its new workers failed: trainer-0 ended first"):
        resizing.ask("a", KEYS)
    assert resizing.ask("b", KEYS) == {"id": "b", "version": None, "logged": False}


@pytest.mark.parametrize("message", [ASKED, WorkersMoved("a", 7, 1, 0.5), WorkersFailed("a", "no room"), None])
def test_messages_arrive_as_they_were_sent(message):
    assert decode_message(encode_message(message)) == message


def test_one_resize_at_a_time():
    _, resizing = prepared()
    assert resizing.ask("a", KEYS)["id"] == "a"
    with pytest.raises(NotYet, match="another resize"):
        resizing.ask("b", KEYS)


def test_what_comes_after_the_log_decided_changes_nothing():
    _, resizing = prepared()
    resizing.between(10)
    report(resizing, 10)
    assert resizing.due(closing_pass(10), ())
    resizing.exchange(WorkersFailed("a", "too late"))
    assert resizing.progress().state == "handing over"
