"""State of the dense part that each rank has for itself, such as residuals: in commits, in digests, on other ranks.

Commits hold the tensors of all ranks as "<name>.<rank>"; digests hash them in rank order.
"""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.trainer.collectives.ranks import Ranks

RESIDUAL, VELOCITY = "residual", "velocity"
"""The part of gradients that a compression has kept back, and the momentum of a rank's own gradients."""
PREFIXES = (f"{RESIDUAL}.", f"{VELOCITY}.")
"""Before the number of a rank, in commits."""


class RankTensors:
    """The tensors are flat, of one size, and changed in place."""

    def __init__(self, tensors: Mapping[str, Tensor], ranks: Ranks, *, keeps_sum: bool) -> None:
        """`keeps_sum`: on another number of ranks each begins with an equal part of the sum, so that nothing is lost.
        Otherwise with the mean.
        """
        self._tensors, self._ranks, self._keeps_sum = dict(tensors), ranks, keeps_sum
        self._hashes = [self._hash(self._tensors)] * ranks.world

    def close_pass(self) -> None:
        """Collective: hear the hashes of the tensors of all ranks."""
        hashes = np.zeros((self._ranks.world, 32), np.int64)
        hashes[self._ranks.rank] = list(self._hash(self._tensors))
        self._hashes = [each.tobytes() for each in self._ranks.sum(hashes).astype(np.uint8)]

    def digest(self, of_rest: str) -> str:
        """Hash of a digest and of the tensors of all ranks, as `close_pass` heard them."""
        return hashlib.sha256(of_rest.encode() + b"".join(self._hashes)).hexdigest()

    def consolidate(self) -> dict[str, Tensor]:
        """Collective: on rank 0, the tensors of all ranks by name."""
        gathered = self._ranks.gather({name: each.cpu().numpy() for name, each in self._tensors.items()}) or []
        return {
            f"{name}.{rank}": torch.from_numpy(each[name].copy())
            for name in self._tensors
            for rank, each in enumerate(gathered)
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """On every rank: continue from what `consolidate` gave with any number of ranks, or from none."""
        saved = {name: self._of_all(name, tensors) for name in self._tensors}
        for name, mine in self._tensors.items():
            mine.copy_(saved[name][self._ranks.rank])
        self._hashes = [
            self._hash({name: of_all[rank] for name, of_all in saved.items()}) for rank in range(self._ranks.world)
        ]

    def _of_all(self, name: str, tensors: Mapping[str, Tensor]) -> Sequence[Tensor]:
        """The tensors of this name, of each rank."""
        world, prefix = self._ranks.world, f"{name}."
        saved = [tensors[f"{prefix}{rank}"] for rank in range(sum(each.startswith(prefix) for each in tensors))]
        if len(saved) == world:
            return saved
        if not saved:
            return [torch.zeros_like(self._tensors[name], device="cpu")] * world
        return [torch.stack(saved).sum(0) / (world if self._keeps_sum else len(saved))] * world

    @staticmethod
    def _hash(tensors: Mapping[str, Tensor]) -> bytes:
        total = hashlib.sha256()
        for each in tensors.values():
            total.update(each.cpu().numpy().tobytes())
        return total.digest()
