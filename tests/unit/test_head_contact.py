"""A head that does not reach its fence publishes nothing after a time, and goes on when it does again."""

import logging
import threading

import pytest

from headrace.errors import HeadraceError, Unavailable
from headrace.trainer.journal import succession
from headrace.trainer.journal.log import Superseded
from headrace.trainer.journal.succession import HeadContact, watched

TIMEOUT_S = 30.0


class Fence:
    def __init__(self):
        self.error, self.deadlines, self.takes_s, self.clock = None, [], 0.0, None

    def check_newest(self, deadline):
        self.deadlines.append(deadline.left_s())
        if self.clock is not None:
            self.clock.now_s += self.takes_s
        if self.error is not None:
            raise self.error


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def world():
    fence, clock = Fence(), Clock()
    fence.clock = clock
    return fence, clock, HeadContact(fence, TIMEOUT_S, clock)


def test_a_head_publishes_for_the_time_and_not_longer_without_contact(world):
    fence, clock, contact = world
    fence.error = Unavailable("no route")
    clock.now_s += TIMEOUT_S
    contact.look()
    assert contact.trouble == ""
    clock.now_s += 1
    assert "was not reached for 31 s (no route): the feed and exports stand still" in contact.trouble


def test_a_head_that_wakes_publishes_nothing_before_it_has_looked(world):
    _, clock, contact = world
    clock.now_s += 10 * TIMEOUT_S  # frozen: nobody looked meanwhile
    assert contact.trouble
    contact.look()
    assert contact.trouble == ""


def test_the_time_counts_from_the_beginning_of_a_look(world):
    """The answer may be as old as its request."""
    fence, clock, contact = world
    fence.takes_s = 25.0
    contact.look()
    clock.now_s += 6.0
    assert contact.trouble
    assert fence.deadlines[0] <= TIMEOUT_S / succession.LOOKS


def test_trouble_and_its_end_are_said_once(world, caplog):
    fence, clock, contact = world
    caplog.set_level(logging.INFO)
    for error in (Unavailable("down"), HeadraceError("damaged"), None, None):
        fence.error = error
        clock.now_s += TIMEOUT_S + 1 if error else 0
        contact.look()
        contact.look()
    said = [record.message for record in caplog.records if "object store" in record.message]
    assert len(said) == 2 and "stand still" in said[0] and "is reached again" in said[1]


def test_a_replaced_head_publishes_nothing_any_more_and_ends(monkeypatch):
    monkeypatch.setattr(succession, "END_S", 0.01)
    fence, ended, code = Fence(), threading.Event(), []

    def end(number):
        code.append(number)
        ended.set()

    with watched(HeadContact(fence, 0.03), 0.03, end) as contact:
        fence.error = Superseded("fence", 3, 4)
        assert ended.wait(20)
    assert code == [75] and "generation 4 of the workers has claimed this job" in contact.trouble


def test_a_head_that_ends_in_order_is_not_ended(monkeypatch):
    fence, ended = Fence(), []
    with watched(HeadContact(fence, 0.03), 0.03, ended.append) as contact:
        fence.error = Superseded("fence", 3, 4)
        contact.look()
    assert not ended and contact.superseded is not None
