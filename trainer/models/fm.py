"""Linear models and factorization machines: lr, fm, and deepfm, a factorization machine with a perceptron."""

from torch import Tensor, nn

from headrace.trainer.models.contract import DeepTower, Inputs, Shape, SlotAxes
from headrace.trainer.models.layers import Fields, Heads, Mlp, StackedInput, TaskScale, Wide, by_task, pairwise_sum
from headrace.trainer.models.settings import DeepFmSettings, FmSettings, LrSettings


class LogisticRegression(nn.Module):
    """Logistic regression, or linear regression under loss "mse".

    Richardson, Dominowska, Ragno, "Predicting Clicks" (WWW 2007). One weight for each id, one for each dense value, and
    a bias; tables with dim = 0 are enough.
    """

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


class FactorizationMachine(nn.Module):
    """Factorization machine of second order.

    Rendle, "Factorization Machines" (ICDM 2010). Pairs of sparse slots interact by their vectors; dense values enter
    only the linear part.
    """

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


class DeepFm(nn.Module):
    """A factorization machine and a perceptron on the same vectors.

    Guo et al., "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction" (IJCAI 2017).
    """

    parameters_in_calls = True

    def __init__(self, shape: Shape, settings: DeepFmSettings) -> None:
        super().__init__()
        self._fields, self._stacked, self._tasks = Fields(shape), StackedInput(shape), shape.tasks
        self.deep = Mlp(self._stacked.width, settings.hidden, settings.dropout, self._stacked.part_widths)
        self.heads = Heads(self.deep.width, len(shape.tasks), settings.towers, settings.dropout)
        self.wide = Wide(shape)
        self.pairs = TaskScale(len(shape.tasks))

    def slot_axes(self) -> SlotAxes:
        """Which axes of its weights have places for slots."""
        first, axis = self.deep.slot_axes("deep", self._stacked.axis)
        return {**first, **self.heads.slot_axes("heads", axis), **self.wide.slot_axes("wide")}

    def tower(self) -> DeepTower:
        """Its blocks, one after another."""
        return DeepTower(self._enter, self._stacked.width, self.deep.blocks(), self.heads)

    def _enter(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        pairs_BT = self.pairs(pairwise_sum(self._fields(inputs)))
        return self._stacked(inputs), self.wide(inputs) + pairs_BT

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """Logits by task."""
        pairs_BT = self.pairs(pairwise_sum(self._fields(inputs)))
        return by_task(
            self.heads(self.deep.over(self._stacked.parts(inputs))) + self.wide(inputs) + pairs_BT, self._tasks
        )
