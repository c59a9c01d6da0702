"""Pauses between tries: how many, how long, and never beyond the deadline."""

import math
import threading

import pytest

from headrace.blob import blob_retry
from headrace.blob.blob_errors import BlobUnavailable
from headrace.deadline import Deadline
from headrace.retry import Backoff, Retrier, call


class Passing(Exception):
    """May pass."""


def may_pass(error):
    return isinstance(error, Passing)


def failing(times, error=Passing):
    """An action that fails so many times; it keeps the numbers of its tries."""

    def act(attempt):
        act.attempts.append(attempt)
        if len(act.attempts) <= times:
            raise error(f"try {attempt}")
        return "done"

    act.attempts = []
    return act


def pauses(backoff, tries, left_s=math.inf):
    return [backoff.next_pause_s(failures, left_s) for failures in range(1, tries)]


def test_pauses_double_up_to_the_longest_and_go_on():
    assert pauses(Backoff.doubling(0.5, 10.0), 9) == [0.5, 1, 2, 4, 8, 10, 10, 10]
    assert pauses(Backoff.doubling(2.0, 2.0), 4) == [2, 2, 2]


def test_after_the_last_pause_there_is_no_further_try():
    assert pauses(Backoff((0.1, 0.3)), 5) == [0.1, 0.3, None, None]
    assert pauses(Backoff(()), 2) == [None]


def test_no_pause_reaches_the_deadline():
    backoff = Backoff.doubling(1.0, 8.0)
    assert [backoff.next_pause_s(3, left_s) for left_s in (0.0, 3.9, 4.0, 4.1)] == [None, None, None, 4.0]


def test_a_peer_may_ask_for_a_longer_pause():
    backoff = Backoff.doubling(1.0, 8.0)
    assert backoff.next_pause_s(1, 60.0, at_least_s=5.0) == 5.0 and backoff.next_pause_s(4, 60.0, at_least_s=5.0) == 8.0
    assert backoff.next_pause_s(1, 4.0, at_least_s=5.0) is None


def test_a_call_is_tried_until_it_succeeds():
    act, waited = failing(2), []
    assert call(act, Backoff((0.1, 0.3, 0.5)), may_pass, wait=waited.append) == "done"
    assert act.attempts == [1, 2, 3] and waited == [0.1, 0.3]


def test_the_last_error_is_raised_once_tries_are_used_up():
    act, waited = failing(9), []
    with pytest.raises(Passing, match="try 3"):
        call(act, Backoff((0.1, 0.3)), may_pass, wait=waited.append)
    assert act.attempts == [1, 2, 3] and waited == [0.1, 0.3]


def test_an_error_that_will_not_pass_is_raised_at_once():
    act, waited = failing(9, KeyError), []
    with pytest.raises(KeyError):
        call(act, Backoff((0.1, 0.3)), may_pass, wait=waited.append)
    assert act.attempts == [1] and waited == []


def test_a_call_without_time_left_is_tried_once():
    act = failing(9)
    with pytest.raises(Passing):
        call(act, Backoff((0.1,), endless=True), may_pass, deadline=Deadline.after(0.0))
    assert act.attempts == [1]


def test_a_retrier_says_what_is_wrong_while_it_waits(monkeypatch, caplog):
    monkeypatch.setattr("headrace.retry.PAUSE_S", 0.0)
    retrier, troubles, act = Retrier(Passing, "the log cannot be written", 60.0), [], failing(2)

    def watched():
        troubles.append(retrier.trouble)
        return act(len(act.attempts) + 1)

    assert retrier.call(watched) == "done" and retrier.trouble == ""
    assert troubles == [
        "",
        "the log cannot be written; the job stops after 60 s of it: try 1",
        "the log cannot be written; the job stops after 60 s of it: try 2",
    ]
    assert [record.getMessage() for record in caplog.records] == ["the log cannot be written: try 1"]


def test_a_retrier_gives_up_when_its_owner_stops():
    stopping = threading.Event()
    stopping.set()
    act = failing(9)
    with pytest.raises(Passing):
        Retrier(Passing, "it waits", 60.0, stopping).call(lambda: act(0))
    assert act.attempts == [0]


@pytest.mark.parametrize("left_s, out_of_time", [(0.0, True), (0.1, True), (60.0, False)])
def test_a_store_that_fails_says_whether_more_time_would_have_helped(monkeypatch, left_s, out_of_time):
    def refuse():
        raise OSError("refused")

    if not out_of_time:
        monkeypatch.setattr(blob_retry, "BACKOFF", Backoff((0.0, 0.0)))
    retries = blob_retry.Retries("mirror", (OSError,), str)
    with pytest.raises(BlobUnavailable) as caught:
        retries.run("writing a", refuse, Deadline.after(left_s))
    assert caught.value.out_of_time is out_of_time
