"""Buffers of a model: tensors of its state that no optimizer changes, such as the running statistics of BatchNorm.

Each trainer updates its own in its forward passes. At the close of a pass the chief's replace them on all trainers, so
that every trainer saves, hashes and predicts with the same ones. A model without buffers costs nothing here.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from millrace.errors import MillraceError
from trainer.ranks import Ranks


class BuffersDiffer(MillraceError):
    """A buffer has another shape or type on one trainer than on the chief."""

    def __init__(self, rank: int, names: list[str]) -> None:
        super().__init__(
            f"trainer {rank} and trainer 0 have buffers of different shapes or types: {', '.join(names[:5])}; "
            "give every buffer its shape and type when the model is built"
        )


class Buffers:
    """The buffers in a model's state. They are looked up at each call: a model may replace the tensor of a buffer."""

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self._model, self._ranks = model, ranks
        self._any = bool(self._now())
        self._kept: dict[str, Tensor] = {}

    def _now(self) -> dict[str, Tensor]:
        state: Mapping[str, Tensor] = self._model.state_dict(keep_vars=True)
        return {name: value for name, value in state.items() if not isinstance(value, nn.Parameter)}

    def keep(self) -> None:
        """Remember the present values, before the forward pass of a step."""
        if self._any:
            self._kept = {name: value.detach().clone() for name, value in self._now().items()}

    def restore(self) -> None:
        """Take back what changed since `keep`: the step is skipped."""
        for name, value in self._now().items() if self._kept else ():
            value.detach().copy_(self._kept[name])

    def share(self) -> None:
        """Replace the buffers of all trainers by the chief's. Every trainer calls it. Raises BuffersDiffer."""
        if not self._any or self._ranks.world == 1:
            return
        own = self._now()
        layout = {name: [str(value.dtype), *value.shape] for name, value in own.items()}
        chiefs = self._ranks.broadcast({"buffers": layout} if self._ranks.rank == 0 else None)["buffers"]
        if layout != chiefs:
            differ = sorted(name for name in {*layout, *chiefs} if layout.get(name) != chiefs.get(name))
            raise BuffersDiffer(self._ranks.rank, differ)
        flat = torch.cat([_bytes_of(value) for value in own.values()])
        self._ranks.copy_from_chief(flat)
        at = 0
        for value in own.values():
            size = value.numel() * value.element_size()
            value.detach().copy_(flat[at : at + size].clone().view(value.dtype).view(value.shape))
            at += size


def _bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, on the CPU, as a flat uint8 tensor."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def batch_norm_for(model: nn.Module, num_samples: int) -> AbstractContextManager[None]:
    """BatchNorm as a batch of `num_samples` needs it: one sample alone has no variance, for which torch raises.

    Such a batch is normalised by the running statistics, as at inference, and leaves them as they are.
    """
    return evaluating(m for m in model.modules() if num_samples == 1 and isinstance(m, _BatchNorm))


@contextmanager
def evaluating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """These modules, each for itself, in evaluation mode; afterwards as they were."""
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
