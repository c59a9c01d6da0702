"""Buffers of a model: tensors of its state that no optimizer changes, such as the running statistics of BatchNorm.

Each trainer updates its own buffers in its forward passes. At the close of a pass the buffers of rank 0 replace those
of all trainers, so every trainer saves, hashes and predicts with the same ones.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from headrace.errors import HeadraceError
from headrace.trainer.collectives.ranks import Ranks


class BuffersDiffer(HeadraceError):
    """A buffer has another shape or type on one trainer than on rank 0."""

    def __init__(self, rank: int, names: list[str]) -> None:
        super().__init__(
            f"trainer {rank} and trainer 0 have buffers of different shapes or types: {', '.join(names[:5])}; "
            "give every buffer its shape and type when the model is built"
        )


class Buffers:
    """The buffers in a model's state. They are looked up at each call because a model may replace a buffer's tensor."""

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self._model, self._ranks = model, ranks
        self._any = bool(self._now())
        self._saved: dict[str, Tensor] = {}

    def _now(self) -> dict[str, Tensor]:
        state: Mapping[str, Tensor] = self._model.state_dict(keep_vars=True)
        return {name: value for name, value in state.items() if not isinstance(value, nn.Parameter)}

    def save(self) -> None:
        """Copy the values before the forward pass of a step."""
        if self._any:
            self._saved = {name: value.detach().clone() for name, value in self._now().items()}

    def restore(self) -> None:
        """Restore the values copied by `save`, for a step that is skipped."""
        for name, value in self._now().items() if self._saved else ():
            value.detach().copy_(self._saved[name])

    def broadcast(self) -> None:
        """Collective: replace the buffers of all trainers by those of rank 0. Raises BuffersDiffer."""
        if not self._any or self._ranks.world == 1:
            return
        own = self._now()
        layout = {name: [str(value.dtype), *value.shape] for name, value in own.items()}
        wanted = self._ranks.broadcast({"buffers": layout} if self._ranks.rank == 0 else None)["buffers"]
        if layout != wanted:
            differ = sorted(name for name in {*layout, *wanted} if layout.get(name) != wanted.get(name))
            raise BuffersDiffer(self._ranks.rank, differ)
        flat = torch.cat([_bytes_of(value) for value in own.values()])
        self._ranks.copy_from_rank_0(flat)
        at = 0
        for value in own.values():
            size = value.numel() * value.element_size()
            value.detach().copy_(flat[at : at + size].clone().view(value.dtype).view(value.shape))
            at += size


def _bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, on the CPU, as a flat uint8 tensor."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
