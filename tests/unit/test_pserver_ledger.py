"""What a call means in each state of a shard."""

import pytest

from headrace.pserver.consistency.sync import Sync
from headrace.pserver.errors import InvalidShardCall
from headrace.pserver.server.pass_state import CallVerdict, PassState


def opened(num_ranks=2, pass_number=1):
    ledger = PassState(num_ranks, Sync())
    assert ledger.open_pass(pass_number) is CallVerdict.ACT
    return ledger


def test_a_step_is_applied_when_every_rank_is_in():
    ledger = opened(3)
    assert [ledger.push(1, 0, rank) for rank in (2, 0, 1)] == [CallVerdict.WAIT, CallVerdict.WAIT, CallVerdict.ACT]
    ledger.steps.applied()
    assert ledger.steps.num_applied == 1 and ledger.may_answer(1, 0, 2) and not ledger.may_answer(1, 1, 2)


def test_a_push_repeated_while_others_are_missing_counts_once():
    ledger = opened(2)
    assert [ledger.push(1, 0, 0), ledger.push(1, 0, 0), ledger.push(1, 0, 1)] == [
        CallVerdict.WAIT,
        CallVerdict.WAIT,
        CallVerdict.ACT,
    ]


def test_a_push_repeated_after_its_step_changes_nothing():
    ledger = opened(1)
    ledger.push(1, 0, 0)
    ledger.steps.applied()
    assert ledger.push(1, 0, 0) is CallVerdict.REPEAT and not ledger.steps.due()


def test_the_parts_of_a_step_are_applied_one_by_one():
    ledger = opened(2)
    assert [ledger.push(1, 0, 0), ledger.push(1, 0, 0, part=3)] == [CallVerdict.WAIT] * 2
    assert ledger.push(1, 0, 1, part=3) is CallVerdict.ACT
    ledger.order(3).applied()
    assert ledger.may_answer(1, 0, 0, part=3) and not ledger.may_answer(1, 0, 0)
    assert ledger.missing() == "rank 0, 1", "of part 3, which waits for the next step; part 0 lacks rank 1"
    with pytest.raises(InvalidShardCall, match="steps of pass 1 are applied"):
        ledger.snapshot(0)
    with pytest.raises(InvalidShardCall, match="cannot close: step 0 lacks rank 1"):
        ledger.close_pass(1, 0, 5)


def test_no_pass_closes_before_a_part_is_applied():
    ledger = opened(2)
    ledger.push(1, 0, 0, part=1)
    with pytest.raises(InvalidShardCall, match="cannot close: step 0 lacks rank 1"):
        ledger.close_pass(1, 1, 5)
    with pytest.raises(InvalidShardCall, match="part 1048577 of an exchange; there are 1048576 at most"):
        ledger.push(1, 0, 0, part=(1 << 20) + 1)


def test_the_parts_of_a_pass_begin_anew_in_the_next_one():
    ledger = opened(1)
    assert ledger.push(1, 0, 0, part=1) is CallVerdict.ACT
    ledger.order(1).applied()
    ledger.close_pass(1, 0, 5)
    ledger.closed()
    ledger.open_pass(2)
    assert ledger.push(2, 0, 0, part=1) is CallVerdict.ACT


def test_ranks_that_are_late_are_named():
    ledger = opened(4)
    ledger.push(1, 0, 2)
    assert ledger.missing() == "rank 0, 1, 3"


@pytest.mark.parametrize(("pass_number", "step"), [(1, 1), (2, 0), (0, 0)])
def test_a_push_out_of_turn_is_refused(pass_number, step):
    with pytest.raises(InvalidShardCall):
        opened().push(pass_number, step, 0)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_the_job_does_not_have_is_refused(rank):
    with pytest.raises(InvalidShardCall, match=f"rank {rank} of 2 ranks"):
        opened(2).push(1, 0, rank)


def test_a_pass_closes_when_every_rank_asks_and_once():
    ledger = opened(2)
    assert [ledger.close_pass(1, rank, 4) for rank in (0, 0, 1)] == [
        CallVerdict.WAIT,
        CallVerdict.WAIT,
        CallVerdict.ACT,
    ]
    assert not ledger.has_closed(1)
    ledger.closed()
    assert ledger.has_closed(1) and ledger.close_pass(1, 1, 4) is CallVerdict.REPEAT
    assert not ledger.closing


