"""Rows that wait for the next commit are written once, each as it was left."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.pserver.commit.late_writes import MAX_PIECES, LateWriter
from headrace.pserver.store.memory_store import MemoryRowStore

KEYS = st.lists(st.integers(0, 20), unique=True, max_size=8)
WRITES = st.lists(st.tuples(KEYS, KEYS), max_size=MAX_PIECES + 4)


def arrays(number, keys, gone):
    made = np.array(keys, np.uint64)
    rows = np.array([[number, key] for key in keys], np.uint32).reshape(len(keys), 2)
    return made, rows, np.array([key for key in gone if key not in keys], np.uint64)


def rows_of(store):
    return {
        key: tuple(row) for keys, rows in store.scan() for key, row in zip(keys.tolist(), rows.tolist(), strict=True)
    }


@given(WRITES)
def test_late_writes_leave_the_store_as_immediate_ones_do(writes):
    late, at_once = LateWriter(MemoryRowStore(2)), MemoryRowStore(2)
    for number, (keys, gone) in enumerate(writes):
        late.write(*arrays(number, keys, gone))
        at_once.write(*arrays(number, keys, gone))
    assert not rows_of(late.store)
    late.finish()
    assert rows_of(late.store) == rows_of(at_once)
    late.finish()
    found, rows = late.get(np.arange(21, dtype=np.uint64))
    assert dict(zip(np.flatnonzero(found).tolist(), map(tuple, rows.tolist()), strict=True)) == rows_of(at_once)
