"""Several versions of a table as one: of each key the newest."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.pserver.feed.table_changes import PresentRows, TableDelta
from headrace.trainer.replica.feed_updates import merge_steps
from headrace.trainer.replica.updates import TableUpdate

KEYS = st.integers(0, 12)
PARTS = st.tuples(st.lists(KEYS, unique=True), st.lists(KEYS, unique=True))
STEPS = st.lists(st.lists(PARTS, max_size=3), max_size=4)


def told_of(rows, gone, number):
    keys_P = np.array(rows, np.uint64)
    rows_PD = np.stack([keys_P, np.full(len(rows), number)], 1).astype(np.float32)
    return TableDelta(PresentRows(keys_P, keys_P.astype(np.uint16), rows_PD), np.array(gone, np.uint64))


def applied(held, update):
    for rows in update.rows:
        assert len(rows.keys_U) and rows.group_U.tolist() == rows.keys_U.tolist()
        held |= dict(zip(rows.keys_U.tolist(), rows.rows_UD[:, 1].tolist(), strict=True))
    for key in update.gone.tolist():
        held.pop(key, None)
    return held


@given(STEPS, st.booleans())
def test_merged_is_what_the_steps_give_one_after_another(steps, whole):
    """A step is its keys that are gone, then its rows, part by part."""
    expected = {} if whole else dict.fromkeys(range(12), -1.0)
    held, told = dict(expected), []
    for number, step in enumerate(steps):
        told.append([told_of(rows, gone, 100 * number + part) for part, (rows, gone) in enumerate(step)])
        for _, gone in step:
            for key in gone:
                expected.pop(key, None)
        for part, (rows, _) in enumerate(step):
            expected |= dict.fromkeys(rows, 100.0 * number + part)
    update = merge_steps(told, whole=whole)
    assert not (whole and len(update.gone))
    assert applied(held, update) == expected
    assert not {key for rows in update.rows for key in rows.keys_U.tolist()} & set(update.gone.tolist())


def test_what_shards_tell_is_joined():
    parts = [merge_steps([[told_of([key], [key + 1], 1)]], whole=False) for key in (1, 5)]
    joined = TableUpdate.joined(parts)
    assert [rows.keys_U.tolist() for rows in joined.rows] == [[1], [5]] and joined.gone.tolist() == [2, 6]
    assert len(TableUpdate.joined([]).gone) == 0
