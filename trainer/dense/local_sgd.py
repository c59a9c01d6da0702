"""The dense strategy "local_sgd": each rank learns by itself; ranks average every k steps and before each close.

A rank learns from the mean gradient of its own samples. An average weighs ranks by their shares of the samples since
the last one, so with k = 1 and sgd it is a step of all-reduce, however uneven the batches are. The optimizer's state is
averaged, too. A rank without a batch does not learn in that step.

Sources: Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019; post-local SGD (`begin`): Lin et al., Don't
Use Large Mini-Batches, Use Local SGD, ICLR 2020; momentum is averaged as by Yu, Jin, Yang, ICML 2019.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from headrace.timeline import Span, recorded
from headrace.trainer.collectives.ranks import Ranks
from headrace.trainer.dense.flat_parameters import FlatOptimizer, FlatParameters, clip
from headrace.trainer.dense.strategy import Around, DenseStrategy, Parameters
from headrace.trainer.dense_config import MAX_ADAPTIVE, DenseSection
from headrace.trainer.dense_optimizers import STEP

SCHEDULE = "local_sgd.schedule"
"""Name of the schedule's state in commits."""


class AveragingSchedule:
    """When ranks average: every k steps, where k may follow the loss. Pure; all ranks have the same one."""

    def __init__(self, k_steps: int, begin: int, *, adaptive: bool) -> None:
        """`begin`: steps before the first one that ranks take by themselves."""
        self._first_k, self._begin, self._adaptive = k_steps, begin, adaptive
        self._num_steps, self._k = 0, k_steps
        self._first_loss = self._first_lr = 0.0
        self.since = 0
        """Steps since the last average."""

    @property
    def local(self) -> bool:
        """Whether ranks take the present step by themselves."""
        return self._num_steps >= self._begin

    @property
    def due(self) -> bool:
        """Whether the present step, a local one, ends with an average."""
        return self.since + 1 >= self._k

    def learnt(self) -> None:
        """The present step was taken."""
        self.since += self.local
        self._num_steps += 1

    def averaged(self, loss: float, lr: float) -> None:
        """Ranks have averaged. `loss`: mean loss of the steps since the last average."""
        if not self._first_lr:
            self._first_loss, self._first_lr = loss, lr
        if self._adaptive and self._first_loss and self._first_lr and lr:
            self._k = next_interval(self._first_k, loss / self._first_loss, lr / self._first_lr)
        self.since = 0

    def state(self) -> list[float]:
        """The state that a commit holds, between passes: all numbers are exact in float64."""
        return [self._num_steps, self._k, self._first_loss, self._first_lr]

    def load_state(self, state: list[float]) -> None:
        """The inverse of `state`."""
        self._num_steps, self._k, self.since = int(state[0]), int(state[1]), 0
        self._first_loss, self._first_lr = state[2], state[3]
        if not self._adaptive:
            self._k = self._first_k


def next_interval(first_k: int, loss_ratio: float, lr_ratio: float) -> int:
    """Steps until the next average, 1 to MAX_ADAPTIVE: ceil(first_k * sqrt(loss_ratio / lr_ratio)).

    `loss_ratio` and `lr_ratio`: the loss and the learning rate now, of those at the first average. Source: AdaComm, by
    Wang and Joshi, Adaptive Communication Strategies to Achieve the Best Error-Runtime Trade-off in Local-Update SGD,
    SysML 2019 (arXiv 1810.08313). The bounds are those of Paddle's AdaptiveLocalSGDOptimizer, which has `first_k` under
    the root: for its default, 1, that is the same.
    """
    ratio = loss_ratio / lr_ratio
    if not 0 < ratio < math.inf:
        return first_k
    return min(MAX_ADAPTIVE, max(1, math.ceil(first_k * math.sqrt(ratio))))


