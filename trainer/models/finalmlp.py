"""Two perceptrons whose outputs are multiplied with each other; gates choose what each of them reads.

Mao et al., "FinalMLP: An Enhanced Two-Stream MLP Model for CTR Prediction" (AAAI 2023). Beyond the paper, first-order
weights are added to the logit where the tables have them.

Shapes: as in trainer.models.layers; K outputs of one perceptron for one head.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from headrace.trainer.models.carried_weights import NotCarried
from headrace.trainer.models.contract import Axis, Inputs, Shape, SlotAxes
from headrace.trainer.models.layers import ChosenInput, FirstOrder, Heads, Mlp, StackedInput, by_task
from headrace.trainer.models.linear import Linear
from headrace.trainer.models.settings import FinalMlpSettings, width_of


class Gates(nn.Module):
    """A factor between 0 and 2 for each input, 1 at first (section 3.2): from some slots, or alike for all samples."""

    def __init__(self, whole: Shape, context: Shape, hidden: Sequence[int], width: int) -> None:
        super().__init__()
        self._context = ChosenInput(whole, context) if width_of(context) else None
        if self._context is None:
            self.gate_W = nn.Parameter(torch.zeros(width))
        else:
            deep = Mlp(self._context.width, hidden)
            last = Linear(deep.width, width)
            nn.init.zeros_(last.bias)
            self.net = nn.Sequential(deep, last)

    def slot_axes(self, name: str, axis: Axis) -> SlotAxes:
        """`axis` of what it gates. `name` of this module."""
        if self._context is None:
            return {f"{name}.gate_W": (axis,)}
        deep = self.net[0]
        assert isinstance(deep, Mlp)
        first, after = deep.slot_axes(f"{name}.net.0", self._context.axis)
        return {**first, f"{name}.net.1.weight": (axis, after), f"{name}.net.1.bias": (axis,)}

    def forward(self, x_BW: Tensor, inputs: Inputs) -> Tensor:
        """(B, W) -> (B, W)."""
        gate = self.gate_W if self._context is None else self.net(self._context(inputs))
        return 2 * torch.sigmoid(gate) * x_BW


class BilinearFusion(nn.Module):
    """x W y for each task: the sum over heads, each of which has a part of both vectors (equation 9)."""

    def __init__(self, widths: tuple[int, int], num_heads: int, num_tasks: int) -> None:
        super().__init__()
        first, second = (width // num_heads for width in widths)
        self._num_heads, self._num_tasks = num_heads, num_tasks
        self.maps = nn.ModuleList(Linear(first, num_tasks * second, bias=False) for _ in range(num_heads))

    def forward(self, x_BH: Tensor, y_BH: Tensor) -> Tensor:
        """(B, T)."""
        parts = zip(self.maps, x_BH.chunk(self._num_heads, 1), y_BH.chunk(self._num_heads, 1), strict=True)
        terms = []
        for bilinear, x_BK, y_BK in parts:
            for mapped_BK in bilinear(x_BK).chunk(self._num_tasks, 1):
                terms.append((mapped_BK * y_BK).sum(1, keepdim=True))
        by_head = [torch.cat(terms[n : n + self._num_tasks], 1) for n in range(0, len(terms), self._num_tasks)]
        return torch.stack(by_head, 0).sum(0)


class FinalMlp(nn.Module):
    """FinalMLP: two towers and their bilinear fusion."""

    parameters_in_calls = True

    def __init__(self, shape: Shape, settings: FinalMlpSettings) -> None:
        super().__init__()
        self._stacked, self._tasks = StackedInput(shape), shape.tasks
        width, num_tasks = self._stacked.width, len(shape.tasks)
        contexts = settings.contexts(shape)
        self.gates = nn.ModuleList(
            Gates(shape, context, settings.gate_hidden, width) for context in (contexts if settings.gates else ())
        )
        self.first = Mlp(width, settings.hidden, settings.dropout)
        self.second = Mlp(width, settings.second_hidden, settings.dropout)
        self.first_head, self.second_head = Heads(self.first.width, num_tasks), Heads(self.second.width, num_tasks)
        self.fusion = BilinearFusion((self.first.width, self.second.width), settings.bilinear_heads, num_tasks)
        self.first_order = FirstOrder(shape)

    def slot_axes(self) -> SlotAxes:
        """Without hidden layers the halves of a head's product are no places of slots."""
        axis = self._stacked.axis
        first, one = self.first.slot_axes("first", axis)
        second, other = self.second.slot_axes("second", axis)
        if not first or not second:
            raise NotCarried("finalmlp without hidden layers multiplies the slots themselves")
        found = {**first, **second, **self.first_head.slot_axes("first_head", one)}
        found |= self.second_head.slot_axes("second_head", other)
        for number, gate in enumerate(self.gates):
            assert isinstance(gate, Gates)
            found |= gate.slot_axes(f"gates.{number}", axis)
        return found

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """Logits by task."""
        x_BW = self._stacked(inputs)
        one_BW, other_BW = [gate(x_BW, inputs) for gate in self.gates] or (x_BW, x_BW)
        one_BH, other_BH = self.first(one_BW), self.second(other_BW)
        logits_BT = self.first_head(one_BH) + self.second_head(other_BH) + self.fusion(one_BH, other_BH)
        return by_task(self.first_order(inputs, logits_BT), self._tasks)
