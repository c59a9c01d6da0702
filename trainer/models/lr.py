"""Logistic regression, or linear regression under loss "mse".

Richardson, Dominowska, Ragno, "Predicting Clicks" (WWW 2007). One weight for each id, one for each dense value, and a
bias; tables with dim = 0 are enough.
"""

from torch import Tensor, nn

from headrace.trainer.models.contract import Inputs, Shape, SlotAxes
from headrace.trainer.models.layers import Wide, by_task
from headrace.trainer.models.settings import LrSettings


class LogisticRegression(nn.Module):
    def __init__(self, shape: Shape, settings: LrSettings) -> None:
        super().__init__()
        self.wide = Wide(shape)
        self._tasks = shape.tasks

    def slot_axes(self) -> SlotAxes:
        """Which axes of its weights have places for slots."""
        return self.wide.slot_axes("wide")

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """Logits by task."""
        return by_task(self.wide(inputs), self._tasks)
