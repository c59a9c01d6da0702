"""Kernels of the metrics equal their plain twins and the definitions."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.exact_auc import exact_auc, exact_auc_reference
from headrace.trainer.metrics.auc import (
    count_pairs,
    count_pairs_reference,
    histogram_auc,
    sum_group_aucs,
    sum_group_aucs_reference,
)
from headrace.trainer.metrics.measures import measures
from headrace.trainer.metrics.samples import ids_of
from headrace.trainer.metrics.tensor_totals import TensorTotal
from headrace.trainer.metrics.totals import (
    CLAMPED,
    COUNT,
    FRACTION_ONE,
    LABEL,
    LOSS,
    MAX_VALUE,
    NOT_FINITE,
    SQUARE,
    WEIGHT,
    WEIGHT_ONE,
    add_samples,
    add_samples_reference,
    carry,
    empty,
    masses,
    pair_value,
)

probabilities = st.one_of(st.floats(0, 1, width=32), st.sampled_from([0.0, 0.25, 0.5, 1.0]))
labels = st.sampled_from([0.0, 1.0, 1.0, 0.3])
weights = st.one_of(st.sampled_from([0.0, 1.0, 0.5, -1.0, 1e-9, 3e7]), st.floats(0, 4, width=32))
bad = st.sampled_from([math.nan, math.inf, -math.inf])
FIXED = settings(max_examples=150, deadline=None)


def f32(values):
    return np.array(values, np.float32)


def rows_of(samples, num_rows=3):
    prediction, label, weight = (f32([s[i] for s in samples]) for i in range(3))
    return prediction, label, weight, np.arange(len(samples), dtype=np.int64) % num_rows


def both(samples, is_bce):
    found, wanted = empty(3, 16), empty(3, 16)
    add_samples(*rows_of(samples), is_bce, found)
    add_samples_reference(*rows_of(samples), is_bce, wanted)
    return found, wanted


@FIXED
@given(st.lists(st.tuples(probabilities | bad, labels | bad, weights | bad), max_size=40))
def test_totals_of_probabilities_equal_their_twin(samples):
    found, wanted = both(samples, True)
    assert (found == wanted).all()


@FIXED
@given(st.lists(st.tuples(st.floats(-1e7, 1e7, width=32), st.floats(-1e7, 1e7, width=32), weights), max_size=40))
def test_totals_of_values_equal_their_twin(samples):
    found, wanted = both(samples, False)
    assert (found == wanted).all()


@FIXED
@given(st.lists(st.tuples(probabilities, labels, weights), max_size=40), st.randoms(use_true_random=False))
def test_totals_do_not_depend_on_order_or_batches(samples, random):
    whole, parts = empty(1, 16), empty(1, 16)
    prediction, label, weight, _ = rows_of(samples)
    zeros = np.zeros(len(samples), np.int64)
    add_samples(prediction, label, weight, zeros, True, whole)
    order = list(range(len(samples)))
    random.shuffle(order)
    for begin in range(0, len(order), 7):
        part = np.array(order[begin : begin + 7])
        add_samples(prediction[part], label[part], weight[part], zeros[: len(part)], True, parts)
        carry(parts)
    carry(whole)
    assert (whole == parts).all()


def test_clamped_and_non_finite_values_are_counted():
    totals = empty(1, 16)
    prediction, label, weight = f32([1e9, math.nan, 2.0, 1.0]), f32([-1e9, 0, 1, 1]), f32([1, 1, 1e7, math.inf])
    add_samples(prediction, label, weight, np.zeros(4, np.int64), False, totals)
    assert totals[0, NOT_FINITE] == 2
    assert totals[0, COUNT] == 2
    assert totals[0, CLAMPED] == 2
    carry(totals)
    assert pair_value(totals[0], SQUARE) == MAX_VALUE + (1 << 20)
    found = measures(totals[0], False)
    assert (found["not_finite"], found["clamped"]) == (2, 2)


def test_a_tiny_weight_still_counts():
    totals = empty(1, 16)
    add_samples(f32([0.5]), f32([1]), f32([1e-12]), np.zeros(1, np.int64), True, totals)
    assert totals[0, WEIGHT] == 1
    assert measures(totals[0], True)["mean_label"] == 1.0


def test_carry_keeps_values_of_either_sign():
    totals = empty(1, 1)
    add_samples(f32([-0.75] * 9), f32([-0.75] * 9), np.ones(9, np.float32), np.zeros(9, np.int64), False, totals)
    before = pair_value(totals[0], LABEL)
    carry(totals)
    assert before == pair_value(totals[0], LABEL) == -6.75
    assert 0 <= totals[0, LABEL + 1] < FRACTION_ONE


def test_the_log_loss_of_a_certain_mistake_is_bounded():
    totals = empty(1, 16)
    add_samples(f32([0, 1]), f32([1, 0]), f32([1, 1]), np.zeros(2, np.int64), True, totals)
    assert pair_value(totals[0], LOSS) / 2 == pytest.approx(-math.log(1e-7), rel=1e-6)


def test_a_sum_keeps_nine_digits_over_many_samples():
    prediction = np.full(100_000, 1e-7, np.float32)
    totals = empty(1, 16)
    add_samples(
        prediction, np.zeros_like(prediction), np.ones_like(prediction), np.zeros(100_000, np.int64), True, totals
    )
    # One sample is rounded to 2**-32, 0.02 % of a probability as small as this.
    assert measures(totals[0], True)["mean_prediction"] == pytest.approx(1e-7, rel=2e-3)


@FIXED
@given(st.lists(st.tuples(probabilities, st.sampled_from([0.0, 1.0]), st.sampled_from([0.5, 1.0, 2.0])), max_size=40))
def test_the_error_of_the_histogram_is_within_its_bound(samples):
    prediction, label, weight, _ = rows_of(samples)
    wanted = exact_auc_reference(prediction, label, weight)
    for num_buckets in (1, 16, 4096):
        totals = empty(1, num_buckets)
        add_samples(prediction, label, weight, np.zeros(len(samples), np.int64), True, totals)
        found = histogram_auc(*masses(totals[0]))
        assert (found is None) == (wanted is None)
        if found is not None:
            assert abs(found[0] - wanted) <= found[1] + 1e-12


@FIXED
@given(st.lists(st.tuples(st.integers(0, 1 << 24), st.integers(0, 1 << 24)), max_size=20))
def test_pairs_of_a_histogram_equal_their_twin(buckets):
    negative, positive = (np.array([b[i] for b in buckets], np.int64) for i in range(2))
    assert count_pairs(negative, positive) == count_pairs_reference(negative, positive)


@pytest.mark.parametrize(("num_buckets", "bound"), [(65_536, 1e-4), (4_096, 1e-3)])
def test_the_error_is_small_where_predictions_are_spread(num_buckets, bound):
    rng = np.random.default_rng(1)
    prediction = (1 / (1 + np.exp(rng.normal(2, 1, 200_000)))).astype(np.float32)
    label = (rng.random(200_000) < prediction).astype(np.float32)
    weight, totals = np.ones_like(label), empty(1, num_buckets)
    add_samples(prediction, label, weight, np.zeros(len(label), np.int64), True, totals)
    auc, error = histogram_auc(*masses(totals[0]))
    assert abs(auc - exact_auc(prediction, label, weight)) <= error < bound


@FIXED
@given(st.lists(st.tuples(probabilities, st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, 0.5, 1.0])), max_size=40))
def test_the_exact_auc_equals_its_twin(samples):
    prediction, label, weight, _ = rows_of(samples)
    found, wanted = exact_auc(prediction, label, weight), exact_auc_reference(prediction, label, weight)
    assert found == (None if wanted is None else pytest.approx(wanted, abs=1e-12))


@FIXED
@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([0.1, 0.2, 0.3]), st.booleans()), max_size=40))
def test_group_aucs_equal_their_twin(samples):
    group = np.array([s[0] for s in samples], np.uint64)
    prediction, label = f32([s[1] for s in samples]), f32([s[2] for s in samples])
    assert sum_group_aucs(group, prediction, label) == sum_group_aucs_reference(group, prediction, label)


def test_groups_with_one_label_and_ties_are_as_defined():
    group = np.array([7, 7, 7, 8, 8, 9, 9], np.uint64)
    prediction = f32([0.2, 0.2, 0.1, 0.9, 0.8, 0.5, 0.5])
    label = f32([1, 0, 0, 1, 1, 1, 0])
    assert sum_group_aucs(group, prediction, label) == (int((0.75 + 0.5) * FRACTION_ONE), 2)


@FIXED
@given(st.lists(st.lists(st.floats(allow_nan=True, width=32), max_size=5), max_size=6), st.randoms())
def test_tensor_totals_do_not_depend_on_order_and_survive_json(batches, random):
    one, other = TensorTotal(), TensorTotal()
    for values in batches:
        one.add(f32(values))
    random.shuffle(batches)
    for values in batches:
        part = TensorTotal()
        part.add(f32(values[::-1]))
        other.merge(TensorTotal.of_json(part.to_json()))
    assert one == other
    flat = [v for values in batches for v in values if math.isfinite(v)]
    assert one.count == len(flat)
    found = one.measures()
    assert (found["max"], found["min"]) == ((max(flat), min(flat)) if flat else (None, None))


def test_measures_of_a_tensor_equal_those_of_numpy():
    values = np.random.default_rng(1).standard_normal((50, 4)).astype(np.float32)
    total = TensorTotal()
    total.add(values)
    found = total.measures()
    assert found["sum"] == pytest.approx(values.sum(dtype=np.float64), abs=1e-7)
    assert found["mean"] == pytest.approx(values.mean(dtype=np.float64), abs=1e-9)


def test_equal_values_have_equal_ids():
    assert ids_of(np.array(["a", "b", "a"], object)).tolist()[0] == ids_of(np.array(["a"], object))[0]
    assert len(set(ids_of(np.array(["a", "b", "c"], object)).tolist())) == 3
    assert ids_of(np.array([3, 5], np.uint64)).tolist() == [3, 5]
    assert ids_of(np.array([-1], np.int64)).tolist() == [2**64 - 1]
    zeros = ids_of(f32([0.0, -0.0, 1.5]))
    assert zeros[0] == zeros[1] != zeros[2]


def test_weights_are_fixed_point():
    totals = empty(1, 16)
    add_samples(f32([0.5] * 2), f32([1, 0]), f32([0.25, 0.75]), np.zeros(2, np.int64), True, totals)
    assert totals[0, WEIGHT] == WEIGHT_ONE
    assert measures(totals[0], True)["mean_label"] == 0.25
