"""The integers from which most metrics are computed: sums over samples and a histogram of predictions, in a vector.

A vector has HEADER counters, then 2 x buckets masses (weight of negatives by bucket, then of positives). Everything
is an int64, so totals of batches, ranks and passes add up to the same bits in any order.

- Weights are fixed point with WEIGHT_ONE = 2**20 for 1: the resolution is 1e-6 (smaller positive weights are rounded
  up to it), and weights are clamped at 2**20. A total overflows beyond 2**43 samples of weight 1.
- A weighted value is a pair of counters: its floor, then its fraction times 2**32, so the resolution is 2e-10. The
  value of one sample is clamped at +-2**40. `carry` moves whole units out of the fractions, which would overflow after
  2**31 samples. A total overflows beyond 2**63.
- Clamped values are counted. Values that are not finite are counted and not measured.

A sample with weight 0 (masked out) is ignored. Shapes: B samples, R rows (one vector each), W length of a vector.
"""

import math

import numpy as np
from numpy.typing import NDArray

from headrace.kernel_cache import njit

I64 = NDArray[np.int64]

COUNT, NOT_FINITE, CLAMPED, WEIGHT, CORRECT, GROUPS = range(6)
FIRST_PAIR = 6
LABEL, PREDICTION, LOSS, ABS, SQUARE, GAUC = range(FIRST_PAIR, 18, 2)
HEADER = 18

WEIGHT_ONE = 1 << 20
FRACTION_ONE = 1 << 32
MAX_WEIGHT = float(1 << 20)
MAX_VALUE = float(1 << 40)
EPSILON = 1e-7
"""Probabilities keep this distance from 0 and 1 in the log loss: the loss of a sample is at most 16.1."""


def empty(num_rows: int, num_buckets: int) -> I64:
    """(R, W) totals of no samples."""
    return np.zeros((num_rows, HEADER + 2 * num_buckets), np.int64)


@njit(nogil=True, cache=True, inline="always")
def _add_value(totals_W, pair, value):  # type: ignore[no-untyped-def]
    if value > MAX_VALUE:
        value = MAX_VALUE
        totals_W[CLAMPED] += 1
    elif value < -MAX_VALUE:
        value = -MAX_VALUE
        totals_W[CLAMPED] += 1
    whole = math.floor(value)
    totals_W[pair] += np.int64(whole)
    totals_W[pair + 1] += np.int64(np.rint((value - whole) * FRACTION_ONE))


@njit(nogil=True, cache=True)
def add_samples(prediction_B, label_B, weight_B, row_B, is_bce, totals_RW):  # type: ignore[no-untyped-def]
    """Add each sample (float32) to row `row_B[b]` of `totals_RW` (int64)."""
    num_buckets = (totals_RW.shape[1] - HEADER) // 2
    for b in range(len(prediction_B)):
        if not weight_B[b] > 0:
            continue
        totals_W = totals_RW[row_B[b]]
        prediction, label, weight = np.float64(prediction_B[b]), np.float64(label_B[b]), np.float64(weight_B[b])
        if not (math.isfinite(prediction) and math.isfinite(label) and math.isfinite(weight)):
            totals_W[NOT_FINITE] += 1
            continue
        if weight > MAX_WEIGHT:
            weight = np.float64(MAX_WEIGHT)
            totals_W[CLAMPED] += 1
        mass = max(np.int64(1), np.int64(np.rint(weight * WEIGHT_ONE)))
        weight = mass / WEIGHT_ONE
        totals_W[COUNT] += 1
        totals_W[WEIGHT] += mass
        _add_value(totals_W, LABEL, weight * label)
        _add_value(totals_W, PREDICTION, weight * prediction)
        _add_value(totals_W, ABS, weight * abs(prediction - label))
        _add_value(totals_W, SQUARE, weight * (prediction - label) * (prediction - label))
        if is_bce:
            held = min(max(prediction, EPSILON), 1 - EPSILON)
            if label == 1:
                loss = -math.log(held)
            elif label == 0:
                loss = -math.log(1 - held)
            else:
                loss = -label * math.log(held) - (1 - label) * math.log(1 - held)
            _add_value(totals_W, LOSS, weight * loss)
            positive = label > 0.5
            if (prediction >= 0.5) == positive:
                totals_W[CORRECT] += mass
            bucket = min(max(np.int64(prediction * num_buckets), 0), num_buckets - 1)
            totals_W[HEADER + positive * num_buckets + bucket] += mass


def add_samples_reference(
    prediction_B: NDArray[np.float32],
    label_B: NDArray[np.float32],
    weight_B: NDArray[np.float32],
    row_B: I64,
    is_bce: bool,
    totals_RW: I64,
) -> None:
    """The plain twin of `add_samples`."""
    num_buckets = (totals_RW.shape[1] - HEADER) // 2
    for prediction, label, weight, row in zip(
        prediction_B.tolist(), label_B.tolist(), weight_B.tolist(), row_B, strict=True
    ):
        totals = totals_RW[row]
        if not weight > 0:
            continue
        if not all(map(math.isfinite, (prediction, label, weight))):
            totals[NOT_FINITE] += 1
            continue
        totals[CLAMPED] += weight > MAX_WEIGHT
        mass = max(1, round(min(weight, MAX_WEIGHT) * WEIGHT_ONE))
        share, error = mass / WEIGHT_ONE, prediction - label
        values = {LABEL: label, PREDICTION: prediction, ABS: abs(error)}
        weighted = {pair: share * value for pair, value in values.items()}
        weighted[SQUARE] = share * error * error
        if is_bce:
            held = min(max(prediction, EPSILON), 1 - EPSILON)
            gain = (label * math.log(held) if label else 0) + ((1 - label) * math.log(1 - held) if label != 1 else 0)
            weighted[LOSS] = share * -gain
            positive = label > 0.5
            totals[CORRECT] += mass * ((prediction >= 0.5) == positive)
            totals[HEADER + positive * num_buckets + min(max(int(prediction * num_buckets), 0), num_buckets - 1)] += (
                mass
            )
        totals[COUNT] += 1
        totals[WEIGHT] += mass
        for pair, value in weighted.items():
            totals[CLAMPED] += abs(value) > MAX_VALUE
            value = min(max(value, -MAX_VALUE), MAX_VALUE)
            totals[pair] += math.floor(value)
            totals[pair + 1] += round((value - math.floor(value)) * FRACTION_ONE)


def carry(totals_RW: I64) -> None:
    """Move whole units from the fractions to the wholes, in place. The value of every pair stays the same."""
    wholes_RP, fractions_RP = totals_RW[:, FIRST_PAIR:HEADER:2], totals_RW[:, FIRST_PAIR + 1 : HEADER : 2]
    wholes_RP += fractions_RP >> 32
    fractions_RP &= FRACTION_ONE - 1


def pair_value(totals_W: I64, pair: int) -> float:
    """The value of a pair of counters."""
    return float(totals_W[pair]) + float(totals_W[pair + 1]) / FRACTION_ONE


def masses(totals_W: I64) -> tuple[I64, I64]:
    """The histogram: weight of negatives and of positives by bucket."""
    num_buckets = (len(totals_W) - HEADER) // 2
    return totals_W[HEADER : HEADER + num_buckets], totals_W[HEADER + num_buckets :]
