"""The seam of dense strategies: how the gradients of the dense parameters on all ranks become dense parameters.

A strategy belongs to one rank. Every rank calls the collective methods in the same order, with or without a batch, so
a strategy must launch its collectives in a fixed order, whatever order gradients become ready in. What a step is and
when it is skipped is the loop's decision (trainer.train.loop). Which strategies there are, and what they refuse, is in
trainer.dense_config.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor, nn

from headrace.pserver.protocol.shards import Floats, Gradients, Keys, Shards
from headrace.trainer.collectives.ranks import Ranks
from headrace.trainer.dense.batch_norms import Buffers
from headrace.trainer.dense.flat_parameters import FlatOptimizer, NamedTensors, digest_of
from headrace.trainer.dense_config import DenseSection
from headrace.trainer.dense_optimizers import check_no_decay
from headrace.trainer.device_copies import DeviceCopies
from headrace.trainer.models.contract import Declared

PREFIX = "optimizer."
"""Before the names of an optimizer's state in commits."""

Parameters = Mapping[str, nn.Parameter]
"""By name."""
Awaiting = Callable[[], AbstractContextManager[None]]
"""Makes a context."""


@dataclass(frozen=True)
class Around:
    """The surroundings of a strategy in its job."""

    shards: Shards | None = None
    step_s: float = 0.0
    """Longest time of a call to the shards."""
    awaiting: Awaiting = nullcontext
    """Makes the context of each wait for slices of the dense part."""
    seed: int = 0
    """Of the job."""
    forwards: int = 1
    """Forward passes for each batch that is learnt."""
    types: Awaiting = nullcontext
    """Makes the context of each forward pass: the types in which operations compute (`train.amp`)."""
    in_step: bool = True
    """Whether trainers take each step together (pserver.consistency.policy)."""


