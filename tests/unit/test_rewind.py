"""Steering a stopped job: the log afterwards, and the next run."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from headrace.errors import HeadraceError, SpecError
from headrace.trainer.checkpoint.commits import Commits
from headrace.trainer.checkpoint.rewind import Lineage, NotPossible, claims, rewind, rewind_anew, skip
from headrace.trainer.journal.job_history import JobHistory
from headrace.trainer.journal.log import LogDamaged, RecordKind, newest_generation, read
from headrace.trainer.journal.log_file import listed
from headrace.trainer.journal.partitions import SkippedRange
from headrace.trainer.journal.records import SkipOperation
from tests.fakes.past import Past


@pytest.fixture
def past(tmp_path):
    """A job that read partitions a and b: passes 1 to 3 closed, a commit of 2, passes 4 and 5 planned."""
    made = Past(tmp_path / "store").begin()
    made.meet("a", "b", end=1000)
    made.close(1, a=(0, 100))
    made.close(2, a=(100, 200), b=(0, 50))
    made.name = made.commit(2)
    made.close(3, a=(200, 300))
    made.plan(4, a=(300, 400))
    made.plan(5, a=(400, 500), b=(50, 60))
    yield made
    made.end()


def history(past):
    return JobHistory.of(read(past.store / "log"))


def commit(past):
    return Commits(past.store).read(past.name)


def go_past(past, *wanted, reason="broken"):
    past.end()
    return skip(past.store, commit(past), SkippedRange(*wanted), reason)


# A new timeline


def test_after_a_rewind_the_job_is_at_the_commit_on_a_new_timeline(past):
    past.end()
    assert rewind(past.store, commit(past), "t2") == 2
    now = history(past)
    assert (now.timeline, now.base, now.closed, now.generation) == ("t2", past.name, 2, 2)
    assert now.after(2) == []
    assert not now.unclosed()


def test_a_rewind_logs_its_program_and_time(past):
    past.end()
    rewind(past.store, commit(past), "t2")
    claim = history(past).claim
    assert claim.facts["by"] == "headrace rewind"
    assert claim.facts["at"].endswith("+00:00")


def test_the_next_generation_continues_from_the_commit(past):
    past.end()
    rewind(past.store, commit(past), "t2")
    past.generation = 2
    past.begin("t2", past.name).close(3, a=(200, 250))
    now = history(past)
    assert [each.plan.number for each in now.after(2)] == [3]
    assert now.plans[3].content.segments[0][0].end == 250


def test_a_new_timeline_has_a_new_name(past):
    assert Lineage("t2", {"t1": None, "t2": None}).next_timeline([]) == "t3"
    assert Lineage("t2", {"t1": None, "t2": None}).next_timeline(["t7-0000000002-g1"]) == "t8"
    assert Lineage("", {}).next_timeline([]) == "t1"


def test_a_lineage_holds_the_versions_that_led_to_the_present_one():
    lineage = Lineage("t4", {"t1": None, "t2": "t1-0000000010-g1", "t3": None, "t4": "t2-0000000015-g2"})
    held = {
        "t4-0000000016-g9": True, "t2-0000000015-g2": True, "t2-0000000016-g2": False, "t1-0000000010-g1": True,
        "t1-0000000011-g1": False, "t3-0000000001-g1": False, "t5-0000000001-g1": False,
    }  # fmt: skip
    assert {name: lineage.holds(name) for name in held} == held


def test_a_store_whose_log_has_not_begun_has_every_commit_in_its_lineage():
    assert Lineage.of([]).holds("t1-0000000010-g1")


# A new timeline where the log is damaged


@pytest.fixture
def damaged(past):
    """Files of two generations; the first one has a flipped bit after the commit."""
    past.begin().close(4, a=(300, 400))
    past.end()
    path = past.store / "log" / "00000001-0001.log"
    content = bytearray(path.read_bytes())
    content[content.index(b'"number":5') + 9] ^= 1
    path.write_bytes(content)
    with pytest.raises(LogDamaged):
        read(path.parent)
    return past


def test_a_new_log_is_at_the_commit_and_the_old_one_is_kept(damaged):
    folder = damaged.store / "log"
    before = {path.name: path.read_bytes() for path in listed(folder)}
    aside = rewind_anew(damaged.store, commit(damaged), "t2")
    now = history(damaged)
    assert (now.timeline, now.base, now.closed, now.generation) == ("t2", damaged.name, 2, 3)
    assert {path.name: path.read_bytes() for path in listed(aside)} == before
    assert [path.name for path in listed(folder)] == ["00000003-0001.log"]
    assert not (damaged.store / "log.begun").exists()


def test_a_new_log_is_continued(damaged):
    rewind_anew(damaged.store, commit(damaged), "t2")
    damaged.generation = 3
    damaged.begin("t2", damaged.name).close(3, a=(200, 250))
    assert [each.plan.number for each in history(damaged).after(2)] == [3]
    assert Lineage.of(claims(damaged.store / "log")).holds(damaged.name)


@pytest.mark.parametrize("renames", range(4))
def test_an_interrupted_new_log_is_begun_again_and_older_generations_stay_out(damaged, monkeypatch, renames):
    """Killed after this many renames: of the old file, the new one, the last old one."""

    class Killed(BaseException):
        pass

    left = renames
    real = Path.rename

    def rename(path, target):
        nonlocal left
        if not left:
            raise Killed
        left -= 1
        return real(path, target)

    with monkeypatch.context() as killing:
        killing.setattr(Path, "rename", rename)
        with pytest.raises(Killed) if renames < 3 else nullcontext():
            rewind_anew(damaged.store, commit(damaged), "t2")
    assert newest_generation(damaged.store / "log") == (2 if renames < 2 else 3)
    if renames < 3:
        with pytest.raises(LogDamaged) if renames != 1 else nullcontext():
            read(damaged.store / "log")
        rewind_anew(damaged.store, commit(damaged), "t2")
    now = history(damaged)
    assert (now.timeline, now.closed) == ("t2", 2)


def test_the_lineage_is_known_of_a_damaged_log(damaged):
    assert Lineage.of(claims(damaged.store / "log")) == Lineage("t1", {"t1": None})


# A skipped range


def test_a_skip_withdraws_the_plans_from_the_first_one_on_that_touches_it(past):
    assert go_past(past, "a", 410, 420) == [5]
    now = history(past)
    assert [each.content.number for each in now.unclosed()] == [4]
    assert now.operations[-1].content == SkipOperation(partition="a", begin=410, end=420, reason="broken")
    assert now.voids[5].content.reason == "touches what is skipped: broken"


def test_later_plans_are_withdrawn_first(past):
    assert go_past(past, "a", 399, 420) == [4, 5]
    voids = [record.content.number for record in read(past.store / "log") if record.kind is RecordKind.VOID]
    assert voids == [5, 4]
    assert not history(past).unclosed()


def test_a_skip_that_touches_no_plan_withdraws_none(past):
    assert go_past(past, "b", 60, 70) == []
    assert len(history(past).unclosed()) == 2


def test_a_skip_stays_on_its_timeline(past):
    go_past(past, "a", 300, 301)
    now = history(past)
    assert (now.timeline, now.base, now.closed, now.generation) == ("t1", None, 3, 2)


@pytest.mark.parametrize(
    ("wanted", "error", "text"),
    [
        (("c", 0, 1), SpecError, "the job knows no partition 'c'; it knows a, b"),
        (("a", 5, 5), SpecError, "5 to 5 is not a range"),
        (("a", -1, 5), SpecError, "-1 to 5 is not a range"),
        (("a", 299, 310), NotPossible, "a: the job is at position 300, so 299 to 300 is already trained"),
        (("b", 20, 30), NotPossible, "b: the job is at position 50, so 20 to 30 is already trained"),
        (("a", 990, 1001), NotPossible, "a ends at position 1000; 1001 is beyond it"),
    ],
)
def test_an_invalid_skip_is_refused_and_nothing_is_claimed(past, wanted, error, text):
    with pytest.raises(error) as caught:
        go_past(past, *wanted)
    assert text in str(caught.value)
    assert newest_generation(past.store / "log") == 1


def test_a_partition_that_only_the_commit_knows_counts(past):
    """The log before the commit may be pruned."""
    past.end()
    found = commit(past)
    partition = {"name": "c", "number": 2, "start": 7, "end": None, "identity": ""}
    found.state["partitions"].append(partition)
    found.manifest.positions["c"] = 30
    with pytest.raises(HeadraceError, match="c: the job is at position 30"):
        skip(past.store, found, SkippedRange("c", 29, 40), "broken")
    assert skip(past.store, found, SkippedRange("c", 30, 40), "broken") == []