class LocalSgdDense(DenseStrategy):
    """A rank learns from its own gradient, and averages when its schedule says so."""

    _flat: FlatParameters
    _optimizer: FlatOptimizer

    def __init__(
        self,
        model: nn.Module,
        config: DenseSection,
        ranks: Ranks,
        more: Parameters | None = None,
        around: Around = Around(),  # noqa: B008 - frozen
    ) -> None:
        super().__init__(model, config, ranks, FlatParameters(model, more))
        assert config.k_steps is not None, "checked with the spec"
        self._schedule = AveragingSchedule(config.k_steps, config.begin, adaptive=config.adaptive)
        self._optimizer = FlatOptimizer(self._flat.weights, config.optimizer, self._flat.segments)
        self._averaged = config.optimizer.vector_names
        """Names of the optimizer's state of the buffer's shape."""
        self._noted = (0.0, 0.0)
        self._share = self._loss = 0.0
        """Sums of what was noted since the last average."""
        self._wait: Callable[[], None] = lambda: None
        self._brought, self._loss_scale = torch.zeros(0), 1.0
        self._anchor, self._steps_before = self._flat.weights.clone(), 0.0
        """The weights of the last average, and the optimizer's count of steps then."""

    def note(self, share: float, loss: float) -> None:
        self._noted = share, loss

    def communicates(self, step: int) -> bool:
        """Steps before `begin` do, and those that end with an average."""
        if self._ranks.world == 1 or not self._grad.numel():
            return False
        return not self._schedule.local or self._schedule.due

    def finite(self) -> bool:
        """The gradient of the rank's own mean is finite, too."""
        share, _ = self._noted
        return self._flat.finite(self._ranks.world / (share or 1.0))

    @recorded(Span.REDUCE)
    def after_backward(self, step: int, loss_scale: float) -> None:
        """A rank learns before it averages."""
        self._loss_scale = loss_scale
        if not self._grad.numel():
            return
        if not self._schedule.local:
            self._wait = self._ranks.all_reduce(self._grad)
            return
        share, loss = self._noted
        if share:
            self._learn(share * loss_scale)
        self._share, self._loss = self._share + share, self._loss + loss
        if self._schedule.due and self._ranks.world > 1:
            self._begin_average(self._schedule.since + 1)

    @recorded(Span.REDUCE)
    def wait(self) -> None:
        self._wait()
        self._wait = lambda: None

    def step(self) -> None:
        if not self._grad.numel():
            return
        local, due = self._schedule.local, self._schedule.due
        self._schedule.learnt()
        if not local:
            self._learn(self._loss_scale)
            self._settle()
        elif due:
            self._end_average()

    def flush(self) -> None:
        """Averages what was learnt since the last average."""
        if self._schedule.since:
            if self._ranks.world > 1:
                self._begin_average(self._schedule.since)
            self.wait()
            self._end_average()

    def _learn(self, scale: float) -> None:
        """Learn from the gradient divided by `scale`."""
        if scale != 1:
            self._grad.div_(scale)
        if self._config.clip_norm is not None:
            clip(self._grad, torch.linalg.vector_norm(self._grad), self._config.clip_norm)
        self._optimizer.step(self._grad)

    def _begin_average(self, num_steps: int) -> None:
        """Begin to sum over ranks what each learnt in so many steps, by its weight; and their weights and losses."""
        weight, none, state = self._share / num_steps, torch.zeros_like(self._grad), self._optimizer.state
        found = [self._flat.weights - self._anchor, *(state.get(name, none) for name in self._averaged)]
        figures = torch.tensor([weight, self._loss / num_steps], device=self._grad.device)
        self._brought = torch.cat([*(each.mul(weight) for each in found), figures])
        self._wait = self._ranks.all_reduce(self._brought)

    def _end_average(self) -> None:
        """Use the sums. A rank that is alone has its own state already."""
        loss = self._loss / self._schedule.since
        if self._ranks.world > 1:
            sums, (weight, loss) = self._brought[:-2], self._brought[-2:].tolist()
            if weight:  # any rank had samples
                self._use(*sums.view(-1, len(self._grad)))
        self._brought, self._share, self._loss = torch.zeros(0), 0.0, 0.0
        self._schedule.averaged(loss, self._optimizer.lr)
        self._settle()

    def _use(self, moved: Tensor, *averages: Tensor) -> None:
        """Use the average of what ranks learnt, and of their optimizers' state."""
        state = self._optimizer.state
        self._flat.weights.copy_(self._anchor.add_(moved))
        state |= {name: value.clone() for name, value in zip(self._averaged, averages, strict=True)}
        if STEP in self._state_names:
            count = state.setdefault(STEP, torch.zeros((), device=moved.device))
            count.fill_(self._steps_before + self._schedule.since)

    def _settle(self) -> None:
        """All ranks hold the same."""
        self._anchor.copy_(self._flat.weights)
        self._steps_before = float(self._optimizer.state.get(STEP, 0.0))

    def tensors(self) -> dict[str, Tensor]:
        """The schedule's state, too."""
        schedule = {SCHEDULE: torch.tensor(self._schedule.state(), dtype=torch.float64)}
        return super().tensors() | (schedule if self._grad.numel() else {})

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """After another strategy the count of steps begins at 0."""
        super().load(tensors)
        if SCHEDULE in tensors:
            self._schedule.load_state(tensors[SCHEDULE].tolist())
        self._settle()
