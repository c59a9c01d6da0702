"""Factorization machine of second order.

Rendle, "Factorization Machines" (ICDM 2010). Pairs of sparse slots interact by their vectors; dense values
enter only the linear part.
"""

from torch import Tensor, nn

from headrace.trainer.models.contract import Inputs, Shape, SlotAxes
from headrace.trainer.models.layers import Fields, TaskScale, Wide, by_task, pairwise_sum
from headrace.trainer.models.settings import FmSettings


class FactorizationMachine(nn.Module):
    def __init__(self, shape: Shape, settings: FmSettings) -> None:
        super().__init__()
        self._fields, self._tasks = Fields(shape), shape.tasks
        self.wide = Wide(shape)
        self.pairs = TaskScale(len(shape.tasks))

    def slot_axes(self) -> SlotAxes:
        """Which axes of its weights have places for slots."""
        return self.wide.slot_axes("wide")

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """Logits by task."""
        return by_task(self.wide(inputs) + self.pairs(pairwise_sum(self._fields(inputs))), self._tasks)
