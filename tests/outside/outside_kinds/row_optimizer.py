"""An optimizer of rows with momentum.

A package may also keep kernels in a second module and import it in `kernels`, as Headrace does; then jobs are checked
without waiting for Numba.
"""

from typing import Annotated, Literal

from pydantic import Field

from headrace.config import Positive
from headrace.kernel_cache import njit
from headrace.pserver.row_optimizers import RowKernels, RowOptimizer


@njit(nogil=True, cache=True, error_model="numpy")
def heavy_ball(slab_RW, rows_U, grads_UD, begin, end, first_order, settings):
    """m = decay * m + g; w -= lr * m."""
    num_weights = grads_UD.shape[1]
    for u in range(begin, end):
        for d in range(num_weights):
            own = settings[1 if d >= first_order else 0]
            moved = own[3] * slab_RW[rows_U[u], num_weights + d] + grads_UD[u, d]
            slab_RW[rows_U[u], num_weights + d] = moved
            slab_RW[rows_U[u], d] = min(max(slab_RW[rows_U[u], d] - own[2] * moved, own[0]), own[1])


def heavy_ball_reference(row_W, grad_D, first_order, settings):
    """The twin of `heavy_ball` on one row."""
    num_weights = len(grad_D)
    for d, g in enumerate(grad_D):
        low, high, lr, decay = settings[int(d >= first_order)][:4]
        row_W[num_weights + d] = decay * row_W[num_weights + d] + g
        row_W[d] = min(max(row_W[d] - lr * row_W[num_weights + d], low), high)


class HeavyBall(RowOptimizer):
    """Gradient descent with momentum."""

    kind: Literal["heavy_ball"]
    """Heavy ball."""
    lr: Positive = 0.05
    """Learning rate."""
    decay: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Share of the last move that goes on."""

    def numbers(self) -> list[float]:
        return [self.lr, self.decay]

    def state(self, num_weights: int) -> list[list[float]]:
        return [[0.0] * num_weights]

    def kernels(self) -> RowKernels:
        return RowKernels(heavy_ball, heavy_ball_reference)
