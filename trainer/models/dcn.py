"""Deep & cross networks: cross layers with one weight vector each (dcn), or with full or low-rank matrices (dcn_v2).

Wang et al., "Deep & Cross Network for Ad Click Predictions" (ADKDD 2017), and "DCN V2: Improved Deep & Cross Network"
(WWW 2021). Beyond the papers, first-order weights are added to the logit where the tables have them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from headrace.trainer.models.contract import Axis, Inputs, Shape, SlotAxes
from headrace.trainer.models.layers import FirstOrder, Heads, Mlp, StackedInput, beside, by_task
from headrace.trainer.models.linear import Linear
from headrace.trainer.models.settings import DcnSettings, DcnV2Settings


class VectorCrossLayer(nn.Module):
    """x0 * (w . x) + b + x (equation 3)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.map = Linear(width, 1, bias=False)
        self.bias_W = nn.Parameter(torch.zeros(width))

    def forward(self, first_BW: Tensor, x_BW: Tensor) -> Tensor:
        """(B, W), (B, W) -> (B, W)."""
        return torch.addcmul(x_BW + self.bias_W, first_BW, self.map(x_BW))


class Dcn(nn.Module):
    """dcn."""

    parameters_in_calls = True

    def __init__(self, shape: Shape, settings: DcnSettings) -> None:
        super().__init__()
        self._stacked, self._tasks = StackedInput(shape), shape.tasks
        width = self._stacked.width
        self.cross = nn.ModuleList([VectorCrossLayer(width) for _ in range(settings.cross_layers)])
        self.deep = Mlp(width, settings.hidden, settings.dropout)
        self.heads = Heads(width + self.deep.width, len(shape.tasks), settings.towers, settings.dropout)
        self.first_order = FirstOrder(shape)

    def slot_axes(self) -> SlotAxes:
        """Which axes of its weights have places for slots."""
        axis, found = self._stacked.axis, dict[str, Sequence[Axis | None]]()
        for number in range(len(self.cross)):
            found |= {f"cross.{number}.map.weight": (None, axis), f"cross.{number}.bias_W": (axis,)}
        first, deep = self.deep.slot_axes("deep", axis)
        return {**found, **first, **self.heads.slot_axes("heads", beside(axis, deep))}

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """Logits by task."""
        first_BW = x_BW = self._stacked(inputs)
        for layer in self.cross:
            x_BW = layer(first_BW, x_BW)
        trunk_BH = torch.cat([x_BW, self.deep(first_BW)], 1)
        return by_task(self.first_order(inputs, self.heads(trunk_BH)), self._tasks)


class MatrixCrossLayer(nn.Module):
    """x0 * (W x + b) + x, with W = U V where a rank is given (equations 1 and 2)."""

    def __init__(self, width: int, low_rank: int | None) -> None:
        super().__init__()
        self.map: nn.Module = (
            Linear(width, width)
            if low_rank is None
            else nn.Sequential(Linear(width, low_rank, bias=False), Linear(low_rank, width))
        )

    def forward(self, first_BW: Tensor, x_BW: Tensor) -> Tensor:
        """(B, W), (B, W) -> (B, W)."""
        return torch.addcmul(x_BW, first_BW, self.map(x_BW))


class DcnV2(nn.Module):
    """dcn_v2."""

    def __init__(self, shape: Shape, settings: DcnV2Settings) -> None:
        super().__init__()
        self._stacked, self._tasks = StackedInput(shape), shape.tasks
        width = self._stacked.width
        self._low_rank = settings.low_rank is not None
        self._parallel = settings.structure == "parallel" and bool(settings.hidden)
        self.cross = nn.ModuleList([MatrixCrossLayer(width, settings.low_rank) for _ in range(settings.cross_layers)])
        self.deep = Mlp(width, settings.hidden, settings.dropout)
        trunk = self.deep.width + (width if self._parallel else 0)
        self.heads = Heads(trunk, len(shape.tasks), settings.towers, settings.dropout)
        self.first_order = FirstOrder(shape)

    def slot_axes(self) -> SlotAxes:
        """Which axes of its weights have places for slots."""
        axis, found = self._stacked.axis, dict[str, Sequence[Axis | None]]()
        for number in range(len(self.cross)):
            name = f"cross.{number}.map"
            if self._low_rank:
                found[f"{name}.0.weight"] = (None, axis)
                found |= {f"{name}.1.weight": (axis, None), f"{name}.1.bias": (axis,)}
            else:
                found |= {f"{name}.weight": (axis, axis), f"{name}.bias": (axis,)}
        first, deep = self.deep.slot_axes("deep", axis)
        trunk = beside(axis, deep) if self._parallel else deep
        return {**found, **first, **self.heads.slot_axes("heads", trunk)}

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """Logits by task."""
        first_BW = x_BW = self._stacked(inputs)
        for layer in self.cross:
            x_BW = layer(first_BW, x_BW)
        trunk_BH = torch.cat([x_BW, self.deep(first_BW)], 1) if self._parallel else self.deep(x_BW)
        return by_task(self.first_order(inputs, self.heads(trunk_BH)), self._tasks)
