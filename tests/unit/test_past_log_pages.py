"""The lines of a log that is being written: page by page the same as the whole log, whatever happens to its files."""

import shutil
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.deadline import Deadline
from headrace.service.history import log_pages
from headrace.service.history.log_pages import LogPages
from headrace.service.history.log_text import log_lines
from headrace.trainer.journal.log import Log, read
from headrace.trainer.journal.records import SetOperation, SpecOperation
from tests.fakes.past import SPEC, Past


@pytest.fixture
def past(tmp_path):
    made = Past(tmp_path / "store").begin()
    made.meet("a")
    yield made
    made.end()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(log_pages, "BLOCK_RECORDS", 4)
    monkeypatch.setattr(log_pages, "MAX_BLOCKS", 2)


def close(past, *versions):
    for version in versions:
        past.close(version, a=(100 * version - 100, 100 * version))


def whole(past):
    return list(log_lines(read(past.store / "log")))


def walked(pages, limit):
    found, number = [], 0
    while lines := pages.after(number, limit):
        found, number = found + lines, lines[-1].number
    return found


def check(pages, past):
    lines = whole(past)
    for limit in (1, 3, 100):
        assert walked(pages, limit) == lines
        assert pages.newest(limit) == lines[-limit:]


def test_pages_are_the_whole_log_while_it_grows(past):
    pages = LogPages(past.store / "log")
    for version in range(1, 20):
        close(past, version)
        check(pages, past)
    assert pages.after(10**6, 5) == []


def test_pages_follow_generations_timelines_and_changes_of_the_spec(past):
    pages = LogPages(past.store / "log")
    past.log.append(SpecOperation(spec=SPEC))
    close(past, 1, 2, 3)
    check(pages, past)
    past.begin()
    past.log.append(SpecOperation(spec=SPEC | {"seed": 4}))
    past.begin("t2", base="t1-0000000001-g1")
    past.log.append(SpecOperation(spec=SPEC | {"seed": 5}))
    close(past, 2, 3, 4)
    check(pages, past)
    check(LogPages(past.store / "log"), past)
    assert "seed 4 -> 5" in "".join(line.text for line in walked(pages, 7))


def test_lines_stay_as_they_are_when_the_records_before_them_are_pruned(past):
    pages = LogPages(past.store / "log")
    close(past, 1, 2, 3)
    before = past.log.files()[0].path
    past.begin()
    close(past, 4, 5, 6, 7, 8)
    lines = walked(pages, 3)
    before.unlink()
    first = read(past.store / "log")[0].number
    assert first > 1
    assert walked(pages, 3) == [line for line in lines if line.number >= first]
    assert walked(pages, 3)[1:] == whole(past)[1:]


def test_a_log_that_was_begun_anew_is_told_from_its_begin(past):
    pages = LogPages(past.store / "log")
    close(past, 1, 2, 3)
    check(pages, past)
    past.end()
    shutil.rmtree(past.store)
    assert walked(pages, 3) == []
    again = Past(past.store)
    again.log = Log.claim(past.store / "log", 1, Deadline.after(5), timeline="t1", facts={"pid": 2})
    again.meet("a", "b")
    close(again, 1, 2, 3, 4, 5)  # farther than the old log was read
    check(pages, again)
    again.end()


def test_a_record_that_is_taken_back_is_replaced_by_the_next_one(past):
    pages = LogPages(past.store / "log")
    close(past, 1)
    path = past.log.files()[0].path
    kept = path.read_bytes()
    past.log.append(SetOperation(id="a", keys={"train.learn": False}))
    assert "train.learn = false" in pages.newest(1)[0].text
    path.write_bytes(kept)  # the sync failed, and its worker cut it
    past.log.close()
    past.begin()
    close(past, 2)
    check(pages, past)


def test_a_torn_end_waits_and_bytes_behind_a_seal_do_not_count(past):
    pages = LogPages(past.store / "log")
    close(past, 1)
    path = past.log.files()[0].path
    kept = path.read_bytes()
    close(past, 2)
    second = path.read_bytes()[len(kept) :]
    path.write_bytes(kept + second[:-7])
    number = pages.newest(1)[0].number
    path.write_bytes(kept + second)
    assert pages.newest(1)[0].number == number + 1
    past.begin()
    with path.open("ab") as file:
        file.write(second)
    close(past, 3)
    check(pages, past)


def damaged(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("generations", [1, 2])
def test_a_damaged_log_is_left_to_the_whole_reader_until_it_is_repaired(past, generations):
    close(past, 1, 2, 3)
    path = past.log.files()[0].path
    kept = path.read_bytes()
    for _ in range(1, generations):
        past.begin()
    close(past, 4)
    good = path.read_bytes()
    pages = LogPages(past.store / "log")
    damaged(path, len(kept) - 200)
    assert pages.after(0, 100) is None and pages.newest(1) is None
    path.write_bytes(good)
    pages.forget()
    check(pages, past)


def test_damage_to_lines_that_are_no_longer_in_memory_is_found_when_they_are_read_again(past):
    pages = LogPages(past.store / "log")
    close(past, *range(1, 20))
    assert len(pages.newest(1000)) > 8  # the newest blocks are in memory now
    damaged(past.log.files()[0].path, 700)
    assert pages.after(0, 100) is None


def test_a_sealed_file_that_lost_its_end_is_left_to_the_whole_reader(past):
    pages = LogPages(past.store / "log")
    close(past, 1, 2)
    path = past.log.files()[0].path
    past.begin()
    path.write_bytes(path.read_bytes()[:-20])
    assert pages.after(0, 100) is None


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(["close", "begin", "rewind", "spec", "look"]), max_size=25))
def test_whatever_a_log_goes_through_a_follower_has_the_lines_of_the_whole(tmp_path_factory, acts):
    past = Past(tmp_path_factory.mktemp("log") / "store").begin()
    pages, version = LogPages(past.store / "log"), 0
    for act in acts:
        match act:
            case "close":
                version += 1
                close(past, version)
            case "begin":
                past.begin(past.timeline, past.base)
            case "rewind":
                past.begin(f"t{past.generation + 1}", base=f"{past.timeline}-{version:010d}-g{past.generation}")
            case "spec":
                past.log.append(SpecOperation(spec=SPEC | {"seed": past.generation}))
            case "look":
                check(pages, past)
    check(pages, past)
    numbers = [line.number for line in walked(pages, 5)]
    assert all(after == before + 1 for before, after in pairwise(numbers))
    past.end()
