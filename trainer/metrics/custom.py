"""Further metrics: the protocol, and the one place where they are listed.

A metric is a vector of integers that batches add to, so that it can be summed over ranks, passes and restarts as the
built-in ones are. `METRICS` are measured for every task, for the pass, the window and the life.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Metric(Protocol):
    """One number for a task. Without state of its own: all of it is in the vector."""

    name: str
    """Its key in reports."""
    size: int
    """Length of its vector."""

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
        """What the sums say; None where it is not defined."""
        ...


METRICS: tuple[Metric, ...] = ()
"""Add yours here."""
