"""Entire space multi-task model: learns conversions from all samples that were shown, not from clicked ones alone.

Ma et al., "Entire Space Multi-Task Model: An Effective Approach for Estimating Post-Click Conversion Rate" (SIGIR
2018). The first task is the click, the second one "clicked and converted"; its probability is the product of the first
one's and of the rate of conversion after a click, which has a perceptron of its own and no label. Both perceptrons read
the same vectors. Beyond the paper, first-order weights and dense values are added to both logits, as in wide_deep.

Shapes: as in trainer.models.layers.
"""

import torch
from torch import Tensor, nn

from headrace.trainer.models.contract import Inputs, Shape, SlotAxes
from headrace.trainer.models.layers import Mlp, StackedInput, Wide, by_task, tower_axes
from headrace.trainer.models.linear import Linear
from headrace.trainer.models.settings import EsmmSettings


def product_logit(one_B: Tensor, other_B: Tensor) -> Tensor:
    """The logit of the product of two probabilities, from their logits a and b: (B,), (B,) -> (B,).

    For p = 1 / ((1 + e^-a)(1 + e^-b)), (1 - p) / p = e^-a + e^-b + e^-(a + b).
    """
    return -torch.logsumexp(torch.stack([-one_B, -other_B, -one_B - other_B], 1), 1)


class Esmm(nn.Module):
    parameters_in_calls = True
    sums_first_order = False

    def __init__(self, shape: Shape, settings: EsmmSettings) -> None:
        super().__init__()
        self._stacked, self._tasks = StackedInput(shape), shape.tasks
        self.towers = nn.ModuleList()
        for _ in shape.tasks:
            deep = Mlp(self._stacked.width, settings.hidden, settings.dropout)
            self.towers.append(nn.Sequential(deep, Linear(deep.width, 1)))
        self.wide = Wide(shape)

    def slot_axes(self) -> SlotAxes:
        """Which axes of its weights have places for slots."""
        found = dict(self.wide.slot_axes("wide"))
        for number, tower in enumerate(self.towers):
            assert isinstance(tower, nn.Sequential)
            found |= tower_axes(f"towers.{number}", tower, self._stacked.axis)
        return found

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """Logits by task."""
        x_BW = self._stacked(inputs)
        logits_BT = torch.cat([tower(x_BW) for tower in self.towers], 1) + self.wide(inputs)
        click_B, conversion_B = logits_BT.float().unbind(1)
        return by_task(torch.stack([click_B, product_logit(click_B, conversion_B)], 1), self._tasks)
