"""Computes the reported measures from totals. A measure that is not defined (no sample, one class) is None."""

import math
from typing import Any

import numpy as np

from headrace.trainer.metrics.auc import histogram_auc
from headrace.trainer.metrics.totals import (
    ABS,
    CLAMPED,
    CORRECT,
    COUNT,
    FRACTION_ONE,
    GAUC,
    GROUPS,
    I64,
    LABEL,
    LOSS,
    NOT_FINITE,
    PREDICTION,
    SQUARE,
    WEIGHT,
    WEIGHT_ONE,
    masses,
    pair_value,
)

Measures = dict[str, float | int | None]


def measures(totals_W: I64, is_bce: bool) -> Measures:
    """All measures of one vector of totals.

    Means are weighted. normalized_entropy is the log loss divided by that of a constant prediction of the mean label
    (He et al., "Practical Lessons from Predicting Clicks on Ads at Facebook", ADKDD 2014). calibration is the mean
    prediction divided by the mean label. auc_error bounds the error of the histogram's auc.
    """
    weight = float(totals_W[WEIGHT]) / WEIGHT_ONE
    label, square = _mean(totals_W, LABEL, weight), _mean(totals_W, SQUARE, weight)
    prediction = _mean(totals_W, PREDICTION, weight)
    found: Measures = {
        "count": int(totals_W[COUNT]),
        "mean_label": label,
        "mean_prediction": prediction,
        "calibration": None if prediction is None or not label else prediction / label,
        "mae": _mean(totals_W, ABS, weight),
        "mse": square,
        "rmse": None if square is None else math.sqrt(square),
    }
    if is_bce:
        found |= _of_probabilities(totals_W, weight, label)
    for name, counter in (("not_finite", NOT_FINITE), ("clamped", CLAMPED)):
        if totals_W[counter]:
            found[name] = int(totals_W[counter])
    return found


def _of_probabilities(totals_W: I64, weight: float, label: float | None) -> Measures:
    auc = histogram_auc(*masses(totals_W))
    logloss = _mean(totals_W, LOSS, weight)
    groups = int(totals_W[GROUPS])
    return {
        "auc": None if auc is None else auc[0],
        "auc_error": None if auc is None else auc[1],
        "gauc": pair_value(totals_W, GAUC) / groups if groups else None,
        "gauc_groups": groups,
        "logloss": logloss,
        "normalized_entropy": _normalized_entropy(logloss, label),
        "acc": float(totals_W[CORRECT]) / WEIGHT_ONE / weight if weight else None,
    }


NUM_TENTHS = 10


def reliability(totals_W: I64) -> list[dict[str, float]]:
    """The reliability curve: mean prediction, share of positives and weight of each tenth of the samples.

    Tenths are of the weight, from the lowest predictions to the highest, and end between buckets of the histogram, so
    some may be missing where many predictions are alike. A prediction counts as the middle of its bucket.
    """
    negative_K, positive_K = (mass_K / WEIGHT_ONE for mass_K in masses(totals_W))
    mass_K, middle_K = negative_K + positive_K, (np.arange(len(negative_K)) + 0.5) / len(negative_K)
    if not mass_K.any():
        return []
    end_K = np.cumsum(mass_K)
    tenth_K = np.minimum(((end_K - mass_K / 2) / end_K[-1] * NUM_TENTHS).astype(np.int64), NUM_TENTHS - 1)
    sums = [np.bincount(tenth_K, each_K, NUM_TENTHS) for each_K in (mass_K * middle_K, positive_K, mass_K)]
    return [
        {"prediction": prediction / weight, "label": label / weight, "weight": weight}
        for prediction, label, weight in zip(*(each.tolist() for each in sums), strict=True)
        if weight
    ]


def reliability_reference(totals_W: I64) -> list[dict[str, Any]]:
    """The plain twin of `reliability`, bucket by bucket."""
    negative, positive = (mass.tolist() for mass in masses(totals_W))
    total, before = sum(negative) + sum(positive), 0
    tenths: dict[int, list[float]] = {}
    for bucket, (clear, hit) in enumerate(zip(negative, positive, strict=True)):
        if mass := clear + hit:
            tenth = tenths.setdefault(min(10 * (2 * before + mass) // (2 * total), 9), [0.0, 0.0, 0.0])
            for place, each in enumerate((mass * (bucket + 0.5) / len(negative), hit, mass)):
                tenth[place] += each / WEIGHT_ONE
            before += mass
    return [{"prediction": p / w, "label": y / w, "weight": w} for _, (p, y, w) in sorted(tenths.items())]


def _normalized_entropy(logloss: float | None, label: float | None) -> float | None:
    if logloss is None or label is None or not 0 < label < 1:
        return None
    return logloss / -(label * math.log(label) + (1 - label) * math.log(1 - label))


def _mean(totals_W: I64, pair: int, weight: float) -> float | None:
    return pair_value(totals_W, pair) / weight if weight else None


def set_gauc(totals_W: I64, sum_units: int, num_groups: int) -> None:
    """Add the AUCs of a pass's groups: their sum in units of 2**-32, and their number."""
    totals_W[GAUC] += sum_units // FRACTION_ONE
    totals_W[GAUC + 1] += sum_units % FRACTION_ONE
    totals_W[GROUPS] += num_groups
