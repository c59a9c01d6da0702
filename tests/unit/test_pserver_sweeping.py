"""Counting what a shrink would take, in the background: told once, never long afterwards, never after the end."""

import threading
from time import monotonic

import pytest

from millrace.errors import Unavailable
from pserver import sweeping
from pserver.errors import PserverError
from pserver.operations import Shrink, Survey
from pserver.sweeping import Sweeper

SHRINK = Shrink(table="t", delete_below=1.0)


class Counted:
    """A table whose count waits until it may go on."""

    def __init__(self):
        self.going_on, self.times = threading.Event(), 0

    def survey(self, shrink, stopping):
        self.times += 1
        while not self.going_on.wait(0.001):
            if stopping() and not self.going_on.is_set():
                raise Unavailable("the shard is stopping")
        return Survey(self.times, {}, {})


def told(sweeper, table):
    end_s = monotonic() + 10
    while (found := sweeper.survey(table, SHRINK)) is None:
        assert monotonic() < end_s
    return found.rows


def test_a_count_is_told_once_and_made_anew_for_the_next():
    sweeper, table = Sweeper(), Counted()
    assert sweeper.survey(table, SHRINK) is None
    table.going_on.set()
    assert told(sweeper, table) == 1 and told(sweeper, table) == 2


def test_a_count_that_nobody_came_back_for_is_not_told_to_others(monkeypatch):
    monkeypatch.setattr(sweeping, "STALE_S", 0.0)
    sweeper, table = Sweeper(), Counted()
    assert sweeper.survey(table, SHRINK) is None
    table.going_on.set()
    sweeper.stop()  # waits for the count
    sweeper.survey(table, SHRINK)
    sweeper.stop()
    assert table.times == 2


class Broken:
    """A table that cannot be counted, as no error of ours tells."""

    def __init__(self):
        self.times = 0

    def survey(self, shrink, stopping):
        self.times += 1
        raise OverflowError("Python int too large to convert to C long")


def test_a_count_that_breaks_fails_whoever_asked_and_is_not_begun_again():
    sweeper, table = Sweeper(), Broken()
    with pytest.raises(PserverError, match=r"rows of table t cannot be counted: OverflowError\('Python int too large"):
        told(sweeper, table)
    assert table.times == 1


def test_the_end_waits_for_no_count():
    sweeper, table = Sweeper(), Counted()
    assert sweeper.survey(table, SHRINK) is None
    sweeper.stop()
    with pytest.raises(Unavailable, match="stopping"):
        told(sweeper, table)
