"""The section `dense` of a job spec: how the gradients of all trainers become dense parameters.

`trainer.spec.dense_rules` checks it against the other sections.
"""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from millrace.config import Section
from millrace.renamed_keys import Renamed, RenamedKey
from pserver.config import Beta, NotNegative, Positive

RENAMED_TO_DENSE: Renamed = {
    "train.dense": RenamedKey("dense.strategy", {"allreduce": "all_reduce"}),
    "train.accumulate": RenamedKey("dense.accumulate"),
    "train.dense_optimizer": RenamedKey("dense.optimizer"),
    "train.clip_norm": RenamedKey("dense.clip_norm"),
}
"""Keys of other sections before there was a section `dense`."""


class DenseSgd(Section):
    """torch.optim.SGD."""

    kind: Literal["sgd"]
    """SGD."""
    lr: Positive = 0.01
    """Learning rate."""
    momentum: Beta = 0.0
    """Momentum."""


class DenseAdam(Section):
    """torch.optim.Adam."""

    kind: Literal["adam"] = "adam"
    """Adam."""
    lr: Positive = 0.003
    """Learning rate."""
    beta1: Beta = 0.9
    """Decay of the first moment."""
    beta2: Beta = 0.999
    """Decay of the second moment."""
    epsilon: Positive = 1e-8
    """Added to the root."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay (AdamW)."""


class DenseAdagrad(Section):
    """torch.optim.Adagrad."""

    kind: Literal["adagrad"]
    """Adagrad."""
    lr: Positive = 0.01
    """Learning rate."""
    initial: NotNegative = 0.0
    """Accumulator at the start."""
    epsilon: Positive = 1e-10
    """Added to the root."""


DenseOptimizer = Annotated[DenseSgd | DenseAdam | DenseAdagrad, Field(discriminator="kind")]


NOT_BUILT = ("local_sgd", "sharded")
"""Strategies that are planned."""


def _built(strategy: object) -> object:
    if strategy in NOT_BUILT:
        raise ValueError(f'"{strategy}" is not built yet; there are "all_reduce" and "shards"')
    return strategy


class DenseSection(Section):
    """How the dense parameters learn."""

    strategy: Annotated[Literal["all_reduce", "shards"], BeforeValidator(_built)] = "all_reduce"
    """Place of the dense parameters. "all_reduce": on every trainer; gradients are summed over trainers. "shards": on
    the shards, as rows; trainers push gradients and pull the parameters with the rows of each batch."""
    accumulate: int = Field(default=1, ge=1, le=1024)
    """Number of steps whose dense gradients are averaged for one dense update."""
    optimizer: DenseOptimizer = DenseAdam()
    """Optimizer of the dense parameters."""
    clip_norm: Positive | None = None
    """Largest norm of the dense gradient."""
    slice_floats: int | None = Field(default=None, ge=1000, le=1 << 30)
    """With strategy = "shards": number of parameters in one message, in steps of 1,024. Shards learn the first ones and
    send them back while others are on their way. Unless set, all travel in one message, with the rows of the batch. No
    bit depends on it."""
    priority: Literal["sparse_first", "fifo"] = "sparse_first"
    """With slice_floats: order of the messages. "sparse_first": as the next forward pass needs them, so the rows of the
    batch, then the parameters from the first layer to the last. "fifo": as the backward pass is done with them, so the
    other way round."""

    def _not_on_shards(self) -> str:
        """The settings that need all dense gradients in one place, in words; empty without them."""
        optimizer = self.optimizer
        found = {
            "accumulate above 1": self.accumulate > 1,
            "clip_norm, which needs the gradients of all slices": self.clip_norm is not None,
            "optimizer.momentum": isinstance(optimizer, DenseSgd) and optimizer.momentum > 0,
            "optimizer.weight_decay": isinstance(optimizer, DenseAdam) and optimizer.weight_decay > 0,
        }
        return ", ".join(name for name, there in found.items() if there)

    @model_validator(mode="after")
    def _fits(self) -> "DenseSection":
        if self.strategy == "shards" and (trouble := self._not_on_shards()):
            raise ValueError(f'strategy = "shards" does not work with {trouble}')
        if self.strategy != "shards" and self.slice_floats is not None:
            raise ValueError(f'slice_floats is for strategy = "shards"; "{self.strategy}" has no slices: remove it')
        if self.slice_floats is None and self.priority != "sparse_first":
            raise ValueError("priority is the order of messages of slice_floats floats: set that, too, or remove it")
        return self
