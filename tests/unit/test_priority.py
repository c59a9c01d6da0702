"""A thread steps back while its work is ahead, and forth when it is awaited; long work rests."""

import os
import threading
import time

import pytest

from millrace import priority
from millrace.priority import Pace, Yielding, can_yield


def policy_after(*steps):
    """Policy of a thread after steps called on it from here."""
    yielding, ready, done, found = Yielding(), threading.Event(), threading.Event(), []

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


@pytest.mark.skipif(not can_yield(), reason="this process may not lower and raise a thread's priority")
def test_a_thread_ahead_of_need_goes_last_and_an_awaited_one_is_as_urgent_as_any():
    assert policy_after("ahead") == os.SCHED_IDLE
    assert policy_after("ahead", "awaited") == os.SCHED_OTHER
    assert policy_after("ahead", "awaited", "ahead", "ahead") == os.SCHED_IDLE


def test_where_the_process_may_not_nothing_happens(monkeypatch):
    monkeypatch.setattr(priority, "can_yield", lambda: False)
    assert policy_after("ahead") == os.sched_getscheduler(0)


def test_a_thread_that_has_ended_is_left_alone():
    yielding = Yielding()
    yielding.begin()
    yielding.end()
    yielding.ahead()
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_long_work_rests_for_its_share_of_the_time_worked():
    pace, began_s = Pace(0.5), time.thread_time()
    while time.thread_time() - began_s < 0.02:
        pass
    before_s = time.monotonic()
    pace.rest()
    assert time.monotonic() - before_s >= 0.01
    before_s = time.thread_time()
    pace.rest()
    assert time.thread_time() - before_s < 0.01, "what was rested for is not rested for again"