class DenseStrategy:
    """The dense part of one rank: a model's own parameters, others that learn with them, and how they do.

    A step: `clear`; `fills`; backward fills the gradients; `finite`. If that is so on all ranks: `after_backward`
    begins what they do together, `wait` waits for its end, and `step` learns. Rows are exchanged with shards meanwhile.
    The end of a pass: `flush`.

    A subclass is built as `Class(model, config, ranks, more, around)`, and says how gradients are summed
    (`after_backward`, `wait`) and learnt (`step`). The other methods have defaults: of a strategy whose parameters and
    optimizer are whole on every rank.
    """

    gathers = False
    """Whether rank 0 lacks parts of the model, which `gather` brings."""
    _optimizer: FlatOptimizer | None = None

    def __init__(self, model: nn.Module, config: DenseSection, ranks: Ranks, flat: NamedTensors) -> None:
        """`flat`: the parameters that this rank learns."""
        check_no_decay(config.optimizer, [*(name for name, _ in model.named_parameters()), *flat.more])
        self._flat, self._grad, self._config, self._ranks = flat, flat.gradient, config, ranks
        self._state_names = config.optimizer.state_names
        """Names of the optimizer's state, which `load` continues."""
        self.buffers = Buffers(model, ranks)
        """The model's buffers."""

    @property
    def num_stages(self) -> int:
        """Number of neighbouring ranks that share a model: the first of each group has the batches of all."""
        return self._config.num_stages(self._ranks.world)

    @property
    def slices(self) -> Mapping[str, Keys]:
        """The keys that this strategy keeps on the shards, by table: pulled and pushed with every learnt batch."""
        return {}

    def take(self, rows: Mapping[str, Floats]) -> None:
        """Use the rows of `slices` among those pulled for a step, before its forward pass."""

    def push(self) -> dict[str, Gradients]:
        """The gradients of `slices`, after `after_backward`; valid until `clear`. Only on a rank with a batch."""
        return {}

    def set_lr(self, lr: float) -> None:
        """Use this learning rate from now on."""
        if self._optimizer is not None:
            self._optimizer.lr = lr

    def clear(self) -> None:
        """Set the gradients of the step to 0."""
        self._flat.clear()

    def fills(self, loss_scale: float) -> None:
        """The next backward pass completes the gradients of the step, times `loss_scale`. Only on a rank with a batch.

        From here on a strategy may exchange what is complete. Where it does, `finite` is collective, and called on
        every rank; the sums of a step that is skipped are dropped.
        """

    def predicting(self) -> AbstractContextManager[None]:
        """Around the forward passes of a step that is only predicted, on every rank; collective where weights are
        divided."""
        return nullcontext()

    def note(self, share: float, loss: float) -> None:
        """This rank's part of the samples of the step, 0 to 1, and of its loss; before `finite`, on every rank.

        The parts of all ranks sum to 1, and to the mean loss of the step.
        """

    def communicates(self, step: int) -> bool:
        """Whether `after_backward` of this step of the pass makes collectives. Every rank gives the same answer."""
        return self._grad.numel() > 0

    def after_backward(self, step: int, loss_scale: float) -> None:
        """Collective where `communicates` says so; a rank without a batch then calls it too, with zero gradients.

        `step` will use the gradients without `loss_scale`, by which backward multiplied them. Nothing else may use them
        before `wait`, but for `push`.
        """

    def wait(self) -> None:
        """Wait for the end of what `after_backward` began."""

    def look(self, copies: DeviceCopies) -> None:
        """After backward, on a rank with a batch: `finite` may read of the gradient with what else comes to the host.
        Not collective."""

    def finite(self) -> bool:
        """Whether every gradient on this rank is a finite number, and so will be their sum over ranks."""
        return self._flat.finite(self._ranks.world)

    def step(self) -> None:
        """Use the gradients of a step in which all ranks were finite, after `wait`. Not collective."""

    def flush(self) -> None:
        """Collective, at the end of each pass: nothing is carried over. All ranks then hold the same parameters."""

    def tensors(self) -> dict[str, Tensor]:
        """This rank's weights ("model.<name>"), buffers and state by name: views, not copies."""
        found = self._flat.tensors()
        if self._optimizer is not None and self._grad.numel():
            for name, value in sorted(self._optimizer.state.items()):
                found[PREFIX + name] = torch.as_tensor(value)
        return found

    def gather(self) -> None:
        """Collective, between passes: rank 0 gets the weights that it lacks, until the next step."""

    def published(self) -> Mapping[str, Tensor] | None:
        """Rank 0: as `tensors`, with the weights of all ranks; None where they are to be gathered first."""
        return self.tensors()

    def consolidate(self) -> dict[str, Tensor]:
        """Collective, between passes, for a version that is committed: on rank 0, all that `load` needs, by name.

        Views or new tensors. Weights have the names that `tensors` gives them. Other ranks may return less.
        """
        return self.tensors()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """On every rank: continue from what `consolidate` returned on rank 0, made with any number of ranks.

        State of another optimizer is left out, and starts anew. Raises BadInput for another model.
        """
        self._flat.load(tensors)
        state = state_in(tensors)
        if self._optimizer is not None and self._grad.numel() and state.keys() == self._state_names:
            self._optimizer.state = {name: value.to(self._grad.device).clone() for name, value in state.items()}

    def digest(self) -> str:
        """Hash of all that must be equal on all ranks at a close, in hex."""
        return digest_of(self.tensors())


def dense_strategy(
    model: nn.Module,
    config: DenseSection,
    ranks: Ranks,
    more: Parameters | None = None,
    around: Around = Around(),  # noqa: B008 - frozen
) -> DenseStrategy:
    """The strategy of `dense.strategy`. `more`: parameters that learn with the model's and are not in its module.

    Raises SpecError for a strategy that is not known, and for a parameter of `more` that has the name of a model's
    tensor.
    """
    module, _, name = config.kind.class_of(config).partition(":")
    strategy: type[DenseStrategy] = getattr(import_module(module), name)
    if Declared.of(model).class_rows is not None:
        from headrace.trainer.dense.class_slices import with_classes

        strategy = with_classes(strategy)
    return strategy(model, config, ranks, more, around)  # type: ignore[call-arg, arg-type]  # see DenseStrategy


def state_in(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The optimizer's state in the tensors of a commit."""
    return {name.removeprefix(PREFIX): value for name, value in tensors.items() if name.startswith(PREFIX)}
