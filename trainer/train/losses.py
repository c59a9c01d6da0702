"""Losses beside those of the tasks: a model's own, and weights of negatives learnt before their label is known.

Shapes: B samples of the batch.
"""

import inspect
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from headrace.dataset.spec.join_section import JoinSection, LearnAt
from headrace.trainer.config import TaskSection
from headrace.trainer.device_copies import sent
from headrace.trainer.features.model_inputs import targets_of
from headrace.trainer.features.training_batches import TrainingBatch
from headrace.trainer.models.contract import Declared, Inputs, Targets


def label_learnt_at_once(join: JoinSection | None) -> str | None:
    """The label whose negatives are learnt before it is known; None if there is none."""
    return join.label if join is not None and join.learn is LearnAt.AT_ONCE else None


def fake_negative_weights(output_B: Tensor, label_B: Tensor) -> Tensor:
    """(B,) the fake negative weights of Ktena et al., "Addressing delayed feedback for continuous training with neural
    networks in CTR prediction" (RecSys 2019).

    Every impression is learnt once as a negative, and a clicked one again as a positive. So of the samples of an
    impression with click probability p, 1 / (1 + p) are negatives and p / (1 + p) positives. Importance sampling back
    to the true shares gives a positive the weight 1 + p, and a negative (1 - p) (1 + p). With the model's own p, which
    no gradient passes, the expected gradient of the log loss is 0 where the model has the true p: its predictions need
    no calibration afterwards. `output_B` are logits.
    """
    p_B = torch.sigmoid(output_B.detach())
    return torch.where(label_B > 0, 1 + p_B, (1 - p_B) * (1 + p_B))


WITH_TARGETS = 3
"""Number of arguments of a `losses` that asks for the targets."""


class OwnLosses:
    """The losses that a model declares: `losses`, `measures`, `for_losses` and `follow`."""

    def __init__(self, model: nn.Module, tasks: Sequence[TaskSection], device: torch.device) -> None:
        declared = Declared.of(model)
        self._losses, self._measures = declared.losses, declared.measures
        asks = self._losses is not None and len(inspect.signature(self._losses).parameters) >= WITH_TARGETS
        self._asks, self._device = asks, device
        self._inner, self._follow, self._tasks = frozenset(declared.for_losses), declared.follow, tasks
        self._first = tasks[0].name if tasks else ""
        self._own: Mapping[str, Tensor] = {}
        """(B,) the losses of the last batch by name, without its weights."""

    def follow(self, global_weight: Mapping[str, float]) -> None:
        """On a rank without a batch: take part in what `losses` does together with other ranks."""
        if self._follow is not None and global_weight[self._first]:
            self._follow()

    def of(
        self,
        outputs: Mapping[str, Tensor],
        inputs: Inputs,
        batch: TrainingBatch,
        global_weight: Mapping[str, float],
        *,
        reads: bool = True,
    ) -> tuple[Tensor | float, dict[str, Tensor]]:
        """The loss of the batch, with sample weights of the first task; and the tensors to measure, by name.

        `reads`: whether these tensors, and those of `of_classes`, are read; if not, they are not computed.
        """
        asks = self._asks or (reads and self._measures is not None)
        targets, self._own = targets_of(batch, self._tasks, self._device) if asks else None, {}
        loss: Tensor | float = 0.0
        if self._losses is not None and global_weight[self._first]:
            more = (targets,) if self._asks else ()
            self._own = self._losses(outputs, inputs, *more)
            loss = self._weighted(self._own, batch, global_weight[self._first])
        if not reads:
            self._own = {}
            return loss, {}
        measured = {name: value for name, value in outputs.items() if name not in self._inner}
        return loss, measured | self._measured(outputs, inputs, targets)

    def of_classes(self, batch: TrainingBatch) -> tuple[Tensor | float, dict[str, Tensor]]:
        """(B,) weighted losses of the last batch in the tasks with loss "softmax", and (B,) predictions of each."""
        prediction_B = dict[str, Tensor]()
        own, self._own = self._own, {}  # nothing holds their graph until the next batch
        total: Tensor | float = 0.0
        for task in self._tasks:
            if task.loss == "softmax":
                lost_B = own.get(task.name, torch.zeros(len(batch.samples), device=self._device)).detach()
                prediction_B[task.name] = torch.exp(-lost_B)
                weight_B = sent(batch.weight_B[task.name], self._device)
                total = total + lost_B * weight_B * task.weight
        return total, prediction_B

    def _weighted(self, losses: Mapping[str, Tensor], batch: TrainingBatch, global_weight: float) -> Tensor | float:
        if not losses:
            return 0.0
        weight_B = sent(batch.weight_B[self._first], self._device) / global_weight
        of_task = {task.name: task.weight for task in self._tasks if task.loss == "softmax"}
        return torch.stack(
            [(value.float() * weight_B).sum() * of_task.get(name, 1.0) for name, value in losses.items()]
        ).sum()

    def _measured(self, outputs: Mapping[str, Tensor], inputs: Inputs, targets: Targets | None) -> dict[str, Tensor]:
        if self._measures is None:
            return {}
        with torch.no_grad():
            return dict(self._measures(outputs, inputs, targets))
