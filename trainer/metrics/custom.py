"""Additional metrics: their protocol, and the one place where they are listed.

A metric is a vector of integers to which batches add, so it can be summed over ranks, passes and restarts like the
built-in metrics. `METRICS` are measured for every task, for the pass, the window and the life of the job.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Metric(Protocol):
    """One number for a task. All state is in the vector."""

    name: str
    """The key in reports."""
    size: int
    """Length of the vector."""

    def add(
        self,
        prediction_B: NDArray[np.float32],
        label_B: NDArray[np.float32],
        weight_B: NDArray[np.float32],
        state_W: NDArray[np.int64],
    ) -> None:
        """Add a batch to the vector, in integers; a sample with weight 0 is not counted."""
        ...

    def value(self, state_W: NDArray[np.int64]) -> float | None:
        """The value of the metric; None if it is not defined."""
        ...


METRICS: tuple[Metric, ...] = ()
"""Add your metrics here."""
