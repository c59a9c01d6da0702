"""Compression of dense gradients: they are rounded to 16 bits before they are summed over ranks.

What rounding leaves of a gradient is the rank's residual, which is added to the gradient of the next step (error
feedback; Seide et al. 2014). It belongs to the rank, so commits hold the residuals of all ranks, and digests hash them
in rank order. On another number of ranks, each begins with their mean.
"""

from typing import Literal

import torch
from torch import Tensor

from headrace.trainer.collectives.ranks import Ranks
from headrace.trainer.dense.rank_tensors import RESIDUAL, RankTensors

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Residuals:
    """The gradient is changed in place, and `sent` is what ranks sum."""

    def __init__(self, gradient: Tensor, ranks: Ranks, compression: Literal["fp16", "bf16"]) -> None:
        self._gradient = gradient
        self.sent = torch.zeros_like(gradient, dtype=DTYPES[compression])
        self.residual = torch.zeros_like(gradient)
        self.largest = torch.finfo(self.sent.dtype).max
        """Largest number that can be sent."""
        self.of_ranks = RankTensors({RESIDUAL: self.residual}, ranks, keeps_sum=False)

    def round(self, begin: int, end: int, loss_scale: float) -> Tensor:
        """Round a part of the gradient, and return what is sent. The gradient then holds what is left."""
        part, sent = self._gradient[begin:end], self.sent[begin:end]
        if loss_scale != 1:
            part.div_(loss_scale)
        part.add_(self.residual[begin:end])
        sent.copy_(part)
        part.sub_(sent)
        return sent

    def keep(self) -> None:
        """The step counts: keep what is left, and put the sums over ranks into the gradient."""
        self.residual.copy_(self._gradient)
        self._gradient.copy_(self.sent)
