"""Each logged pass is replayed under its own spec, from any commit."""

import pytest

from headrace.errors import HeadraceError, SpecError
from headrace.trainer.checkpoint.commits import MANIFEST
from headrace.trainer.journal.records import RequestedOperation, SpecOperation
from headrace.trainer.rank0.logged_specs import overrides_of, replay_first
from headrace.trainer.rank0.recovery import Recovery
from tests.fakes.past import SPEC, Past
from tests.fakes.records import operation

LATER = {**SPEC, "train": {"batch_size": 7}}


def spec(past, said):
    past.log.append(SpecOperation(spec=said))


def numbers(found):
    found.joblog.close()
    return [each.plan.number for each in found.replay]


@pytest.fixture
def past(tmp_path):
    """Commits of 1 and 3, then another spec, under which 4 and 5 are trained."""
    made = Past(tmp_path / "store").begin()
    spec(made, SPEC)
    made.close(1, a=(0, 100))
    made.older = made.commit(1)
    for number in (2, 3):
        made.close(number, a=(100 * number - 100, 100 * number))
    made.newer = made.commit(3)
    made.begin()
    spec(made, LATER)
    for number in (4, 5):
        made.close(number, a=(100 * number - 100, 100 * number))
    made.end()
    return made


def test_passes_of_two_specs_are_replayed_each_under_its_own(past):
    (past.store / "commits" / past.newer / "dense.safetensors").write_bytes(b"other bytes")
    assert replay_first(past.store, LATER, 1) is None  # nobody has read the commit's files
    with pytest.raises(HeadraceError, match=r"passes must be replayed .*train\.batch_size"):
        Recovery(past.store, 3, LATER).begin()
    assert not (past.store / "commits" / past.newer / MANIFEST).exists()

    assert replay_first(past.store, LATER, 1) == (SPEC, 1)
    assert numbers(Recovery(past.store, 4, SPEC, logged_only=True).begin()) == [2, 3]
    past.generation = 4
    past.begin().commit(3)
    past.end()
    assert replay_first(past.store, LATER, 1) is None
    assert numbers(Recovery(past.store, 6, LATER).begin()) == [4, 5]


def test_a_spec_that_is_changed_back_waits_for_the_passes_of_the_one_between(past):
    assert replay_first(past.store, SPEC, 1) == (LATER, 1)
    with pytest.raises(HeadraceError, match="passes must be replayed"):
        Recovery(past.store, 3, SPEC).begin()


def test_a_spec_changed_back_before_a_pass_closed_withdraws_what_was_planned_meanwhile(tmp_path):
    past = Past(tmp_path / "store").begin()
    spec(past, SPEC)
    past.close(1, a=(0, 100))
    spec(past, LATER)
    past.plan(2, a=(100, 200))
    past.end()
    assert replay_first(past.store, SPEC, 1) is None
    found = Recovery(past.store, 2, SPEC).begin()
    assert (numbers(found), found.last_number) == ([1], 2)


def test_commits_of_an_abandoned_timeline_do_not_count(past):
    past.begin("t2", past.older).close(2, a=(100, 200))
    past.end()
    assert replay_first(past.store, LATER, 1) == (SPEC, 1)


# -- overrides

LR, DECAY = "tables.default.optimizer.lr", "tables.default.decay"
SET = {"op": "set", "id": "a", "keys": {LR: 0.5, DECAY: 0.9}}
FASTER = {**SPEC, "tables": {"default": {"optimizer": {"lr": 0.7}}}}


@pytest.fixture
def setting(tmp_path):
    """A set that acts at the close of 2, other operations that wait; a commit of 1."""
    made = Past(tmp_path / "store").begin()
    spec(made, SPEC)
    made.close(1, a=(0, 100))
    made.first = made.commit(1)
    made.log.append(operation(SET))
    made.close(2, a=(100, 200))
    made.log.append(operation({"op": "day_tick", "id": "b", "to": 1}))
    made.log.append(operation({**SET, "id": "c"}))
    made.end()
    return made


def test_a_set_is_replayed_at_its_close_and_a_waiting_one_acts_at_the_first_new_close(setting):
    found = Recovery(setting.store, 2, SPEC).begin()
    found.joblog.close()
    assert [list(each.operations) for each in found.replay] == [[operation(SET)]]
    assert [each.id for each in found.waiting if isinstance(each, RequestedOperation)] == ["b", "c"]


def test_a_changed_job_file_wins_over_a_waiting_set(setting):
    assert replay_first(setting.store, FASTER, 1) == (SPEC, 1)
    past = setting.begin()
    past.commit(2)
    past.end()
    for _ in range(2):  # and again after a crash
        past.generation += 1
        found = Recovery(setting.store, past.generation, FASTER).begin()
        found.joblog.close()
        waits = {each.id: each for each in found.waiting if isinstance(each, RequestedOperation)}
        assert waits["c"].keys == {DECAY: 0.9} and waits["b"].to == 1


def test_overrides_of_a_commit_without_any_and_with_a_changed_job_file(setting):
    class Of:
        state = {"spec": SPEC, "operations": {"overrides": SET["keys"]}}

    class Old:
        state = {"spec": SPEC}

    assert overrides_of(None, SPEC) == {} == overrides_of(Old, SPEC)
    assert overrides_of(Of, SPEC) == SET["keys"] and overrides_of(Of, FASTER) == {DECAY: 0.9}


def test_a_job_that_never_closed_a_pass_takes_any_spec(tmp_path):
    """Its first start failed, for example because of a slot's kind: no stored rows contradict the corrected spec."""
    past = Past(tmp_path / "store").begin()
    spec(past, SPEC)
    past.plan(1, a=(0, 100))
    past.end()
    mended = {**SPEC, "seed": 4}
    assert replay_first(past.store, mended, 1) is None
    assert numbers(Recovery(past.store, 2, mended).begin()) == []
    past.generation = 2
    past.begin().close(2, a=(0, 100))
    past.end()
    with pytest.raises(SpecError, match="seed: cannot change"):
        replay_first(past.store, SPEC, 1)
    with pytest.raises(SpecError, match="seed: cannot change"):
        Recovery(past.store, 4, SPEC).begin()


def test_passes_with_other_slots_are_replayed_with_them_before_the_slots_change_again(past):
    slots = [{"name": "a"}], [{"name": "a"}, {"name": "b"}], [{"name": "b", "group": 1}]
    first, second, third = ({**LATER, "slots": each} for each in slots)
    past.begin()
    spec(past, first)
    past.close(6, a=(500, 600))
    past.commit(6)
    past.begin()
    spec(past, second)
    past.close(7, a=(600, 700))
    past.end()
    assert replay_first(past.store, third, 1) == (second, 1)
    with pytest.raises(HeadraceError, match=r"passes must be replayed .*slots"):
        Recovery(past.store, 5, third).begin()
    assert numbers(Recovery(past.store, 6, second).begin()) == [7]
    with pytest.raises(SpecError, match=r"^slots: .*slot 'b' .group was 1 and is 0"):
        replay_first(past.store, {**LATER, "slots": [{"name": "b"}]}, 1)
