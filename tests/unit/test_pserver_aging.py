"""Aging of rows: commits restore it, cuts clear the rows that they select, the deletion of a row can be predicted."""

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.pserver.config import SlotLife, TableSection
from headrace.pserver.lifecycle.aging import TableAging
from headrace.pserver.protocol.table_operations import ExportCut, ShrinkRows

GROUPS = {"a": 3, "b": 4}
SECTION = TableSection(decay=0.5, delete_below=0.3, delete_after_days=4, slots={"a": SlotLife(decay=0.9)})


def words(show=1.0, click=0.0, delta=0.0, group=4, day=0, changed=1):
    """(1, 5) the words of a row without weights."""
    floats = np.array([show, click, delta], np.float32).view(np.uint32)
    return np.array([[group | day << 16, changed, *floats]], np.uint32)


def act(life, number, version):
    """One of what may happen to a table."""
    match number % 5:
        case 0:
            life.tick(life.day + 1 + number // 5)
        case 1:
            life.shrink(ShrinkRows(table="t"), version)
        case 2:
            life.shrink(ShrinkRows(table="t", delete_below=0.1), version)
        case 3:
            life.cut(ExportCut(since=version // 2, base_threshold=0.2, delta_threshold=0.4, delta_keep_days=3), version)
        case _:
            life.set(SECTION.model_copy(update={"decay": 0.7}), GROUPS, version)


@given(st.lists(st.integers(0, 9)), st.sampled_from([3, 4]), st.floats(0, 9), st.integers(1, 9))
def test_what_a_commit_says_of_a_life_is_that_life(history, group, show, changed):
    life = TableAging(SECTION, GROUPS)
    for version, number in enumerate(history, 1):
        act(life, number, version)
    again = TableAging.of(SECTION, GROUPS, life.state)
    row = words(show=show, delta=show, group=group, changed=changed)
    assert again.state == life.state and again.day == life.day
    for ask in ("score", "absent", "delta_score", "unseen"):
        assert getattr(again, ask)(row).tolist() == getattr(life, ask)(row).tolist()


def test_a_commit_tells_of_frozen_slots_only_once_some_were():
    life = TableAging(SECTION, GROUPS)
    before = msgspec.json.encode(life.state)
    assert before == b'{"day":0,"rates":[],"shrinks":[],"cuts":[]}'
    life.freeze(4)
    life.freeze(3)
    assert msgspec.json.encode(life.state) == before[:-1] + b',"frozen_groups":[3,4]}'
    assert TableAging.of(SECTION, GROUPS, life.state).frozen_groups == {3, 4}
    life.unfreeze(3, 7)
    life.unfreeze(3, 8)
    assert msgspec.json.encode(life.state) == before[:-1] + b',"frozen_groups":[4],"thawed":{"3":7}}'


def test_shrinks_of_one_close_are_all_restored():
    life = TableAging(SECTION, GROUPS)
    life.shrink(ShrinkRows(table="t", delete_below=0.5), 1)
    life.shrink(ShrinkRows(table="t", delete_after_days=2), 1)
    swept = TableAging(SECTION, GROUPS)
    again = TableAging(SECTION, GROUPS)
    again.load([life.state, swept.state, life.state])
    assert again.shrinks == life.shrinks and again.absent(words(show=0.1))[0]


@given(st.floats(0, 50), st.floats(0, 50), st.sampled_from([3, 4]), st.integers(0, 3))
def test_a_row_leaves_on_the_day_it_was_foretold(show, click, group, today):
    life, row = TableAging(SECTION, GROUPS), words(show=show, click=click, group=group)
    life.tick(today)
    days = life.leaves_after(row[0])
    assert days is not None  # it is unseen for too long one day
    for later in range(days + 1):
        life.tick(today + later)
        gone = TableAging.of(SECTION, GROUPS, life.state)
        gone.shrink(ShrinkRows(table="t"), 1)
        assert gone.absent(row)[0] == (later == days)


def test_a_cut_clears_what_it_selects_and_nothing_that_changed_later():
    life = TableAging(SECTION, GROUPS)
    life.cut(ExportCut(since=2, delta_threshold=1.0), 5)
    told = {
        "selected": words(delta=2.0, changed=5),
        "too little": words(delta=0.5, changed=5),
        "before the parent": words(delta=2.0, changed=2),
        "later": words(delta=2.0, changed=6),
    }
    assert {name: float(life.delta_score(row)[0]) for name, row in told.items()} == {
        "selected": 0.0,
        "too little": 0.5,
        "before the parent": 2.0,
        "later": 2.0,
    }
    assert life.delta_score(told["selected"], version=5)[0] == 2.0  # as the export of that version sees it


def test_a_threshold_of_zero_keeps_nothing_back():
    life, below_zero = TableAging(SECTION, GROUPS), words(click=-5.0, delta=-5.0)
    assert life.selected(below_zero, ExportCut(since=0), 1)[0]
    assert not life.selected(below_zero, ExportCut(since=0, base_threshold=0.1), 1)[0]
    life.cut(ExportCut(since=0), 1)
    assert life.delta_score(below_zero)[0] == 0.0
