"""Arrays of rows grow without losing an entry: in place where addresses are reserved, by copying elsewhere."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.pserver.rows import arrays
from headrace.pserver.rows.arrays import MIN_MAPPED_BYTES, FreeNumbers, allocate, grown, moved

LARGE = MIN_MAPPED_BYTES // 8
"""Rows of 8 bytes whose array is mapped."""


def rows_of(num_rows):
    rows_RW = allocate((num_rows, 2), np.float32)
    rows_RW[:] = np.arange(2 * num_rows, dtype=np.float32).reshape(num_rows, 2)
    return rows_RW


@given(st.lists(st.integers(0, 3), max_size=4), st.integers(0, 2 * LARGE))
def test_growth_keeps_the_entries(doublings, num_rows):
    rows_RW = rows_of(num_rows)
    kept_RW = rows_RW.copy()
    for doubling in doublings:
        rows_RW = grown(rows_RW, num_rows, max(1, len(rows_RW)) << doubling)
        assert np.array_equal(rows_RW[:num_rows], kept_RW)
        rows_RW[num_rows:] = -1
    assert rows_RW.flags.c_contiguous
    assert rows_RW.flags.writeable


def test_a_large_array_moves_once_and_then_grows_in_place():
    first = rows_of(LARGE)
    second = grown(first, LARGE, 2 * LARGE)
    third = grown(second, LARGE, 64 * LARGE)
    assert second.ctypes.data != first.ctypes.data
    assert third.ctypes.data == second.ctypes.data
    third[0] = 7
    assert second[0, 0] == 7, "readers of the shorter array see what is written"
    assert first[0, 0] == 0


def test_beyond_its_reservation_an_array_is_copied(monkeypatch):
    monkeypatch.setattr(arrays, "_reservation", lambda: 4 * MIN_MAPPED_BYTES)
    rows_RW = grown(rows_of(LARGE), LARGE, 4 * LARGE)
    larger_RW = grown(rows_RW, LARGE, 5 * LARGE)
    assert larger_RW.ctypes.data != rows_RW.ctypes.data
    assert np.array_equal(larger_RW[:LARGE], rows_RW[:LARGE])


def test_without_addresses_to_reserve_an_array_takes_what_it_needs(monkeypatch):
    monkeypatch.setattr(arrays, "_reservation", lambda: 1 << 62)
    rows_RW = grown(rows_of(LARGE), LARGE, 2 * LARGE)
    assert len(rows_RW) == 2 * LARGE
    assert np.array_equal(rows_RW[:LARGE], rows_of(LARGE))
    with pytest.raises((OSError, OverflowError)):
        arrays._mapped(1 << 62)


def test_addresses_are_not_reserved_where_they_are_limited(monkeypatch):
    assert arrays._reservation() <= arrays.MAX_RESERVED_BYTES
    monkeypatch.setattr(arrays.resource, "getrlimit", lambda which: (1 << 40, 1 << 40))
    assert arrays._reservation.__wrapped__() == 0


def test_a_copy_is_a_copy():
    rows_RW = grown(rows_of(LARGE), LARGE, 2 * LARGE)
    copy_RW = moved(rows_RW, LARGE, LARGE)
    copy_RW[0] = 7
    assert rows_RW[0, 0] == 0


def test_freed_numbers_come_back_last_first():
    free = FreeNumbers()
    free.put(np.arange(MIN_MAPPED_BYTES, dtype=np.int32))
    free.put(np.array([5, 6], np.int32))
    assert free.take(3).tolist() == [MIN_MAPPED_BYTES - 1, 5, 6]
    assert free.count == MIN_MAPPED_BYTES - 1
