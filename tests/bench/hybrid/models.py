"""The Wide & Deep of the PS-Hybrid paper: its perceptron sees the dense values only."""

import torch
from torch import Tensor, nn

from headrace.trainer.models.contract import Inputs, Shape
from headrace.trainer.models.layers import Heads, Mlp, StackedInput, by_task

HIDDEN = (1024, 1024, 1024)


class WideDeep(nn.Module):
    """13 -> 1024 -> 1024 -> 1024, and one linear map over that and the embeddings: 2.11 M parameters."""

    parameters_in_calls = True

    def __init__(self, shape: Shape, _settings: dict[str, object]) -> None:
        super().__init__()
        self._stacked, self._tasks = StackedInput(shape), shape.tasks
        self.deep = Mlp(shape.dense_size, HIDDEN, 0.0)
        self.heads = Heads(self._stacked.width - shape.dense_size + self.deep.width, len(shape.tasks))

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """Logits by task."""
        *embedded, dense_BC = self._stacked.parts(inputs)
        return by_task(self.heads(torch.cat([*embedded, self.deep(dense_BC)], 1)), self._tasks)
