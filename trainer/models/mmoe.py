"""Multi-gate mixture of experts: each task mixes perceptrons that all tasks share by a gate of its own.

Ma et al., "Modeling Task Relationships in Multi-task Learning with Multi-gate Mixture-of-Experts" (KDD 2018). Beyond
the paper, first-order weights and dense values are added to the logits, as in wide_deep.

Shapes: as in trainer.models.layers; E experts.
"""

import torch
from torch import Tensor, nn

from headrace.trainer.models.contract import Axis, Inputs, Shape, SlotAxes
from headrace.trainer.models.layers import Heads, Mlp, StackedInput, Wide, by_task
from headrace.trainer.models.linear import Linear
from headrace.trainer.models.settings import MmoeSettings


class Mmoe(nn.Module):
    parameters_in_calls = True

    def __init__(self, shape: Shape, settings: MmoeSettings) -> None:
        super().__init__()
        self._stacked, self._tasks = StackedInput(shape), shape.tasks
        width, each_task = self._stacked.width, range(len(shape.tasks))
        self.experts = nn.ModuleList(Mlp(width, settings.hidden, settings.dropout) for _ in range(settings.experts))
        out = settings.hidden[-1] if settings.hidden else width
        self.gates = nn.ModuleList(Linear(width, settings.experts) for _ in each_task)
        self.towers = nn.ModuleList(Heads(out, 1, settings.towers, settings.dropout) for _ in each_task)
        self.wide = Wide(shape)

    def slot_axes(self) -> SlotAxes:
        """Which axes of its weights have places for slots."""
        axis, found = self._stacked.axis, dict(self.wide.slot_axes("wide"))
        out: Axis = axis
        for number, expert in enumerate(self.experts):
            assert isinstance(expert, Mlp)
            first, out = expert.slot_axes(f"experts.{number}", axis)
            found |= first
        for number, tower in enumerate(self.towers):
            assert isinstance(tower, Heads)
            found[f"gates.{number}.weight"] = (None, axis)
            found |= tower.slot_axes(f"towers.{number}", out)
        return found

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """Logits by task."""
        x_BW = self._stacked(inputs)
        outputs_BEH = torch.stack([expert(x_BW) for expert in self.experts], 1)
        logits = []
        for gate, tower in zip(self.gates, self.towers, strict=True):
            share_BE = torch.softmax(gate(x_BW), 1).to(outputs_BEH.dtype)
            logits.append(tower(torch.bmm(share_BE.unsqueeze(1), outputs_BEH).squeeze(1)))
        return by_task(torch.cat(logits, 1) + self.wide(inputs), self._tasks)
