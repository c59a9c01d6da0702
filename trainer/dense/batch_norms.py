"""The BatchNorm layers of a model in a training step: each trainer's own statistics, or those of all trainers."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, Protocol

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from headrace.trainer.collectives.ranks import Ranks
from headrace.trainer.dense.sync_batch_norm import SyncBatchNorms


class BatchNorms(Protocol):
    """The BatchNorm layers of one rank. Every rank calls `open_step` for a step, and the rest of its role in it."""

    def open_step(self, *, all_have: bool) -> None:
        """Begin a step; `all_have`: whether every rank has a batch."""
        ...

    def forward(self, num_samples: int) -> AbstractContextManager[None]:
        """A context for the forward pass over a batch of `num_samples`. In inference mode it is not collective."""
        ...

    def backward(self) -> AbstractContextManager[None]:
        """A context for the backward pass after it."""
        ...

    def follow(self, *, backward: bool) -> None:
        """Take part in a step without a batch; `backward`: whether there is a backward pass."""
        ...


class OwnBatchNorms:
    """Each rank has its own statistics; torch raises for one sample, which has no variance.

    A batch of one sample is normalised by the running statistics, as at inference, and does not change them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def open_step(self, *, all_have: bool) -> None:
        pass

    def forward(self, num_samples: int) -> AbstractContextManager[None]:
        return evaluating(m for m in self._model.modules() if num_samples == 1 and isinstance(m, _BatchNorm))

    def backward(self) -> AbstractContextManager[None]:
        return nullcontext()

    def follow(self, *, backward: bool) -> None:
        pass


def batch_norms(buffers: Literal["rank0", "sync_bn"], model: nn.Module, ranks: Ranks) -> BatchNorms:
    """The layers by `dense.buffers`. One trainer has all samples, so torch's own layers serve it."""
    together = buffers == "sync_bn" and ranks.world > 1
    return SyncBatchNorms(model, ranks) if together else OwnBatchNorms(model)


@contextmanager
def evaluating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """A context with these modules, but not their children, in evaluation mode."""
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
