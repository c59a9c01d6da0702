"""Metrics of one's own: their protocol.

A metric is a vector of integers to which batches add, so it can be summed over ranks, passes and restarts like the
built-in metrics: its value depends on no order and on no number of ranks. `metrics.own` in a job file names classes of
metrics; they are measured for every task, for the pass, the window and the life of the job. trainer.train.observer
builds them.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

MAX_SIZE = 65_536
"""Longest vector of a metric."""
RESERVED = frozenset(
    {
        *("count", "mean_label", "mean_prediction", "calibration", "mae", "mse", "rmse", "not_finite", "clamped"),
        *("auc", "auc_error", "gauc", "gauc_groups", "logloss", "normalized_entropy", "acc"),
        *("group_calibration_error", "slices"),
    }
)
"""Names in reports that no other metric may have."""


class Metric(Protocol):
    """One number for a task; built as `Class()`. All state is in the vector: an object keeps nothing between calls."""

    name: str
    """The key in reports: small letters, digits and "_"."""
    size: int
    """Length of the vector, at most MAX_SIZE."""

    def add(
        self,
        prediction_B: NDArray[np.float32],
        label_B: NDArray[np.float32],
        weight_B: NDArray[np.float32],
        state_W: NDArray[np.int64],
    ) -> None:
        """Add a batch to the vector, in integers; a sample with weight 0 is not counted.

        The vector of samples must be the sum of their vectors, however they are divided into batches. Round each sample
        by itself, as in `np.rint(values_B * 2**20).astype(np.int64).sum()`; a sum of floats depends on their order.
        """
        ...

    def value(self, state_W: NDArray[np.int64]) -> float | None:
        """The value of the metric; None if it is not defined."""
        ...
