"""A thread has low priority while it prefetches, and normal priority when it is awaited; long work pauses."""

import os
import threading
from types import SimpleNamespace

import pytest

from headrace import priority
from headrace.priority import AHEAD, AUTOGROUP, Pace, ThreadPriority, can_lower_priority, prioritized


def policy_after(*steps):
    """Policy of a thread after steps called on it from here."""
    yielding, ready, done, found = ThreadPriority(), threading.Event(), threading.Event(), []

    def work():
        yielding.begin()
        ready.set()
        done.wait(10)
        found.append(os.sched_getscheduler(0))

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait(10)
    for step in steps:
        getattr(yielding, step)()
    done.set()
    thread.join()
    return found[0]


@pytest.mark.skipif(not can_lower_priority(), reason="this process may not lower and raise a thread's priority")
def test_a_thread_ahead_of_need_goes_last_and_an_awaited_one_is_as_urgent_as_any():
    assert policy_after("ahead") == os.SCHED_IDLE
    assert policy_after("ahead", "awaited") == os.SCHED_OTHER
    assert policy_after("ahead", "awaited", "ahead", "ahead") == os.SCHED_IDLE


def test_where_the_process_may_not_nothing_happens(monkeypatch):
    monkeypatch.setattr(priority, "can_lower_priority", lambda: False)
    assert policy_after("ahead") == os.sched_getscheduler(0)


def test_a_thread_that_has_ended_is_left_alone():
    yielding = ThreadPriority()
    yielding.begin()
    yielding.end()
    yielding.ahead()
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_long_work_rests_for_its_share_of_the_time_worked(monkeypatch):
    worked_s, rests = 7.0, []
    monkeypatch.setattr(priority, "time", SimpleNamespace(thread_time=lambda: worked_s, sleep=rests.append))
    pace = Pace(0.5)
    worked_s = 9.0
    pace.rest()
    pace.rest()
    assert rests == [1.0, 0.0], "what was rested for is not rested for again"


@pytest.mark.skipif(not can_lower_priority(), reason="this process may not lower and raise a thread's priority")
def test_a_thread_that_answers_goes_first_with_the_threads_it_starts_and_no_other_does(monkeypatch, tmp_path):
    found, go, over = {}, threading.Event(), threading.Event()

    def nice(name):
        go.wait(10)
        found[name] = os.getpriority(os.PRIO_PROCESS, 0)

    def answer():
        with prioritized():
            inner = threading.Thread(target=nice, args=["answers"])
            inner.start()
            found["session"] = session.read_text()
            go.set()
            inner.join(10)
        nice("after")
        over.set()

    session = tmp_path / "autogroup"
    session.write_text("/autogroup-7 nice 3\n")
    monkeypatch.setattr(priority, "AUTOGROUP", session)
    threads = [threading.Thread(target=nice, args=["other"]), threading.Thread(target=answer)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert over.is_set()
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    assert found == {"answers": AHEAD, "session": str(AHEAD), "after": usual, "other": usual}
    assert session.read_text() == "3"


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="sessions share nothing out here")
def test_a_session_is_as_it_was_afterwards():
    before = AUTOGROUP.read_text()
    with prioritized():
        pass
    assert AUTOGROUP.read_text() == before


def test_without_permission_to_go_first_nothing_happens(monkeypatch):
    def refused(*_):
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refused)
    before = AUTOGROUP.read_text() if AUTOGROUP.exists() else ""
    with prioritized():
        assert (AUTOGROUP.read_text() if AUTOGROUP.exists() else "") == before
