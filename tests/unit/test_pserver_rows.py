"""Digests, merging, placement: pure functions on rows equal their twins."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.keys import MASK, NUM_BUCKETS
from headrace.pserver.protocol import placement
from headrace.pserver.protocol.placement import Placement
from headrace.pserver.protocol.shards import Gradients, Keys
from headrace.pserver.rows import digest, gradient_merge
from headrace.pserver.rows.digest import add, digest_row_reference, digest_rows, join, multipliers_of
from headrace.pserver.rows.table_rows import frozen

SEEDS = st.integers(0, 2**32)


def columns_of(draw, count):
    keys = draw.integers(0, 2**63, count).astype(np.uint64)
    bits = [draw.integers(0, 2**32, count).astype(np.uint32) for _ in range(3)]
    day = draw.integers(-9, 9, count).astype(np.int16)
    return keys, *bits, day, draw.integers(1, 99, count).astype(np.uint32), draw.integers(0, 9, count).astype(np.uint16)


def reference(words, columns, rows):
    multipliers = multipliers_of(words.shape[1])
    total = 0
    for row in rows:
        statistics = [int(column[row]) & MASK for column in columns[1:]]
        total = add(
            [total, join(*digest_row_reference([*words[row].tolist(), *statistics], int(columns[0][row]), multipliers))]
        )
    return total


@given(SEEDS, st.integers(0, 9), st.lists(st.integers(0, 7), unique=True))
def test_a_digest_equals_that_of_its_twin(seed, width, rows):
    draw = np.random.default_rng(seed)
    words, columns = draw.integers(0, 2**32, (8, width)).astype(np.uint32), columns_of(draw, 8)
    got = join(*digest_rows(words, columns, np.array(rows, np.int32), multipliers_of(width)))
    assert got == reference(words, columns, rows)
    assert got == join(*digest_rows(words, columns, np.array(rows[::-1], np.int32), multipliers_of(width)))


@given(SEEDS, st.integers(0, 7))
def test_digests_of_parts_add_up(seed, cut):
    draw = np.random.default_rng(seed)
    words, columns = draw.integers(0, 2**32, (8, 3)).astype(np.uint32), columns_of(draw, 8)
    rows = np.arange(8, dtype=np.int32)
    parts = [join(*digest_rows(words, columns, part, multipliers_of(3))) for part in (rows[:cut], rows[cut:], rows)]
    assert add(parts[:2]) == parts[2]


@pytest.mark.parametrize("column", range(7))
@given(SEEDS, st.integers(0, 15))
def test_a_flipped_bit_changes_both_halves(column, seed, bit):
    draw = np.random.default_rng(seed)
    words, columns = draw.integers(0, 2**32, (1, 3)).astype(np.uint32), columns_of(draw, 1)
    one, rows = multipliers_of(3), np.zeros(1, np.int32)
    before = digest_rows(words, columns, rows, one)
    columns[column].view(np.uint16)[0] ^= np.uint16(1 << bit)
    after = digest_rows(words, columns, rows, one)
    assert before[0] != after[0] and before[1] != after[1]
    words[0, 1] ^= np.uint32(1 << bit)
    assert digest_rows(words, columns, rows, one)[0] != after[0]


def test_a_digest_never_changes():
    """Golden: digests are written into logs and saves."""
    words = np.arange(4, dtype=np.uint32).reshape(1, 4)
    columns = tuple(np.array([i + 1], c.dtype) for i, c in enumerate(columns_of(np.random.default_rng(0), 1)))
    assert f"{join(*digest_rows(words, columns, np.zeros(1, np.int32), multipliers_of(4))):032x}" == GOLDEN_DIGEST


PUSHES = st.lists(st.lists(st.integers(0, 12), unique=True), min_size=1, max_size=4).filter(any)


@given(PUSHES, st.integers(0, 4), SEEDS)
def test_merged_pushes_equal_those_of_the_twin(rows_by_rank, dim, seed):
    draw = np.random.default_rng(seed)

    def push(rows):
        count = len(rows)
        floats = draw.normal(size=(count, dim)).astype(np.float32), *draw.normal(size=(2, count)).astype(np.float32)
        return frozen(np.array(rows, np.int32)), Gradients(*map(frozen, floats))

    pushes = [push(rows) for rows in rows_by_rank]
    (rows_M, got), (expected_M, expected) = gradient_merge.merge(pushes), gradient_merge.merge_reference(pushes)
    assert rows_M.tolist() == expected_M.tolist()
    for mine, twin in (
        (got.grads_UD, expected.grads_UD),
        (got.show_U, expected.show_U),
        (got.click_U, expected.click_U),
    ):
        assert (mine.reshape(twin.shape) == twin).all()


def test_a_single_push_is_left_as_it_is():
    rows, push = np.zeros(0, np.int32), Gradients(*(np.zeros((0, 2), np.float32) for _ in range(3)))
    assert gradient_merge.merge([(rows, push)])[1] is push


@given(st.lists(st.integers(0, MASK)), st.integers(1, 5))
def test_keys_are_split_by_bucket_in_their_order(keys, num_shards):
    keys_U, places = np.array(keys, np.uint64), Placement.even(num_shards)
    expected = placement.positions_by_shard_reference(keys_U, places.shard_of_bucket, num_shards)
    routed = places.route(Keys(keys_U, (keys_U % 7).astype(np.uint16)))
    assert [part.position_P.tolist() for part in routed] == expected
    for part, position in zip(routed, expected, strict=True):
        assert (part.keys.keys_U == keys_U[position]).all() and (part.keys.group_U == keys_U[position] % 7).all()
    assert places.shard_of(keys_U).tolist() == [
        s for k in range(len(keys)) for s in range(num_shards) if k in expected[s]
    ]


@given(st.integers(1, 40), st.integers(1, 3), SEEDS)
def test_pushes_taken_apart_and_put_together_are_the_same(count, num_shards, seed):
    draw = np.random.default_rng(seed)
    rows_UD, out = draw.normal(size=(count, 3)).astype(np.float32), np.full((count, 3), np.nan, np.float32)
    show_U, click_U = draw.normal(size=(2, count)).astype(np.float32)
    keys = Keys(draw.integers(0, 2**63, count).astype(np.uint64), np.zeros(count, np.uint16))
    for routed in Placement.even(num_shards).route(keys):
        position_P = routed.position_P
        part, (show_P, click_P) = np.empty((len(position_P), 3), np.float32), np.empty((2, len(position_P)), np.float32)
        placement.take_push(rows_UD, show_U, click_U, position_P, part, show_P, click_P)
        twin = placement.take_push_reference(rows_UD, show_U, click_U, position_P)
        for mine, expected in zip((part, show_P, click_P), twin, strict=True):
            assert (mine == expected).all()
        placement.put_rows(frozen(part), position_P, out)
    assert (out == rows_UD).all()


@pytest.mark.parametrize("num_shards", [1, 2, 3, 7, 64])
def test_every_shard_owns_one_range_of_nearly_equal_size(num_shards):
    owners = Placement.even(num_shards).shard_of_bucket
    sizes = np.bincount(owners, minlength=num_shards)
    assert (np.diff(owners) >= 0).all() and sizes.sum() == NUM_BUCKETS and sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize("num_shards", [0, NUM_BUCKETS + 1])
def test_more_shards_than_buckets_or_none_are_refused(num_shards):
    with pytest.raises(ValueError, match="there may be 1 to 4096"):
        Placement.even(num_shards)


def test_multipliers_are_odd_and_differ():
    numbers = multipliers_of(20)
    assert (numbers % 2 == 1).all() and len(np.unique(numbers)) == numbers.size
    assert numbers.shape == (2, 20 + digest.NUM_STATISTICS)


GOLDEN_DIGEST = "090a0e29a42e86c71f2f7b19c0d360e8"
