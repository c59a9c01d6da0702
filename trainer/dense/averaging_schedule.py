"""When ranks that learn by themselves average: every k steps, where k may follow the loss. Pure."""

import math

from headrace.trainer.dense_config import MAX_ADAPTIVE


class AveragingSchedule:
    """Counts the steps of a job. All ranks have the same one."""

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
