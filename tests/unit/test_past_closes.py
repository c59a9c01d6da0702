"""The closes of a log that is being written: each told once, whatever happens to the files meanwhile."""

import shutil

import pytest

from millrace.deadline import Deadline
from service.past.closes import Closes
from tests.fakes.past import Past
from trainer.log import Log


@pytest.fixture
def past(tmp_path):
    made = Past(tmp_path / "store").begin()
    made.meet("a")
    yield made
    made.end()


def close(past, *versions):
    for version in versions:
        past.close(version, a=(100 * version - 100, 100 * version))


def test_closes_are_told_as_they_come_and_from_any_version_on(past):
    closes = Closes(past.store / "log")
    assert closes.after(0, 10) == []
    close(past, 1, 2)
    assert [each.version for each in closes.after(0, 10)] == [1, 2]
    close(past, 3)
    assert [each.version for each in closes.after(1, 10)] == [2, 3]
    assert [each.version for each in closes.after(0, 2)] == [1, 2]
    assert [(each.version, each.timeline) for each in closes.newest(1)] == [(3, "t1")]
    assert closes.after(3, 10) == []


def test_a_new_generation_goes_on_and_what_was_pruned_is_still_known(past):
    closes = Closes(past.store / "log")
    close(past, 1)
    closes.newest(1)
    first = past.log.files()[0].path
    past.begin()
    close(past, 2)
    first.unlink()
    assert [each.version for each in closes.after(0, 10)] == [1, 2]
    assert [each.version for each in Closes(past.store / "log").after(0, 10)] == [2]


def test_what_a_rewind_left_behind_is_not_told(past):
    closes = Closes(past.store / "log")
    close(past, 1, 2, 3)
    past.begin("t2", base="t1-0000000001-g1")
    close(past, 4)
    assert [(each.timeline, each.version) for each in closes.after(0, 10)] == [("t1", 1), ("t2", 4)]


def test_a_record_that_is_being_written_waits_and_one_behind_a_seal_does_not_count(past):
    closes = Closes(past.store / "log")
    close(past, 1)
    path = past.log.files()[0].path
    whole = path.read_bytes()
    close(past, 2)
    second = path.read_bytes()[len(whole) :]
    path.write_bytes(whole + second[:-7])
    assert [each.version for each in closes.after(0, 10)] == [1]
    path.write_bytes(whole + second)
    assert [each.version for each in closes.after(0, 10)] == [1, 2]
    past.begin()
    with path.open("ab") as file:
        file.write(second)
    close(past, 3)
    for each in (closes, Closes(past.store / "log")):
        assert [found.version for found in each.after(0, 10)] == [1, 2, 3]


def test_a_store_that_is_removed_leaves_nothing(past):
    closes = Closes(past.store / "log")
    close(past, 1)
    assert closes.newest(5)
    past.end()
    shutil.rmtree(past.store)
    assert closes.newest(5) == []


@pytest.mark.parametrize("generation", [1, 2])
def test_a_log_that_was_begun_anew_is_told_from_its_begin(past, generation):
    closes = Closes(past.store / "log")
    for _ in range(1, generation):
        past.begin()
    close(past, 1, 2, 3)
    assert len(closes.newest(5)) == 3
    past.end()
    shutil.rmtree(past.store)
    again = Past(past.store)
    again.log = Log.claim(past.store / "log", 1, {"timeline": "t1", "base": None, "pid": 2}, Deadline.after(5))
    again.meet("a", "b")
    for version in range(1, 6):  # farther than the old log was read
        close(again, version)
    assert [(each.version, each.timeline) for each in closes.after(0, 10)] == [(each, "t1") for each in range(1, 6)]
    assert closes.newest(9) == Closes(past.store / "log").newest(9)
    again.end()
