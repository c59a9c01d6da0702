"""A linear model that learns samples in their order: a quick judge of what features are worth.

Logistic regression with Adagrad (Duchi et al., 2011), in float64. Every sample is predicted before it is learnt, and
the samples of a group (an event, or a batch) before any of them.

Shapes: C columns of ids, B samples, N ids of all columns with repeats, G groups, U different ids of all columns.
"""

import math
from collections.abc import Sequence

from headrace.kernel_cache import njit

EPSILON = 1.0
"""Adagrad's sum of squared gradients at the start: a first step is at most the rate."""
MAX_LOGIT = 30.0


@njit(nogil=True, cache=True)
def learn(start_CB1, id_N, share_N, label_B, end_G, admit, rate, weight_U, squares_U, seen_U, logit_B):  # type: ignore[no-untyped-def]
    """Write each sample's logit, as predicted before its group was learnt; all weights begin at 0.

    Sample b has the ids id_N[start_CB1[c, b]:start_CB1[c, b + 1]] of column c, each times its `share_N`. `logit_B`
    holds what is added to each logit. An id takes part from the `admit`-th time on that it is seen. `weight_U`,
    `squares_U` and `seen_U` are room for the model.
    """
    bias, bias_squares = 0.0, EPSILON
    weight_U[:], squares_U[:], seen_U[:] = 0.0, EPSILON, 0
    begin = 0
    for g in range(len(end_G)):
        for b in range(begin, end_G[g]):
            logit = logit_B[b] + bias
            for c in range(len(start_CB1)):
                for n in range(start_CB1[c, b], start_CB1[c, b + 1]):
                    if seen_U[id_N[n]] + 1 >= admit:
                        logit += weight_U[id_N[n]] * share_N[n]
            logit_B[b] = min(max(logit, -MAX_LOGIT), MAX_LOGIT)
        for b in range(begin, end_G[g]):
            error = 1.0 / (1.0 + math.exp(-logit_B[b])) - label_B[b]
            bias_squares += error * error
            bias -= rate * error / math.sqrt(bias_squares)
            for c in range(len(start_CB1)):
                for n in range(start_CB1[c, b], start_CB1[c, b + 1]):
                    u, slope = id_N[n], error * share_N[n]
                    seen_U[u] += 1
                    if seen_U[u] >= admit:
                        squares_U[u] += slope * slope
                        weight_U[u] -= rate * slope / math.sqrt(squares_U[u])
        begin = end_G[g]


def learn_reference(
    samples: Sequence[Sequence[tuple[int, float]]],
    labels: Sequence[float],
    ends: Sequence[int],
    admit: int,
    rate: float,
    offsets: Sequence[float],
) -> list[float]:
    """The twin: each sample has the ids of all chosen columns, with their shares. Returns the logits."""
    bias = -1
    weights: dict[int, float] = {}
    squares: dict[int, float] = {}
    seen: dict[int, int] = {}
    logits: list[float] = []
    for begin, end in zip((0, *ends), ends, strict=False):
        for b in range(begin, end):
            logit = offsets[b] + weights.get(bias, 0.0)
            for id_, share in samples[b]:
                if seen.get(id_, 0) + 1 >= admit:
                    logit += weights.get(id_, 0.0) * share
            logits.append(min(max(logit, -MAX_LOGIT), MAX_LOGIT))
        for b in range(begin, end):
            error = 1 / (1 + math.exp(-logits[b])) - labels[b]
            for id_, share in [(bias, 1.0), *samples[b]]:
                seen[id_] = seen.get(id_, 0) + 1
                if id_ == bias or seen[id_] >= admit:
                    squares[id_] = squares.get(id_, EPSILON) + (error * share) ** 2
                    weights[id_] = weights.get(id_, 0.0) - rate * error * share / math.sqrt(squares[id_])
    return logits
