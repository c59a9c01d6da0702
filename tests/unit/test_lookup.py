"""The kernels between ids and rows equal their plain twins."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.trainer.features import lookup_kernels

keys = st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 5), max_size=60)


def run_unique(values):
    key_N, number_H = np.array(values, np.uint64), np.full(256, -1, np.int32)
    key_U, first_U = np.empty(len(values), np.uint64), np.empty(len(values), np.int32)
    inverse_N = np.empty(len(values), np.int32)
    count = lookup_kernels.unique(key_N, number_H, key_U, first_U, inverse_N)
    return key_U[:count].tolist(), first_U[:count].tolist(), inverse_N


@given(keys)
def test_unique_keys_come_in_order_of_first_occurrence(values):
    key_U, first_U, inverse_N = run_unique(values)
    expected_keys, expected_inverse = lookup_kernels.unique_reference(values)
    assert key_U == expected_keys
    assert inverse_N.tolist() == expected_inverse
    assert [values[n] for n in first_U] == expected_keys


def test_a_hash_table_that_is_too_small_is_reported():
    key_N, out = np.arange(9, dtype=np.uint64), [np.empty(9, t) for t in (np.uint64, np.int32, np.int32)]
    assert lookup_kernels.unique(key_N, np.full(16, -1, np.int32), *out) == -1
    assert lookup_kernels.unique(key_N[:8], np.full(16, -1, np.int32), *out) == 8


@given(keys)
def test_occurrences_are_grouped_by_key_in_ascending_order(values):
    key_U, _, inverse_N = run_unique(values)
    start_U1, order_N = np.empty(len(key_U) + 1, np.int32), np.empty(len(values), np.int32)
    lookup_kernels.group_occurrences(inverse_N, start_U1, order_N)
    groups = [order_N[start_U1[u] : start_U1[u + 1]].tolist() for u in range(len(key_U))]
    assert groups == lookup_kernels.group_occurrences_reference(inverse_N.tolist(), len(key_U))


columns = st.integers(1, 4).flatmap(
    lambda b: st.lists(
        st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=b, max_size=b), min_size=1, max_size=4
    )
)


@given(columns)
def test_columns_are_flattened_sample_by_sample(data):
    num_samples, groups = len(data[0]), [7 + f for f in range(len(data))]
    value_M = np.array([sign for column in data for signs in column for sign in signs], np.uint64)
    offset_FB1 = np.array([np.cumsum([0] + [len(signs) for signs in column]) for column in data], np.int64)
    offset_F = np.cumsum([0] + [sum(map(len, column)) for column in data])[:-1]
    key_N, slot_N = np.empty(len(value_M), np.uint64), np.empty(len(value_M), np.int32)
    start_B1 = np.empty(num_samples + 1, np.int64)
    lookup_kernels.flatten(value_M, offset_F, offset_FB1, np.array(groups), key_N, slot_N, start_B1)
    sample_N = np.repeat(np.arange(num_samples), np.diff(start_B1))
    found = list(zip(key_N.tolist(), slot_N.tolist(), sample_N.tolist(), strict=True))
    assert found == lookup_kernels.flatten_reference(data, groups)


@given(st.integers(1, 5), st.integers(1, 5), st.data())
def test_columns_with_one_id_per_sample_flatten_to_the_same_keys(num_slots, num_samples, data):
    value_FB = np.array(
        data.draw(st.lists(st.lists(st.integers(0, 9), min_size=num_samples, max_size=num_samples),
                           min_size=num_slots, max_size=num_slots)), np.uint64)  # fmt: skip
    groups = list(range(num_slots))
    key_N = np.empty(num_slots * num_samples, np.uint64)
    lookup_kernels.flatten_single(value_FB, np.array(groups), key_N)
    plain = lookup_kernels.flatten_reference([[[int(sign)] for sign in column] for column in value_FB], groups)
    assert key_N.tolist() == [key for key, _, _ in plain]


small = st.integers(-8, 8).map(float)


@settings(max_examples=60)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 20), st.integers(1, 8), st.data())
def test_pooling_and_its_gradient_equal_the_plain_loops(num_unique, width, num, num_cells, data):
    def numbers(size, top):
        return np.array(data.draw(st.lists(st.integers(0, top - 1), min_size=size, max_size=size)), np.int32)

    rows_UD = np.array(
        data.draw(st.lists(small, min_size=num_unique * width, max_size=num_unique * width)), np.float32
    ).reshape(num_unique, width)
    inverse_N, cell_N = numbers(num, num_unique), np.sort(numbers(num, num_cells))
    scale_N = np.array(data.draw(st.lists(small, min_size=num, max_size=num)), np.float32)
    cell_CD = np.zeros((num_cells, width), np.float32)
    lookup_kernels.pool(rows_UD, inverse_N, cell_N, scale_N, 0, num, cell_CD)
    assert np.array_equal(cell_CD, lookup_kernels.pool_reference(rows_UD, inverse_N, cell_N, scale_N, num_cells))

    occurrences = lookup_kernels.group_occurrences_reference(inverse_N.tolist(), num_unique)
    start_U1, order_N = np.empty(num_unique + 1, np.int32), np.empty(num, np.int32)
    lookup_kernels.group_occurrences(inverse_N, start_U1, order_N)
    grads_UD = np.empty((num_unique, width), np.float32)
    assert lookup_kernels.sum_pooled(cell_CD, order_N, start_U1, cell_N, scale_N, 0, num_unique, grads_UD)
    assert np.array_equal(grads_UD, lookup_kernels.sum_pooled_reference(cell_CD, occurrences, cell_N, scale_N))

    value_B, sample_N = np.arange(num_cells, dtype=np.float32), cell_N
    out_U = np.empty(num_unique, np.float32)
    lookup_kernels.sum_by_key(value_B, sample_N, inverse_N, out_U)
    assert np.array_equal(out_U, lookup_kernels.sum_by_key_reference(value_B, sample_N, occurrences))


def test_a_gradient_that_is_not_finite_is_detected():
    start_U1, order_N = np.array([0, 2, 3], np.int32), np.array([0, 2, 1], np.int32)
    grads_UD = np.empty((2, 2), np.float32)
    for bad in (np.nan, np.inf, -np.inf):
        grad_CD = np.ones((3, 2), np.float32)
        assert lookup_kernels.sum_single(grad_CD, order_N, start_U1, 0, 2, grads_UD)
        assert grads_UD.tolist() == [[2, 2], [1, 1]]
        grad_CD[1, 0] = bad
        assert not lookup_kernels.sum_single(grad_CD, order_N, start_U1, 0, 2, grads_UD)


@given(st.lists(st.integers(0, 2), max_size=9))
def test_one_id_per_sample_is_recognised_by_the_offsets(lengths):
    offset_B1 = np.cumsum([0, *lengths]).astype(np.int64)
    assert bool(lookup_kernels.one_each(offset_B1)) == all(length == 1 for length in lengths)
