"""The torch module of the model."""

from torch import Tensor, nn

from headrace import Inputs, Linear, Shape
from headrace.trainer.models.layers import StackedInput, by_task
from outside_kinds.model import ScaledSettings


class Scaled(nn.Module):
    def __init__(self, shape: Shape, settings: ScaledSettings) -> None:
        super().__init__()
        self._stacked, self._tasks, self._scale = StackedInput(shape), shape.tasks, settings.scale
        self.last = Linear(self._stacked.width, len(shape.tasks))

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """Logits by task."""
        return by_task(self._scale * self.last(self._stacked(inputs)), self._tasks)
