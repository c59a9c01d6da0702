"""Dirty rows: marked, in flight, settled; each counted once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.pserver.rows import dirty_rows
from headrace.pserver.rows.dirty_rows import DIRTY, IN_FLIGHT, DirtyRows

MARKS = st.lists(st.sampled_from([0, 0, 0, int(DIRTY), int(IN_FLIGHT), int(DIRTY | IN_FLIGHT)]), max_size=40)


def marks(values):
    return np.array(values, np.uint8)


@given(MARKS, st.data())
def test_marks_equal_those_of_the_twins(values, data):
    rows = data.draw(st.lists(st.integers(0, len(values) - 1), unique=True)) if values else []
    rows_U, again = np.array(rows, np.int32), data.draw(st.booleans())
    mine, theirs = marks(values), marks(values)
    assert dirty_rows.mark(mine, rows_U, len(rows)) == dirty_rows.mark_reference(theirs, rows)
    assert mine.tolist() == theirs.tolist()
    mine, theirs = marks(values), marks(values)
    assert dirty_rows.unmark(mine, rows_U, again) == dirty_rows.unmark_reference(theirs, rows, again)
    assert mine.tolist() == theirs.tolist()


@given(MARKS, st.integers(0, 5))
def test_dirty_rows_are_collected_and_no_row_beyond_those_in_use(values, spare):
    mine, theirs = marks(values + [int(DIRTY)] * spare), marks(values)
    rows_U = np.full(len(values), -7, np.int32)
    count = dirty_rows.collect(mine, len(values), rows_U)
    assert rows_U[:count].tolist() == dirty_rows.collect_reference(theirs)
    assert mine.tolist() == theirs.tolist() + [int(DIRTY)] * spare


@pytest.mark.parametrize("committed", [True, False])
def test_a_row_changed_while_in_flight_is_dirty_once_with_or_without_the_commit(committed):
    waiting, marks_R = DirtyRows(), np.zeros(20, np.uint8)
    waiting.touch(marks_R, np.array([3, 11, 17], np.int32))
    assert waiting.take(marks_R, 20).tolist() == [3, 11, 17] and waiting.num_dirty == 0
    waiting.touch(marks_R, np.array([11, 5], np.int32))
    waiting.touch(marks_R, np.array([11], np.int32))
    assert waiting.num_dirty == 2
    waiting.settle(marks_R, committed)
    left = [5, 11] if committed else [3, 5, 11, 17]
    assert waiting.num_dirty == len(left) and waiting.take(marks_R, 20).tolist() == left


def test_one_snapshot_is_in_flight_at_a_time():
    waiting, marks_R = DirtyRows(), np.zeros(8, np.uint8)
    waiting.take(marks_R, 8)
    with pytest.raises(AssertionError, match="one snapshot at a time"):
        waiting.take(marks_R, 8)
    waiting.settle(marks_R, True)
    with pytest.raises(AssertionError, match="no snapshot is in flight"):
        waiting.settle(marks_R, True)
