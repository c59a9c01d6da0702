"""The format of a row as words: packed, read back, and equal to released bytes."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.pserver.rows import row_format
from headrace.pserver.rows.row_format import HEAD
from headrace.pserver.rows.table_rows import COLUMNS, frozen

SEEDS = st.integers(0, 2**32)
CHOSEN = st.lists(st.integers(0, 8), unique=True)


def drawn(seed, width, count=9):
    """Bits of a slab and of columns, as pserver.rows.table_rows.bits_of gives them."""
    draw = np.random.default_rng(seed)
    slab = draw.integers(0, 2**32, (count, width), np.uint32)
    dtypes = [np.uint32 if dtype == np.float32 else dtype for dtype in COLUMNS.values()]
    return slab, tuple(
        draw.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, count, dtype, endpoint=True) for dtype in dtypes
    )


def statistics(columns, row):
    return tuple(int(column[row]) for column in columns[1:])


def packed(slab, columns, rows):
    rows_U = np.array(rows, np.int32)
    keys_U, words_UW = np.zeros(len(rows), np.uint64), np.zeros((len(rows), HEAD + slab.shape[1]), np.uint32)
    half = len(rows) // 2
    row_format.pack(slab, columns, rows_U, half, len(rows), keys_U, words_UW)
    row_format.pack(slab, columns, rows_U, 0, half, keys_U, words_UW)
    return keys_U, words_UW


@given(SEEDS, st.integers(1, 9), CHOSEN)
def test_rows_are_packed_as_the_twin_says(seed, width, rows):
    slab, columns = drawn(seed, width)
    keys_U, words_UW = packed(slab, columns, rows)
    assert keys_U.tolist() == columns[0][rows].tolist()
    assert words_UW.tolist() == [row_format.pack_reference(slab[row], statistics(columns, row)) for row in rows]
    assert row_format.groups_of(words_UW).tolist() == columns[-1][rows].tolist()


@given(SEEDS, st.integers(1, 9), CHOSEN)
def test_words_become_the_row_they_were(seed, width, rows):
    slab, columns = drawn(seed, width)
    keys_U, words_UW = packed(slab, columns, rows)
    other, others = drawn(seed + 1, width)
    rows_U = np.array(rows[::-1], np.int32)
    row_format.unpack(frozen(words_UW), rows_U, 0, len(rows), other, others)
    for words, row in zip(words_UW.tolist(), rows_U, strict=True):
        assert row_format.unpack_reference(words) == (other[row].tolist(), statistics(others, row))
    assert (other[rows_U] == slab[rows]).all()


def test_the_words_of_format_1_are_these():
    slab = np.array([[0.5, -2.0]], np.float32).view(np.uint32)
    columns = (
        np.array([0xDEADBEEF00112233], np.uint64),
        *(np.array([value], np.float32).view(np.uint32) for value in (3.0, 1.0, 1.25)),
        np.array([-2], np.int16),
        np.array([77], np.uint32),
        np.array([513], np.uint16),
    )
    keys_U, words_UW = packed(slab, columns, [0])
    assert row_format.FORMAT == 1 and words_UW.astype("<u4").tobytes().hex(" ", 4) == (
        "0102feff 4d000000 00004040 0000803f 0000a03f 0000003f 000000c0"
    )
