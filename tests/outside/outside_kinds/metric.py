"""The share of samples that are predicted above one half."""

import numpy as np
from numpy.typing import NDArray

from headrace import Metric


class ShareAboveHalf(Metric):
    name, size = "share_above_half", 2

    def add(
        self,
        prediction_B: NDArray[np.float32],
        label_B: NDArray[np.float32],
        weight_B: NDArray[np.float32],
        state_W: NDArray[np.int64],
    ) -> None:
        counted_B = weight_B > 0
        state_W += np.array([(prediction_B[counted_B] > 0.5).sum(), counted_B.sum()])

    def value(self, state_W: NDArray[np.int64]) -> float | None:
        return state_W[0] / state_W[1] if state_W[1] else None
