"""A linear model and a perceptron on embeddings, trained as one.

Cheng et al., "Wide & Deep Learning for Recommender Systems" (DLRS 2016). The wide part is the tables' first-order
weights (none where first_order = false) and the dense values; crossed features are slots that the pipe makes.
"""

from torch import Tensor, nn

from headrace.trainer.models.contract import DeepTower, Inputs, Shape, SlotAxes
from headrace.trainer.models.layers import Heads, Mlp, StackedInput, Wide, by_task
from headrace.trainer.models.settings import WideDeepSettings


class WideDeep(nn.Module):
    parameters_in_calls = True

    def __init__(self, shape: Shape, settings: WideDeepSettings) -> None:
        super().__init__()
        self._stacked, self._tasks = StackedInput(shape), shape.tasks
        self.deep = Mlp(self._stacked.width, settings.hidden, settings.dropout, self._stacked.part_widths)
        self.heads = Heads(self.deep.width, len(shape.tasks), settings.towers, settings.dropout)
        self.wide = Wide(shape)

    def slot_axes(self) -> SlotAxes:
        """Which axes of its weights have places for slots."""
        first, axis = self.deep.slot_axes("deep", self._stacked.axis)
        return {**first, **self.heads.slot_axes("heads", axis), **self.wide.slot_axes("wide")}

    def tower(self) -> DeepTower:
        """Its blocks, one after another."""
        return DeepTower(self._enter, self._stacked.width, self.deep.blocks(), self.heads)

    def _enter(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        return self._stacked(inputs), self.wide(inputs)

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """Logits by task."""
        return by_task(self.heads(self.deep.over(self._stacked.parts(inputs))) + self.wide(inputs), self._tasks)
