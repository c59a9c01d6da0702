"""The dense part of the strategy."""

import torch

from headrace.trainer.dense.all_reduce import AllReduceDense


class NormedDense(AllReduceDense):
    """Divides the sum over ranks by its length."""

    def step(self) -> None:
        if norm := torch.linalg.vector_norm(self.gradient).item():
            self.gradient.div_(norm)
        super().step()
