"""Compression of dense gradients: they are rounded to 16 bits before they are summed over ranks.

What rounding leaves of a gradient is the rank's residual, which is added to the gradient of the next step (error
feedback; Seide et al. 2014). It belongs to the rank, so commits hold the residuals of all ranks, and digests hash them
in rank order. On another number of ranks, each begins with their mean.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from trainer.collectives.ranks import Ranks

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
PREFIX = "residual."
"""Before the number of a rank, in commits."""


class Residuals:
    """See module docstring. The gradient is changed in place, and `sent` is what ranks sum."""

    def __init__(self, gradient: Tensor, ranks: Ranks, compression: Literal["fp16", "bf16"]) -> None:
        self._gradient, self._ranks = gradient, ranks
        self.sent = torch.zeros_like(gradient, dtype=DTYPES[compression])
        self.residual = torch.zeros_like(gradient)
        self.largest = torch.finfo(self.sent.dtype).max
        """Largest number that can be sent."""
        self._digests = self._hashes([self.residual] * ranks.world)

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

    def close_pass(self) -> None:
        """Collective: hear the hashes of the residuals of all ranks."""
        hashes = np.zeros((self._ranks.world, 32), np.int64)
        hashes[self._ranks.rank] = list(self._hashes([self.residual])[0])
        self._digests = [each.tobytes() for each in self._ranks.sum(hashes).astype(np.uint8)]

    def digest(self, of_rest: str) -> str:
        """Hash of a digest and of the residuals of all ranks, as `close_pass` heard them."""
        return hashlib.sha256(of_rest.encode() + b"".join(self._digests)).hexdigest()

    def consolidate(self) -> dict[str, Tensor]:
        """Collective: on rank 0, the residuals of all ranks by name."""
        gathered = self._ranks.gather({"residual": self.residual.cpu().numpy()}) or []
        return {f"{PREFIX}{rank}": torch.from_numpy(each["residual"].copy()) for rank, each in enumerate(gathered)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """On every rank: continue from what `consolidate` gave with any number of ranks, or from none."""
        saved = [tensors[f"{PREFIX}{rank}"] for rank in range(sum(name.startswith(PREFIX) for name in tensors))]
        if len(saved) != self._ranks.world:
            zeros = torch.zeros_like(self.residual, device="cpu")
            mean = torch.stack(saved).sum(0) / len(saved) if saved else zeros
            saved = [mean] * self._ranks.world
        self.residual.copy_(saved[self._ranks.rank])
        self._digests = self._hashes(saved)

    @staticmethod
    def _hashes(residuals: Sequence[Tensor]) -> list[bytes]:
        return [hashlib.sha256(each.cpu().numpy().tobytes()).digest() for each in residuals]
