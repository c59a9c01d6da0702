"""Counting the rows of a shrink in the background: returned once, not much later, and not after the end."""

import threading
from time import monotonic

import pytest

from headrace.errors import Unavailable
from headrace.pserver.errors import PserverError
from headrace.pserver.protocol.table_operations import ShrinkRows, ShrinkSurvey
from headrace.pserver.tables import sweeping
from headrace.pserver.tables.sweeping import Sweeper

SHRINK = ShrinkRows(table="t", delete_below=1.0)


class Counted:
    """A table whose count waits for an event."""

    def __init__(self):
        self.going_on, self.times = threading.Event(), 0
        self.deletions = self

    def survey(self, shrink, stopping):
        self.times += 1
        while not self.going_on.wait(0.001):
            if stopping() and not self.going_on.is_set():
                raise Unavailable("the shard is stopping")
        return ShrinkSurvey(self.times, {}, {})


def told(sweeper, table):
    end_s = monotonic() + 10
    while (found := sweeper.survey(table, SHRINK)) is None:
        assert monotonic() < end_s
    return found.rows


def test_a_count_is_returned_once_and_repeated_for_the_next_call():
    sweeper, table = Sweeper(), Counted()
    assert sweeper.survey(table, SHRINK) is None
    table.going_on.set()
    assert told(sweeper, table) == 1 and told(sweeper, table) == 2


def test_an_abandoned_count_is_not_returned_to_others(monkeypatch):
    monkeypatch.setattr(sweeping, "STALE_S", 0.0)
    sweeper, table = Sweeper(), Counted()
    assert sweeper.survey(table, SHRINK) is None
    table.going_on.set()
    sweeper.stop()  # waits for the count
    sweeper.survey(table, SHRINK)
    sweeper.stop()
    assert table.times == 2


class Broken:
    """A table whose count raises an error that is not ours."""

    def __init__(self):
        self.times = 0
        self.deletions = self

    def survey(self, shrink, stopping):
        self.times += 1
        raise OverflowError("Python int too large to convert to C long")


def test_a_failed_count_raises_and_is_not_restarted():
    sweeper, table = Sweeper(), Broken()
    with pytest.raises(PserverError, match=r"rows of table t cannot be counted: OverflowError\('Python int too large"):
        told(sweeper, table)
    assert table.times == 1


def test_stop_does_not_wait_for_a_count():
    sweeper, table = Sweeper(), Counted()
    assert sweeper.survey(table, SHRINK) is None
    sweeper.stop()
    with pytest.raises(Unavailable, match="stopping"):
        told(sweeper, table)
