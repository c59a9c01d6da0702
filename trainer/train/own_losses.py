"""The losses and measures that a model adds to those of its tasks.

Shapes: B samples of the batch.
"""

import inspect
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from trainer.config import TaskSection
from trainer.features.model_inputs import targets_of
from trainer.features.training_batches import TrainingBatch
from trainer.models.contract import Inputs, Targets

WITH_TARGETS = 3
"""Number of arguments of a `losses` that asks for the targets."""


class OwnLosses:
    """`losses`, `measures` and `for_losses` of a model, as trainer.models.contract has them."""

    def __init__(self, model: nn.Module, tasks: Sequence[TaskSection], device: torch.device) -> None:
        self._losses, self._measures = getattr(model, "losses", None), getattr(model, "measures", None)
        asks = self._losses is not None and len(inspect.signature(self._losses).parameters) >= WITH_TARGETS
        self._asks, self._device = asks, device
        self._inner = frozenset(getattr(model, "for_losses", ()))
        self._first = tasks[0].name if tasks else ""

    def of(
        self, outputs: Mapping[str, Tensor], inputs: Inputs, batch: TrainingBatch, global_weight: Mapping[str, float]
    ) -> tuple[Tensor | float, dict[str, Tensor]]:
        """The loss of the batch, weighted as the first task; and the tensors to measure, by name."""
        targets = targets_of(batch, self._device) if self._asks or self._measures is not None else None
        loss: Tensor | float = 0.0
        if self._losses is not None and global_weight[self._first]:
            more = (targets,) if self._asks else ()
            loss = self._weighted(self._losses(outputs, inputs, *more), batch, global_weight[self._first])
        measured = {name: value for name, value in outputs.items() if name not in self._inner}
        return loss, measured | self._measured(outputs, inputs, targets)

    def _weighted(self, losses: Mapping[str, Tensor], batch: TrainingBatch, global_weight: float) -> Tensor | float:
        if not losses:
            return 0.0
        weight_B = torch.from_numpy(batch.weight_B[self._first]).to(self._device) / global_weight
        return torch.stack([(value.float() * weight_B).sum() for value in losses.values()]).sum()

    def _measured(self, outputs: Mapping[str, Tensor], inputs: Inputs, targets: Targets | None) -> dict[str, Tensor]:
        if self._measures is None:
            return {}
        with torch.no_grad():
            return dict(self._measures(outputs, inputs, targets))
