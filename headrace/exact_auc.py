"""Area under the ROC curve over all pairs: the probability that a positive has a higher prediction than a negative.

Ties count half (Hanley, McNeil 1982). `trainer.metrics.auc` has it from a histogram, and for groups.

Shapes: N samples, K distinct predictions.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32] | NDArray[np.float64]


def exact_auc(prediction_N: Floats, label_N: Floats, weight_N: Floats) -> float | None:
    """AUC over all pairs, each weighted by the product of its weights; None if a class is absent."""
    order_N = np.argsort(prediction_N, kind="stable")
    positive_N = label_N[order_N] > 0.5
    weight_N = weight_N[order_N].astype(np.float64)
    first_K = np.flatnonzero(np.diff(prediction_N[order_N], prepend=np.nan) != 0)
    if not len(first_K):
        return None
    positive_K = np.add.reduceat(np.where(positive_N, weight_N, 0.0), first_K)
    negative_K = np.add.reduceat(np.where(positive_N, 0.0, weight_N), first_K)
    pairs = float(positive_K.sum()) * float(negative_K.sum())
    if not pairs:
        return None
    below_K = np.cumsum(negative_K) - negative_K / 2
    return float((positive_K * below_K).sum()) / pairs


def exact_auc_reference(prediction_N: Floats, label_N: Floats, weight_N: Floats) -> float | None:
    """The plain twin of `exact_auc`, over every pair."""
    won = pairs = 0.0
    rows = [(float(p), label > 0.5, float(w)) for p, label, w in zip(prediction_N, label_N, weight_N, strict=True)]
    for high, is_positive, high_weight in rows:
        for low, also_positive, low_weight in rows:
            if is_positive and not also_positive:
                pairs += high_weight * low_weight
                won += high_weight * low_weight * (1.0 if high > low else 0.5 if high == low else 0.0)
    return won / pairs if pairs else None
