"""Area under the ROC curve: from a histogram with an error bound, exact, and the mean over groups.

The AUC is the probability that a positive has a higher prediction than a negative; ties count half (Hanley, McNeil
1982). A histogram treats all pairs within a bucket as ties, so its error is at most half their share:
`sum_b(positive_b * negative_b) / (2 * positives * negatives)`.

Shapes: N samples, K buckets.
"""

import numpy as np
from numpy.typing import NDArray

from headrace.kernel_cache import njit
from headrace.trainer.metrics.totals import FRACTION_ONE, I64

F32 = NDArray[np.float32]
U64 = NDArray[np.uint64]


@njit(nogil=True, cache=True)
def count_pairs(negative_K, positive_K):  # type: ignore[no-untyped-def]
    """Returns (negatives, positives, won, tied): the masses, and the weights of the pairs that are won and tied."""
    negatives, positives, won, tied = np.int64(0), np.int64(0), 0.0, 0.0
    for k in range(len(negative_K)):
        if positive_K[k]:
            won += np.float64(positive_K[k]) * np.float64(negatives)
            tied += np.float64(positive_K[k]) * np.float64(negative_K[k])
            positives += positive_K[k]
        negatives += negative_K[k]
    return negatives, positives, won, tied


def count_pairs_reference(negative_K: I64, positive_K: I64) -> tuple[int, int, float, float]:
    """The plain twin of `count_pairs`."""
    negative, positive = negative_K.tolist(), positive_K.tolist()
    won = sum(float(positive[k]) * float(sum(negative[:k])) for k in range(len(negative)))
    tied = sum(float(above) * float(below) for above, below in zip(positive, negative, strict=True))
    return sum(negative), sum(positive), won, tied


def histogram_auc(negative_K: I64, positive_K: I64) -> tuple[float, float] | None:
    """AUC of a histogram and its largest error; None if a class is absent."""
    negatives, positives, won, tied = count_pairs(negative_K, positive_K)
    if not negatives or not positives:
        return None
    pairs = float(negatives) * float(positives)
    return (won + tied / 2) / pairs, tied / 2 / pairs


def exact_auc(prediction_N: F32, label_N: F32, weight_N: F32) -> float | None:
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


def exact_auc_reference(prediction_N: F32, label_N: F32, weight_N: F32) -> float | None:
    """The plain twin of `exact_auc`, over every pair."""
    won = pairs = 0.0
    rows = [(float(p), label > 0.5, float(w)) for p, label, w in zip(prediction_N, label_N, weight_N, strict=True)]
    for high, is_positive, high_weight in rows:
        for low, also_positive, low_weight in rows:
            if is_positive and not also_positive:
                pairs += high_weight * low_weight
                won += high_weight * low_weight * (1.0 if high > low else 0.5 if high == low else 0.0)
    return won / pairs if pairs else None


@njit(nogil=True, cache=True)
def _sum_groups(group_N, prediction_N, positive_N):  # type: ignore[no-untyped-def]
    """Sum of AUCs (units of 2**-32) and number of groups with both labels. Input: sorted by group, then prediction."""
    total, num_groups, begin = np.int64(0), np.int64(0), 0
    while begin < len(group_N):
        end, negatives, positives, twice_won = begin, np.int64(0), np.int64(0), np.int64(0)
        while end < len(group_N) and group_N[end] == group_N[begin]:
            tied_negatives, tied_positives, tie = np.int64(0), np.int64(0), prediction_N[end]
            while end < len(group_N) and group_N[end] == group_N[begin] and prediction_N[end] == tie:
                tied_positives += positive_N[end]
                tied_negatives += not positive_N[end]
                end += 1
            twice_won += tied_positives * (2 * negatives + tied_negatives)
            negatives += tied_negatives
            positives += tied_positives
        if negatives and positives:
            total += np.int64(np.rint(twice_won / (2.0 * negatives * positives) * FRACTION_ONE))
            num_groups += 1
        begin = end
    return total, num_groups


def sum_group_aucs(group_N: U64, prediction_N: F32, label_N: F32) -> tuple[int, int]:
    """Sum of the groups' AUCs in units of 2**-32, and the number of groups with both labels.

    Weights within a group are ignored. Predictions must be finite. At most 2**31 groups in a call.
    """
    order_N = np.lexsort((prediction_N, group_N))
    total, num_groups = _sum_groups(group_N[order_N], prediction_N[order_N], label_N[order_N] > 0.5)
    return int(total), int(num_groups)


def sum_group_aucs_reference(group_N: U64, prediction_N: F32, label_N: F32) -> tuple[int, int]:
    """The plain twin of `sum_group_aucs`: a dictionary of groups, and every pair."""
    groups: dict[int, list[int]] = {}
    for n, group in enumerate(group_N.tolist()):
        groups.setdefault(group, []).append(n)
    aucs = [exact_auc_reference(prediction_N[at], label_N[at], np.ones(len(at), np.float32)) for at in groups.values()]
    known = [auc for auc in aucs if auc is not None]
    return sum(round(auc * FRACTION_ONE) for auc in known), len(known)