def test_a_close_with_a_push_in_flight_is_refused():
    ledger = opened(2)
    ledger.push(1, 0, 0)
    with pytest.raises(InvalidShardCall, match="step 0 lacks rank 1"):
        ledger.close_pass(1, 1, 0)


def test_a_push_after_a_close_began_is_refused():
    ledger = opened(2)
    ledger.close_pass(1, 0, 0)
    with pytest.raises(InvalidShardCall, match="after ranks 0 closed it"):
        ledger.push(1, 0, 1)


def test_ranks_must_agree_on_the_day():
    ledger = opened(2)
    ledger.close_pass(1, 0, 3)
    with pytest.raises(InvalidShardCall, match="disagree on the day"):
        ledger.close_pass(1, 1, 4)


def test_steps_count_from_0_in_each_pass():
    ledger = opened(1)
    ledger.push(1, 0, 0)
    ledger.steps.applied()
    ledger.close_pass(1, 0, 0)
    ledger.closed()
    assert ledger.open_pass(5) is CallVerdict.ACT and ledger.open_pass(5) is CallVerdict.REPEAT
    assert ledger.push(5, 0, 0) is CallVerdict.ACT


def closed(pass_number=3):
    ledger = opened(1, pass_number)
    ledger.close_pass(pass_number, 0, 0)
    ledger.closed()
    return ledger


def test_a_push_before_the_pass_opens_is_refused():
    with pytest.raises(InvalidShardCall, match="pass 0 is closed"):
        PassState(1, Sync()).push(1, 0, 0)


def test_a_snapshot_is_of_the_last_closed_pass_and_in_flight_until_settled():
    ledger = closed(3)
    for version in (2, 4):
        with pytest.raises(
            InvalidShardCall, match=f"no snapshot of version {version}: version 3 is the last one closed"
        ):
            ledger.snapshot(version)
    assert ledger.snapshot(3) is CallVerdict.ACT
    ledger.taken(3)
    ledger.open_pass(4)
    assert ledger.snapshot(3) is CallVerdict.REPEAT  # whatever happened since
    with pytest.raises(InvalidShardCall, match="no snapshot of version 4: that of 3 is not settled"):
        ledger.snapshot(4)
    ledger.settled()
    with pytest.raises(InvalidShardCall, match="no snapshot of version 4: version 3 is the last one closed"):
        ledger.snapshot(4)


def test_a_snapshot_may_come_after_another_rank_opened_the_next_pass_but_not_after_a_step():
    ledger = opened(2, 3)
    ledger.close_pass(3, 0, 0)
    ledger.close_pass(3, 1, 0)
    ledger.closed()
    ledger.open_pass(5)
    ledger.push(5, 0, 1)
    assert ledger.snapshot(3) is CallVerdict.ACT
    ledger.push(5, 0, 0)
    ledger.steps.applied()
    with pytest.raises(InvalidShardCall, match="no snapshot of version 3: steps of pass 5 are applied"):
        ledger.snapshot(3)


def test_a_version_is_restored_before_the_first_pass_and_once():
    ledger = PassState(1, Sync())
    assert ledger.restore(7) is CallVerdict.ACT
    assert ledger.restore(8) is CallVerdict.ACT  # the first one failed
    ledger.has_restored(8)
    assert ledger.restore(8) is CallVerdict.REPEAT
    with pytest.raises(InvalidShardCall, match="version 7 cannot be restored: pass 8 is closed"):
        ledger.restore(7)
    with pytest.raises(InvalidShardCall, match="pass 8 cannot open: pass 8 was closed before"):
        ledger.open_pass(8)
    assert ledger.has_closed(8) and ledger.snapshot(8) is CallVerdict.ACT
    assert ledger.open_pass(12) is CallVerdict.ACT
    with pytest.raises(InvalidShardCall, match="version 8 cannot be restored: pass 12 is open"):
        ledger.restore(8)


def test_a_fresh_job_is_restored_as_version_0():
    ledger = PassState(1, Sync())
    assert ledger.restore(0) is CallVerdict.ACT
    ledger.has_restored(0)
    assert ledger.restore(0) is CallVerdict.REPEAT and ledger.snapshot(0) is CallVerdict.ACT
    assert ledger.open_pass(1) is CallVerdict.ACT


def test_nothing_is_restored_over_what_was_trained():
    with pytest.raises(InvalidShardCall, match="version 3 cannot be restored: pass 3 is closed"):
        closed(3).restore(3)
