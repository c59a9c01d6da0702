"""Deep interest network: each item of a sequence weighs as much as it has to do with the item that is judged.

Zhou et al., "Deep Interest Network for Click-Through Rate Prediction" (KDD 2018). Its activation unit reads the
outer product of both vectors; this one reads their difference and elementwise product, as the paper's later versions
do. Its layers have PReLU: Dice would make a prediction depend on the other samples of a batch. Beyond the paper,
first-order weights are added to the logit where the tables have them.

Shapes: as in trainer.models.layers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from headrace.trainer.models.contract import AxisPart, Inputs, SequenceInput, Shape, SlotAxes
from headrace.trainer.models.layers import Heads, Mlp, StackedInput, Wide, by_task
from headrace.trainer.models.linear import Linear
from headrace.trainer.models.settings import DinSettings, without


class ActivationUnit(nn.Module):
    """The weight of each item of a sequence for a target: a perceptron on the pair."""

    def __init__(self, dim: int, widths: Sequence[int]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width = 4 * dim
        for size in widths:
            layers += [Linear(width, size), nn.PReLU()]
            width = size
        self.net = nn.Sequential(*layers, Linear(width, 1))

    def forward(self, target_BD: Tensor, items_BLD: Tensor) -> Tensor:
        """(B, D), (B, L, D) -> (B, L)."""
        target_BLD = target_BD.unsqueeze(1).expand_as(items_BLD)
        pairs = [items_BLD, target_BLD, target_BLD - items_BLD, target_BLD * items_BLD]
        weights_BL1: Tensor = self.net(torch.cat(pairs, 2))
        return weights_BL1.squeeze(2)


class TargetAttention(nn.Module):
    """The sum of a sequence's vectors, weighted by an activation unit (equation 3); zeros for an empty sequence."""

    def __init__(self, dim: int, widths: Sequence[int], *, softmax: bool) -> None:
        super().__init__()
        self.unit, self._softmax = ActivationUnit(dim, widths), softmax

    def forward(self, target_BD: Tensor, sequence: SequenceInput) -> Tensor:
        """(B, D)."""
        weight_BL, absent_BL = self.unit(target_BD, sequence.vectors_BLD), ~sequence.mask_BL
        if self._softmax:
            lowest = torch.finfo(weight_BL.dtype).min
            weight_BL = torch.softmax(weight_BL.masked_fill(absent_BL, lowest), 1)
        weight_BL = weight_BL.masked_fill(absent_BL, 0.0).to(sequence.vectors_BLD.dtype)
        return torch.bmm(weight_BL.unsqueeze(1), sequence.vectors_BLD).squeeze(1)


class Din(nn.Module):
    """Deep Interest Network."""

    parameters_in_calls = True

    def __init__(self, shape: Shape, settings: DinSettings) -> None:
        super().__init__()
        target, attended = settings.slots(shape)
        self._target, self._tasks = target.name, shape.tasks
        self._attended = {slot.name: slot.dim for slot in attended}
        self._others = StackedInput(without(shape, attended))
        self.attention = nn.ModuleList(
            TargetAttention(slot.dim, settings.attention, softmax=settings.softmax) for slot in attended
        )
        width = self._others.width + sum(slot.dim for slot in attended)
        self.deep = Mlp(width, settings.hidden, settings.dropout)
        self.heads = Heads(self.deep.width, len(shape.tasks), settings.towers, settings.dropout)
        self.wide = Wide(shape)

    def slot_axes(self) -> SlotAxes:
        """An activation unit stays with its sequence and the target."""
        axis, found = list(self._others.axis), dict(self.wide.slot_axes("wide"))
        for number, (name, dim) in enumerate(self._attended.items()):
            both = frozenset({name, self._target})
            axis.append(AxisPart(f"interest {name} of {self._target}", dim, both))
            pairs = AxisPart(f"pairs {name} and {self._target}", 4 * dim, both)
            found[f"attention.{number}.unit.net.0.weight"] = (None, [pairs])
        first, deep = self.deep.slot_axes("deep", axis)
        return {**found, **first, **self.heads.slot_axes("heads", deep)}

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """Logits by task."""
        target_BD = inputs.vectors[self._target]
        interests = [
            attention(target_BD, inputs.sequences[name])
            for attention, name in zip(self.attention, self._attended, strict=True)
        ]
        trunk_BH = self.deep(torch.cat([*self._others.parts(inputs), *interests], 1))
        return by_task(self.heads(trunk_BH) + self.wide(inputs), self._tasks)
