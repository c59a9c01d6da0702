"""Each slot keeps its rows when the slots of a job change, and no number is used again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.dataset.spec.config import DenseSlot, RemovedSlot, SparseSlot
from headrace.dataset.spec.schema import Schema
from headrace.dataset.spec.slot_groups import settled
from headrace.errors import SpecError

NAMES = "abcdef"


def numbers(entries):
    return {slot.name: slot.group for slot in Schema.of(entries).sparse}


def removed(entries):
    return {each.group for each in entries if isinstance(each, RemovedSlot)}


def sparse(*names):
    return [SparseSlot(name=name) if len(name) == 1 else SparseSlot(names=tuple(name)) for name in names]


def test_appended_slots_leave_the_file_as_it_is_and_others_get_entries_with_numbers():
    old = sparse("ab", "c")
    appended = [*old, *sparse("d")]
    assert settled(old, appended) == tuple(appended)
    assert numbers(settled(old, sparse("cd", "a"))) == {"c": 2, "d": 3, "a": 0}
    assert removed(settled(old, sparse("cd", "a"))) == {1}
    assert numbers(settled(old, sparse("b", "a", "c"))) == {"b": 1, "a": 0, "c": 2}


def test_a_number_of_a_removed_slot_is_never_used_again():
    without = settled(sparse("a", "b"), sparse("a"))
    assert removed(without) == {1}
    assert numbers(settled(without, sparse("a", "b"))) == {"a": 0, "b": 2}
    assert removed(settled(without, sparse("a", "b"))) == {1}


def test_slots_that_share_rows_keep_their_number_while_one_is_left():
    first = [SparseSlot(name="x"), SparseSlot(names=("s", "t"), share="item"), SparseSlot(name="y")]
    second = [SparseSlot(name="t", share="item"), SparseSlot(name="u", share="item"), SparseSlot(name="y")]
    assert numbers(settled(first, second)) == {"t": 1, "u": 1, "y": 2}


def test_a_number_in_the_file_is_that_of_the_store_or_refused():
    old = sparse("a", "b")
    assert numbers(settled(old, [SparseSlot(name="b", group=1)])) == {"b": 1}
    with pytest.raises(SpecError, match=r"slots.0.group: slot 'b' has the number 1 in the store, not 4; leave"):
        settled(old, [SparseSlot(name="b", group=4)])
    with pytest.raises(SpecError, match=r"slots.1.group: 1 is the number of two slots"):
        Schema.of([SparseSlot(name="a", group=1), SparseSlot(name="b", group=1)])
    with pytest.raises(SpecError, match=r"slots.1.group: 1 is the number of two slots"):
        Schema.of([SparseSlot(name="a", group=1), RemovedSlot(kind="removed", name="b", group=1)])
    assert numbers([SparseSlot(name="a"), SparseSlot(names=("b", "c"), group=0)]) == {"a": 2, "b": 0, "c": 1}


@given(files=st.lists(st.permutations(NAMES).flatmap(lambda order: st.integers(1, 6).map(lambda n: order[:n])),
                      min_size=1, max_size=6))  # fmt: skip
def test_through_any_changes_slots_keep_numbers_and_numbers_keep_slots(files):
    in_force, owners, gone = sparse(*files[0]), dict[int, str](), set[int]()
    for file in files:
        before = numbers(in_force)
        in_force = settled(in_force, [*sparse(*file), DenseSlot(kind="dense", name="z")])
        assert settled(in_force, [*sparse(*file), DenseSlot(kind="dense", name="z")]) == in_force
        now = numbers(in_force)
        assert list(now) == list(file)
        assert all(now[name] == before[name] for name in now if name in before)
        gone |= {before[name] for name in before if name not in now}
        assert removed(in_force) == gone
        assert not gone & set(now.values())
        assert all(owners.setdefault(group, name) == name for name, group in now.items())
