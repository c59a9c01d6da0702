"""Residual units on stacked embeddings.

Shan et al., "Deep Crossing: Web-Scale Modeling without Manually Crafted Combinatorial Features" (KDD 2016). Beyond
the paper, first-order weights are added to the logit where the tables have them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from headrace.trainer.models.contract import Axis, DeepTower, Inputs, Shape, SlotAxes
from headrace.trainer.models.layers import FirstOrder, Heads, StackedInput, by_task
from headrace.trainer.models.linear import Linear
from headrace.trainer.models.settings import DeepCrossingSettings


class ResidualUnit(nn.Module):
    """relu(x + W1 relu(W0 x + b0) + b1) (figure 2)."""

    def __init__(self, width: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.inner, self.outer = Linear(width, inner), Linear(inner, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BW: Tensor) -> Tensor:
        """(B, W) -> (B, W)."""
        return torch.relu(x_BW + self.dropout(self.outer(torch.relu(self.inner(x_BW)))))


class DeepCrossing(nn.Module):
    """Deep Crossing."""

    parameters_in_calls = True

    def __init__(self, shape: Shape, settings: DeepCrossingSettings) -> None:
        super().__init__()
        self._stacked, self._tasks = StackedInput(shape), shape.tasks
        width = self._stacked.width
        self.units = nn.Sequential(*(ResidualUnit(width, inner, settings.dropout) for inner in settings.hidden))
        self.heads = Heads(width, len(shape.tasks), settings.towers, settings.dropout)
        self.first_order = FirstOrder(shape)

    def slot_axes(self) -> SlotAxes:
        """Which axes of its weights have places for slots."""
        axis, found = self._stacked.axis, dict[str, Sequence[Axis | None]]()
        for number in range(len(self.units)):
            name = f"units.{number}"
            found[f"{name}.inner.weight"] = (None, axis)
            found |= {f"{name}.outer.weight": (axis, None), f"{name}.outer.bias": (axis,)}
        return {**found, **self.heads.slot_axes("heads", axis)}

    def tower(self) -> DeepTower:
        """Its blocks, one after another."""
        return DeepTower(self._enter, self._stacked.width, list(self.units), self.heads)

    def _enter(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        stacked_BW = self._stacked(inputs)
        beside_BT = self.first_order(inputs, stacked_BW.new_zeros((len(stacked_BW), len(self._tasks))))
        return stacked_BW, beside_BT

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """Logits by task."""
        logits_BT = self.heads(self.units(self._stacked(inputs)))
        return by_task(self.first_order(inputs, logits_BT), self._tasks)
