"""The seam of dense strategies: how the gradients of the dense parameters on all ranks become dense parameters.

A strategy belongs to one rank. Every rank calls the collective methods in the same order, with or without a batch, so
a strategy must launch its collectives in a fixed order, whatever order gradients become ready in. What a step is and
when it is skipped is the loop's decision (trainer.train.loop).

`dense_strategy` is the one place where a strategy is chosen.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Protocol

from torch import Tensor, nn

from headrace.errors import SpecError
from headrace.pserver.protocol.shards import F32, Gradients, Keys, Shards
from headrace.trainer.collectives.ranks import Ranks
from headrace.trainer.dense.all_reduce import AllReduceDense
from headrace.trainer.dense.buffers import Buffers
from headrace.trainer.dense.class_slices import ClassSlicesDense
from headrace.trainer.dense.local_sgd import LocalSgdDense
from headrace.trainer.dense.pipeline import PipelineDense
from headrace.trainer.dense.shard_slices import Awaiting, ShardDense
from headrace.trainer.dense.sharded import ShardedDense
from headrace.trainer.dense_config import DenseSection
from headrace.trainer.models.contract import Declared


class DenseStrategy(Protocol):
    """The dense part of one rank: a model's own parameters, others that learn with them, and how they do.

    A step: `clear`; `fills`; backward fills the gradients; `finite`. If that is so on all ranks: `after_backward`
    begins what they do together, `wait` waits for its end, and `step` learns. Rows are exchanged with shards meanwhile.
    The end of a pass: `flush`.
    """

    buffers: Buffers
    """The model's buffers."""
    one_reader: bool
    """Whether rank 0 alone reads events, and the other ranks have no batches."""

    @property
    def slices(self) -> Mapping[str, Keys]:
        """The keys that this strategy keeps on the shards, by table: pulled and pushed with every learnt batch."""
        ...

    def take(self, rows: Mapping[str, F32]) -> None:
        """Use the rows of `slices` among those pulled for a step, before its forward pass."""
        ...

    def push(self) -> dict[str, Gradients]:
        """The gradients of `slices`, after `after_backward`; valid until `clear`. Only on a rank with a batch."""
        ...

    def set_lr(self, lr: float) -> None:
        """Use this learning rate from now on."""
        ...

    def clear(self) -> None:
        """Set the gradients of the step to 0."""
        ...

    def fills(self, loss_scale: float) -> None:
        """The next backward pass completes the gradients of the step, times `loss_scale`. Only on a rank with a batch.

        From here on a strategy may exchange what is complete. Where it does, `finite` is collective, and called on
        every rank; the sums of a step that is skipped are dropped.
        """
        ...

    def note(self, share: float, loss: float) -> None:
        """This rank's part of the samples of the step, 0 to 1, and of its loss; before `finite`, on every rank.

        The parts of all ranks sum to 1, and to the mean loss of the step.
        """
        ...

    def communicates(self, step: int) -> bool:
        """Whether `after_backward` of this step of the pass makes collectives. Every rank gives the same answer."""
        ...

    def after_backward(self, step: int, loss_scale: float) -> None:
        """Collective where `communicates` says so; a rank without a batch then calls it too, with zero gradients.

        `step` will use the gradients without `loss_scale`, by which backward multiplied them. Nothing else may use them
        before `wait`, but for `push`.
        """
        ...

    def wait(self) -> None:
        """Wait for the end of what `after_backward` began."""
        ...

    def finite(self) -> bool:
        """Whether every gradient on this rank is a finite number, and so will be their sum over ranks."""
        ...

    def step(self) -> None:
        """Use the gradients of a step in which all ranks were finite, after `wait`. Not collective."""
        ...

    def flush(self) -> None:
        """Collective, at the end of each pass: nothing is carried over. All ranks then hold the same parameters."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """This rank's weights ("model.<name>"), buffers and state by name: views, not copies."""
        ...

    def consolidate(self) -> dict[str, Tensor]:
        """Collective, between passes, for a version that is committed: on rank 0, all that `load` needs, by name.

        Views or new tensors. Weights have the names that `tensors` gives them. Other ranks may return less.
        """
        ...

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """On every rank: continue from what `consolidate` returned on rank 0, made with any number of ranks.

        State of another optimizer is left out, and starts anew. Raises BadInput for another model.
        """
        ...

    def digest(self) -> str:
        """Hash of all that must be equal on all ranks at a close, in hex."""
        ...


Build = Callable[
    [nn.Module, DenseSection, Ranks, Mapping[str, nn.Parameter] | None, Shards, float, Awaiting, int], DenseStrategy
]


def _on_trainers(
    strategy: Callable[[nn.Module, DenseSection, Ranks, Mapping[str, nn.Parameter] | None], DenseStrategy],
) -> Build:
    """A strategy that needs no shards and no seed."""
    return lambda model, config, ranks, more, _shards, _step_s, _awaiting, _seed: strategy(model, config, ranks, more)


STRATEGIES: Mapping[str, Build] = {
    "all_reduce": lambda model, config, ranks, more, _shards, _step_s, _awaiting, seed: AllReduceDense(
        model, config, ranks, more, seed=seed
    ),
    "local_sgd": _on_trainers(LocalSgdDense),
    "sharded": _on_trainers(ShardedDense),
    "pipeline": _on_trainers(PipelineDense),
    "shards": lambda model, config, ranks, more, shards, step_s, awaiting, _seed: ShardDense(
        model, config, ranks, more, shards, step_s, awaiting
    ),
}
"""By the name that `dense.strategy` has for them."""


def dense_strategy(
    model: nn.Module,
    config: DenseSection,
    ranks: Ranks,
    shards: Shards,
    more: Mapping[str, nn.Parameter] | None = None,
    *,
    step_s: float,
    awaiting: Awaiting = nullcontext,
    seed: int = 0,
) -> DenseStrategy:
    """The strategy of `dense.strategy`. `more`: parameters by name that learn with the model's and are not in its
    module. `step_s`: longest time of a call to the shards. `awaiting`: makes the context of each wait for slices of the
    dense part. `seed`: of the job.

    Raises SpecError for a name that is not known, and for a parameter of `more` that has the name of a model's tensor.
    """
    if config.strategy not in STRATEGIES:
        known = ", ".join(sorted(STRATEGIES))
        raise SpecError(f'there is no strategy "{config.strategy}"; known: {known}', "dense.strategy")
    strategy = STRATEGIES[config.strategy](model, config, ranks, more, shards, step_s, awaiting, seed)
    rows = Declared.of(model).class_rows
    return strategy if rows is None else ClassSlicesDense(strategy, rows, config, ranks)
