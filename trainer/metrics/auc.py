"""Area under the ROC curve: from a histogram with an error bound, and the mean over groups.

`headrace.exact_auc` defines it. A histogram treats all pairs within a bucket as ties, so its error is at most half
their share: `sum_b(positive_b * negative_b) / (2 * positives * negatives)`.

Shapes: N samples, K buckets.
"""

import numpy as np
from numpy.typing import NDArray

from headrace.exact_auc import exact_auc_reference
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
