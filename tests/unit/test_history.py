"""The meaning of the log: passes, withdrawals, timelines, replays."""

from pathlib import Path

import pytest

from headrace.trainer.journal.job_history import HistoryMissing, JobHistory
from headrace.trainer.journal.log import LogRecord, RecordPlace
from headrace.trainer.journal.pass_plan import PassPlan
from headrace.trainer.journal.records import Claim, Void
from tests.fakes.records import close, operation

SPEC, SHRINK = {"op": "spec", "spec": {"lr": 1}}, {"op": "shrink"}


def claim(generation, timeline="t1", base=None, **more):
    return Claim(generation=generation, timeline=timeline, base=base, **more)


def plan(number):
    return PassPlan(number, ())


def void(number):
    return Void(number=number)


def of(*told, begin=1):
    """The history of these records."""
    return JobHistory.of([LogRecord(begin + i, content, RecordPlace(Path("log"), i)) for i, content in enumerate(told)])


def numbers(passes):
    return [(each.plan.number, each.close is not None, each.record) for each in passes]


def test_without_records_there_is_no_history():
    history = of()
    assert (history.timeline, history.generation, history.closed, history.last_number) == ("", 0, 0, 0)
    assert (history.after(0), history.unclosed(), history.spec) == ([], [], None)


def test_closed_passes_come_before_open_ones_each_as_logged():
    history = of(claim(1), plan(1), plan(2), close(1), claim(2), plan(3), close(2))
    assert numbers(history.after(0)) == [(1, True, 4), (2, True, 7), (3, False, 6)]
    assert numbers(history.after(1)) == [(2, True, 7), (3, False, 6)]
    assert history.after(3) == []
    assert [record.content.number for record in history.unclosed()] == [3]
    assert (history.generation, history.closed, history.last_number) == (2, 2, 3)


def test_a_withdrawn_pass_is_not_replayed_and_its_number_not_reused():
    history = of(claim(1), plan(1), plan(2), void(2), close(1))
    assert numbers(history.after(0)) == [(1, True, 5)]
    assert (history.unclosed(), history.last_number, list(history.voids)) == ([], 2, [2])
    assert numbers(of(claim(1), plan(1), void(1), plan(2), close(2)).after(0)) == [(2, True, 5)]


def test_a_pass_with_the_number_of_a_withdrawn_one_is_replayed():
    """Old logs have such numbers: a replay once reused them."""
    history = of(claim(1), plan(1), plan(2), void(2), close(1), claim(2), plan(2), close(2))
    assert numbers(history.after(0)) == [(1, True, 5), (2, True, 8)]


def test_an_operation_acts_at_the_close_after_it():
    history = of(claim(1), operation(SPEC), plan(1), close(1), operation(SHRINK), plan(2), close(2), operation(SHRINK))
    assert [record.number for record in history.operations] == [2, 5, 8]
    at = history.operations_by_version()
    assert {version: [record.number for record in records] for version, records in at.items()} == {
        1: [2],
        2: [5],
        None: [8],
    }
    assert [record.number for record in history.waiting()] == [8]


def test_the_spec_in_force_is_the_last_one_logged():
    later = {"op": "spec", "spec": {"lr": 2}}
    assert of(claim(1), operation(SPEC), operation(SHRINK)).spec == {"lr": 1}
    assert of(claim(1), operation(SPEC), operation(later)).spec == {"lr": 2}


def test_a_new_timeline_inherits_the_records_up_to_its_base():
    history = of(
        *[
            claim(1),
            operation(SPEC),
            plan(1),
            close(1),
            plan(2),
            operation({"op": "spec", "spec": {"lr": 2}}),
            close(2),
        ],
        *[plan(3), claim(2, "t2", "t1-0000000001-g1"), plan(2), close(2), plan(3)],
    )
    assert (history.timeline, history.base, history.closed, history.generation) == ("t2", "t1-0000000001-g1", 2, 2)
    assert numbers(history.after(0)) == [(1, True, 4), (2, True, 11), (3, False, 12)]
    assert history.spec == {"lr": 1}


def test_a_timeline_may_branch_off_one_before_the_last():
    first = [claim(1), plan(1), close(1), plan(2), close(2)]
    second = [claim(2, "t2", "t1-0000000001-g1"), plan(2), close(2), plan(3), close(3)]
    history = of(*first, *second, claim(3, "t3", "t1-0000000002-g1"), plan(3))
    assert numbers(history.after(1)) == [(2, True, 5), (3, False, 12)]


def test_a_timeline_from_a_commit_whose_log_is_elsewhere_begins_at_its_version():
    history = of(claim(1, "t2", "t1-0000000007-g4"), plan(8))
    assert (history.closed, history.last_number) == (7, 8)
    assert numbers(history.after(7)) == [(8, False, 2)]
    with pytest.raises(HistoryMissing, match=r"version 6 cannot be continued: the log has no plan 7 any more.*rewind"):
        history.after(6)


def test_a_timeline_that_is_claimed_again_continues():
    history = of(claim(1, "t2", "t1-0000000007-g4"), plan(8), claim(2, "t2", "t1-0000000007-g4"), close(8))
    assert (history.closed, history.claim.generation) == (8, 2)
    assert numbers(history.after(7)) == [(8, True, 4)]


def test_a_pruned_log_replays_only_complete_passes():
    history = of(claim(1, closed=4), close(5), plan(6), close(6), begin=20)
    assert numbers(history.after(5)) == [(6, True, 23)]
    with pytest.raises(HistoryMissing, match="version 4 .* no plan 5"):
        history.after(4)


def test_a_commit_older_than_a_pruned_log_is_not_taken_for_the_newest_state():
    history = of(claim(1, closed=10), begin=20)
    assert history.after(10) == []
    with pytest.raises(HistoryMissing, match="version 3 .* no plan 4"):
        history.after(3)


def test_a_missing_close_is_an_error():
    with pytest.raises(HistoryMissing, match="version 4 .* no close 5"):
        of(claim(1), plan(5), close(6), begin=20).after(4)
