"""The seam of sums: how the flat gradients of all ranks become one in a step of "all_reduce"."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from headrace.trainer.dense.rank_tensors import RankTensors


class GradientSums(Protocol):
    """A step: `clear`, `fills`, backward, `finite`, then `begin`, `wait` and `result`, or the step is skipped."""

    checks: bool
    """Whether `finite` is to be asked of these sums, as they change the gradient before it is summed."""

    @property
    def of_ranks(self) -> RankTensors | None:
        """State that each rank has for itself."""
        ...

    def clear(self) -> None:
        """Begin a step. Sums of a skipped step may still be under way."""
        ...

    def fills(self, loss_scale: float) -> None:
        """The next backward pass completes the gradient, times `loss_scale`."""
        ...

    def finite(self) -> bool:
        """Whether the gradient can be summed over ranks. May be collective; changes no state."""
        ...

    def begin(self, loss_scale: float) -> None:
        """Collective: begin the sums that are not begun."""
        ...

    def wait(self) -> None:
        """Wait for all sums that were begun."""
        ...

    def result(self) -> None:
        """The step counts, after `wait`: the gradient is the sum over ranks, and the state that after the step."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """State that all ranks hold alike, by the names in commits."""
        ...

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from the state in the tensors of a commit, made with any number of ranks."""
        ...
