"""The closes of a log that is being written: each told once, whatever happens to the files meanwhile."""

import shutil

import pytest

from headrace.deadline import Deadline
from headrace.service.history.closes import Closes, TimelineVersion
from headrace.trainer.journal.log import Log
from tests.fakes.past import Past


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
    assert [each.version for each in closes.newest(2, behind=0)] == [2, 3]
    assert [each.version for each in closes.newest(2, behind=2)] == [3]
    assert closes.newest(2, behind=3) == []


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
    again.log = Log.claim(past.store / "log", 1, Deadline.after(5), timeline="t1", facts={"pid": 2})
    again.meet("a", "b")
    for version in range(1, 6):  # farther than the old log was read
        close(again, version)
    assert [(each.version, each.timeline) for each in closes.after(0, 10)] == [(each, "t1") for each in range(1, 6)]
    assert closes.newest(9) == Closes(past.store / "log").newest(9)
    again.end()


def test_a_moment_is_read_as_it_is_written_and_later_ones_are_greater():
    for moment in (TimelineVersion(2, 23), TimelineVersion(0, 23)):
        assert TimelineVersion.of(str(moment)) == moment
    assert str(TimelineVersion(2, 23)) == "t2-23" and TimelineVersion(1, 99) < TimelineVersion(2, 21) < TimelineVersion(
        2, 23
    )
    for text in ("", "t2", "2-23", "t2-", "-1", "t2-23-g1", "\u0662", "9" * 16):
        assert TimelineVersion.of(text) is None


def test_a_moment_of_a_timeline_that_was_left_is_where_the_present_one_left_it(past):
    closes = Closes(past.store / "log")
    assert closes.placed(TimelineVersion(1, 7)) == TimelineVersion(1, 7)
    close(past, 1, 2, 3, 4, 5)
    past.begin("t2", base="t1-0000000004-g1")
    assert closes.placed(TimelineVersion(1, 5)) == closes.placed(TimelineVersion(2, 4)) == TimelineVersion(2, 4)
    close(past, 5, 6, 7)
    past.begin("t3", base="t2-0000000006-g2")
    close(past, 7)
    past.begin("t4", base="t2-0000000005-g2")
    for follower in (closes, Closes(past.store / "log")):
        placed = {
            text: str(follower.placed(TimelineVersion.of(text)))
            for text in ("t1-2", "t1-5", "t2-5", "t2-7", "t3-7", "t4-9", "t9-9", "9")
        }
        assert placed == {
            "t1-2": "t4-2", "t1-5": "t4-4", "t2-5": "t4-5", "t2-7": "t4-5", "t3-7": "t4-5",
            "t4-9": "t4-9", "t9-9": "t4-0", "9": "t4-9",
        }  # fmt: skip


def test_a_rewind_back_to_a_timeline_that_was_left_has_its_closes_again(past):
    closes = Closes(past.store / "log")
    close(past, 1, 2, 3)
    past.begin("t2", base="t1-0000000001-g1")
    close(past, 2)
    assert [str(each.moment) for each in closes.after(0, 10)] == ["t1-1", "t2-2"]
    past.begin("t3", base="t1-0000000003-g1")
    close(past, 4)
    for follower in (closes, Closes(past.store / "log")):
        assert [str(each.moment) for each in follower.after(0, 10)] == ["t1-1", "t1-2", "t1-3", "t3-4"]
