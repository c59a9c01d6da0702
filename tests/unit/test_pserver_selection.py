"""Slots with the admission of their table share counts, whatever their other settings."""

import numpy as np

from headrace.keys import NUM_BUCKETS
from headrace.pserver.admission.slot_admission import SlotAdmission
from headrace.pserver.config import TableSection
from headrace.pserver.rows.slot_classes import classes_of

GROUPS = {"a": 3, "b": 5, "c": 7}
COUNT = {"kind": "count", "n": 3, "exact": True}


def classes(**slots):
    return classes_of(TableSection(dim=2, admission=[COUNT], slots=slots), GROUPS)


def selection(**slots):
    return SlotAdmission(classes(**slots), 1, (0, NUM_BUCKETS))


def shown(chosen, group, shows, key=11):
    """Whether a key of a slot group may have a row after so many shows more."""
    one_U = np.ones(1, np.float32)
    (admitted,) = chosen.admit(np.array([key], np.uint64), np.array([group], np.uint16), shows * one_U, 0 * one_U, 0)
    return bool(admitted)


def test_other_settings_of_a_slot_leave_its_counts_where_they_are():
    chosen = selection()
    assert not shown(chosen, 5, 2)
    for slots in ({"b": {"lr": 0.5}}, {"b": {"lr": 0.5}, "a": {"decay": 0.9}}, {"b": {"admission": [COUNT]}}, {}):
        before = chosen.digest()
        assert chosen.set(classes(**slots)) == [] and chosen.digest() == before != 0
    assert shown(chosen, 5, 1)


def test_slots_with_the_same_admission_of_their_own_share_its_counts_too():
    own = {"admission": [{**COUNT, "n": 4}]}
    chosen = selection(b=own, c=own)
    assert not shown(chosen, 7, 3)
    assert chosen.set(classes(b={**own, "lr": 0.5}, c=own)) == []
    assert set(chosen.state()) == set(selection(b=own).state()), "and a commit has them once"
    assert shown(chosen, 7, 1)


def test_a_commit_goes_on_under_other_settings_of_slots():
    chosen, again = selection(), selection(b={"lr": 0.5})
    shown(chosen, 5, 2)
    assert again.load([(0, chosen.state())]) == [] and again.digest() == chosen.digest()
    assert shown(again, 5, 1)


def test_a_slot_that_gets_an_admission_of_its_own_is_counted_anew():
    chosen = selection()
    shown(chosen, 5, 2)
    chosen.set(classes(b={"admission": [{**COUNT, "n": 2}]}))
    assert not shown(chosen, 5, 1) and not shown(chosen, 3, 2, key=12)
