"""Kernels on rows equal their plain twins."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.keys import MASK
from headrace.pserver.protocol.shards import ABSENT_BITS
from headrace.pserver.rows import kernels
from headrace.pserver.rows.table_rows import frozen

# Keys that share their top bits, so that probing runs into its neighbours and around the end of the index.
KEYS = st.one_of(
    st.integers(0, MASK),
    st.sampled_from([n << 60 for n in range(16)]),
    st.integers(0, 40).map(lambda n: MASK - n),
)
BATCHES = st.lists(st.lists(KEYS, unique=True, max_size=70), max_size=6)


def u64(keys):
    return frozen(np.array(keys, np.uint64))


def drawn(seed, *shape):
    return np.random.default_rng(seed).integers(-9, 10, shape).astype(np.float32)


@given(BATCHES, st.integers(1, 150))
def test_rows_are_numbered_in_order_of_first_sight_and_the_batch_stops_when_full(batches, max_rows):
    index, keys, group = np.full(256, -1, np.int32), np.empty(150, np.uint64), np.empty(150, np.uint16)
    row_of: dict[int, int] = {}
    for batch in batches:
        rows = np.full(len(batch), -7, np.int32)
        groups = frozen((np.arange(len(batch)) % 7).astype(np.uint16))
        done, count = kernels.find_or_reserve(index, keys, group, u64(batch), groups, rows, 0, len(row_of), max_rows)
        expected, expected_done = kernels.find_or_reserve_reference(row_of, batch, max_rows)
        assert (done, count, rows[:done].tolist()) == (expected_done, len(row_of), expected)
        found = np.empty(len(batch), np.int32)
        kernels.find(index, keys, u64(batch), found)
        assert found.tolist() == [row_of.get(key, kernels.EMPTY) for key in batch]
        assert [int(keys[row]) for row in rows[:done]] == batch[:done]


@given(st.lists(KEYS, unique=True, max_size=150))
def test_an_index_made_anew_finds_every_row(batch):
    keys, index = u64(batch), np.full(256, -1, np.int32)
    kernels.rebuild_index(index, np.array(batch, np.uint64), len(batch))
    rows = np.empty(len(batch), np.int32)
    kernels.find(index, np.array(batch, np.uint64), keys, rows)
    assert rows.tolist() == list(range(len(batch)))


@given(st.lists(st.integers(-1, 9), max_size=12), st.integers(0, 3), st.booleans(), st.integers(0, 99))
def test_rows_to_learn_from_say_how_long_their_first_order_steps_are(rows, dim, rests, seed):
    slab, rows_U = np.abs(drawn(seed, 10, dim + 2)), frozen(np.array(rows, np.int32))
    groups, classes = frozen(np.arange(10, dtype=np.uint16) % 3), frozen(np.array([0, 1, 2], np.uint8))
    resting = frozen(np.array([False, True, False] if rests else [], np.bool_))
    rates = frozen(np.array([[0.5, 1e-10], [0.25, 0.0], [0.0, 1e-10]], np.float32))
    by_group = ABSENT_BITS.view(np.float32), groups, classes, resting, rates
    found, expected = np.empty((len(rows), dim + 3), np.float32), np.empty((len(rows), dim + 3), np.float32)
    kernels.gather_learning(slab, rows_U, 0, len(rows), *by_group, found)
    kernels.gather_learning_reference(slab, rows_U, *by_group, expected)
    assert (found.view(np.uint32) == expected.view(np.uint32)).all()


@given(st.lists(st.integers(0, 9), unique=True), st.integers(0, 5), st.integers(0, 99))
def test_gather_copies_rows(rows, dim, seed):
    slab, rows_U = drawn(seed, 10, 5), frozen(np.array(rows, np.int32))
    out, expected = np.empty((len(rows), dim), np.float32), np.empty((len(rows), dim), np.float32)
    kernels.gather(slab, rows_U, 0, len(rows), out)
    kernels.gather_reference(slab, rows_U, expected)
    assert (out == expected).all()


@pytest.mark.parametrize("absent", [np.float32(0), ABSENT_BITS.view(np.float32)], ids=["zeros", "marks"])
@given(st.lists(st.integers(-1, 9)), st.lists(st.integers(0, 2), min_size=10, max_size=10), st.integers(0, 99))
def test_gather_present_gives_zeros_or_marks_for_what_is_absent(absent, rows, changed, seed):
    slab, rows_U, changed_R = drawn(seed, 10, 5), frozen(np.array(rows, np.int32)), np.array(changed, np.uint32)
    out, expected = np.empty((len(rows), 4), np.float32), np.empty((len(rows), 4), np.float32)
    kernels.gather_present(slab, changed_R, rows_U, absent, out)
    kernels.gather_present_reference(slab, changed_R, rows_U, absent, expected)
    assert (out.view(np.uint32) == expected.view(np.uint32)).all()


@given(
    st.lists(st.integers(0, 9), unique=True), st.lists(st.integers(0, 3), min_size=10, max_size=10), st.integers(0, 99)
)
def test_statistics_are_added_and_first_touches_and_new_rows_told(rows, changed, seed):
    def columns():
        return (
            *(drawn(seed + i, 10) for i in range(3)),
            np.array(changed, np.uint32),
            np.arange(10, dtype=np.uint16) % 3,
        )

    rows_U, mine, theirs = frozen(np.array(rows, np.int32)), columns(), columns()
    show, click = (frozen(drawn(seed + i, len(rows))) for i in (7, 8))
    by_group, touched = np.zeros(1 << 16, np.int64), np.full(12, -1, np.int32)
    args = np.float32(0.5), np.float32(2)
    count, made = kernels.record(rows_U, show, click, *args, np.uint32(3), mine, by_group, touched, 1)
    expected_touched, expected_made = kernels.record_reference(rows_U, show, click, *args, np.uint32(3), theirs)
    assert touched[1:count].tolist() == expected_touched and made == len(expected_made)
    assert all((a == b).all() for a, b in zip(mine, theirs, strict=True))
    assert by_group[:3].tolist() == [sum(row % 3 == g for row in expected_made) for g in range(3)]


@given(st.lists(st.integers(0, 8), max_size=9), st.integers(1, 5), st.integers(0, 99))
def test_gradients_are_scaled_by_shows(shows, dim, seed):
    grads, show_U = frozen(drawn(seed, len(shows), dim)), frozen(np.array(shows, np.float32))
    out = np.empty_like(grads)
    kernels.scale_by_show(grads, show_U, np.float32(64), out)
    assert (out == kernels.scale_by_show_reference(grads, show_U, np.float32(64))).all()


NORMS = st.floats(2.0**-20, 2.0**20, width=32)


@given(st.integers(0, 8), st.integers(1, 9), st.integers(0, 99), st.sampled_from([1e-30, 1.0, 1e37]), NORMS)
def test_gradients_of_rows_are_clipped_to_a_norm(num_rows, dim, seed, size, most):
    grads = frozen(drawn(seed, num_rows, dim) * np.float32(size))
    out = np.empty_like(grads)
    kernels.clip_rows(grads, 0, num_rows, most, out)
    assert (out == kernels.clip_rows_reference(grads, most)).all()
    before, after = (np.linalg.norm(each.astype(np.float64), axis=1) for each in (grads, out))
    assert np.allclose(after, np.minimum(before, most), rtol=1e-6, atol=0)
    assert (out[before <= most] == grads[before <= most]).all()


@pytest.mark.parametrize("num_bits", [17, 20])
def test_keys_of_one_shard_still_spread_over_the_index(num_bits):
    """The lowest bits choose the shard; were they to choose the slot too, a shard's index would be full of runs."""
    keys = np.random.default_rng(0).integers(0, 2**63, (1 << num_bits) // 2).astype(np.uint64)
    keys = np.unique(keys) & ~np.uint64(4095)  # all of bucket 0
    slots = keys >> np.uint64(64 - num_bits)
    assert len(np.unique(slots)) > 0.3 * (1 << num_bits) * (1 - 2**-0.5)
