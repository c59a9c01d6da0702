"""Measures of groups of samples, such as impressions: the best k of each group, and how well each group is calibrated.

Exact within a pass, like the mean AUC of groups, and kept as integers. Of samples with equal predictions those without
a click come first, so ties count against the model, and the result depends on no order. Weights within a group are
ignored.

Shapes: N samples of a pass, K numbers k, W integers of a state.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.kernel_cache import njit
from headrace.trainer.metrics.totals import I64

UNIT = 1 << 24
"""Fractions are kept in units of 1 / UNIT. A state holds 2**39 samples."""
GROUPS, SAMPLES, ERROR, FIRST = 0, 1, 2, 3
"""Places in a state: groups with a click, samples, error of calibration; then, for each k, hits and recall."""


class GroupMeasures:
    """acc@k, recall@k and the error of calibration over groups; see trainer.config.MetricsSection."""

    def __init__(self, at_k: Sequence[int], *, calibration: bool) -> None:
        self._k_K, self._calibration = np.array(sorted(at_k), np.int64), calibration
        self.size = FIRST + 2 * len(self._k_K)

    @property
    def any(self) -> bool:
        """Whether there is anything to measure."""
        return bool(len(self._k_K)) or self._calibration

    def add(
        self,
        group_N: NDArray[np.uint64],
        prediction_N: NDArray[np.float32],
        label_N: NDArray[np.float32],
        state_W: I64,
    ) -> None:
        """Add all samples of a pass. Predictions are probabilities."""
        positive_N = label_N > 0.5
        order_N = np.lexsort((positive_N, -prediction_N, group_N))
        units_N = np.rint((prediction_N.astype(np.float64) - np.clip(label_N, 0, 1)) * UNIT).astype(np.int64)
        add_groups(group_N[order_N], positive_N[order_N], units_N[order_N], self._k_K, state_W)

    def report(self, state_W: I64) -> dict[str, float | None]:
        """The measures by name; None where no group has a click, or there is no sample."""
        groups, samples = int(state_W[GROUPS]), int(state_W[SAMPLES])
        found: dict[str, float | None] = {}
        for number, k in enumerate(self._k_K.tolist()):
            hits, recall = (int(state_W[FIRST + 2 * number + place]) for place in (0, 1))
            found[f"acc@{k}"] = hits / groups if groups else None
            found[f"recall@{k}"] = recall / UNIT / groups if groups else None
        if self._calibration:
            found["group_calibration_error"] = int(state_W[ERROR]) / UNIT / samples if samples else None
        return found


@njit(nogil=True, cache=True)
def add_groups(group_N, positive_N, units_N, k_K, state_W):  # type: ignore[no-untyped-def]
    """Add the groups of samples that are sorted by group, then from the best to the worst."""
    begin = 0
    top_K = np.zeros(len(k_K), np.int64)
    while begin < len(group_N):
        end, positives, error = begin, np.int64(0), np.int64(0)
        top_K[:] = 0
        while end < len(group_N) and group_N[end] == group_N[begin]:
            error += units_N[end]
            if positive_N[end]:
                positives += 1
                for number in range(len(k_K)):
                    top_K[number] += end - begin < k_K[number]
            end += 1
        state_W[SAMPLES] += end - begin
        state_W[ERROR] += abs(error)
        if positives:
            state_W[GROUPS] += 1
            for number in range(len(k_K)):
                state_W[FIRST + 2 * number] += top_K[number] > 0
                state_W[FIRST + 2 * number + 1] += np.int64(np.rint(top_K[number] / positives * UNIT))
        begin = end


def add_groups_reference(
    group_N: NDArray[np.uint64], prediction_N: NDArray[np.float32], label_N: NDArray[np.float32], at_k: Sequence[int]
) -> list[int]:
    """The plain twin of `GroupMeasures.add`: the state of a dictionary of groups."""
    groups: dict[int, list[tuple[float, bool, float]]] = {}
    for group, prediction, label in zip(group_N.tolist(), prediction_N.tolist(), label_N.tolist(), strict=True):
        groups.setdefault(group, []).append((-prediction, label > 0.5, min(max(label, 0.0), 1.0)))
    state = [0] * (FIRST + 2 * len(at_k))
    for samples in groups.values():
        samples.sort()
        clicks = [place for place, (_, positive, _) in enumerate(samples) if positive]
        state[SAMPLES] += len(samples)
        state[ERROR] += abs(sum(round((-minus - label) * UNIT) for minus, _, label in samples))
        state[GROUPS] += bool(clicks)
        for number, k in enumerate(sorted(at_k) if clicks else ()):
            top = sum(place < k for place in clicks)
            state[FIRST + 2 * number] += top > 0
            state[FIRST + 2 * number + 1] += round(top / len(clicks) * UNIT)
    return state
