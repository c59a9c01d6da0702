"""The step of a rank with one stage of the model (trainer.dense.pipeline), in the place of trainer.train.step.

Rank 0 has the batch: it pools rows, brings the input of the tower, and gets its logits and the gradient of its input.
The others compute their stages. Passes that are only predicted are rank 0's alone, which has the whole model then.

Shapes: B samples of the batch, M of a micro-batch, T tasks.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from headrace.dataset.samples.batch import F32
from headrace.trainer.collectives.ranks import Ranks
from headrace.trainer.collectives.stage_steps import StagePlan
from headrace.trainer.config import TrainerJob
from headrace.trainer.dense.batch_norms import evaluating
from headrace.trainer.dense.pipeline import PipelineDense, Stage
from headrace.trainer.dense_config import PipelineSection
from headrace.trainer.features.training_batches import TrainingBatch
from headrace.trainer.models.contract import Declared
from headrace.trainer.models.layers import by_task
from headrace.trainer.train.step import ForwardResult, Stepper


class PipelineStepper(Stepper):
    """`forward` has the backward pass of the model in it."""

    def open_stages(self, model: nn.Module, job: TrainerJob, dense: PipelineDense, ranks: Ranks) -> None:
        """Connect the stages; once, before the first step."""
        tower = Declared.of(model).tower
        assert tower is not None, "the strategy refuses a model without one"
        self._tower = tower()
        kinds = [task.loss for task in job.tasks]
        self._steps = ranks.stages(stage_plan(dense.stage, job.dense.pipeline or PipelineSection(), kinds))

    def follow(self, global_weight: Mapping[str, float], num_samples: int) -> None:
        """This rank's stage computes the batch of rank 0."""
        self._steps.follow(num_samples)

    def forward(
        self, batch: TrainingBatch, rows: Mapping[str, F32], global_weight: Mapping[str, float]
    ) -> ForwardResult:
        """Forward and backward pass of all stages. `loss` has no graph."""
        given = self._given(batch, rows)
        x_BW, beside_BT = self._tower.enter(given.inputs)
        target_BK = self._target(batch, global_weight)
        logits_BT = self._steps.lead(x_BW, beside_BT.expand(-1, len(self._tasks)), target_BK)
        outputs = by_task(logits_BT, [task.name for task in self._tasks])
        return self._result(batch, given, outputs, global_weight)

    def predict(
        self, batch: TrainingBatch, rows: Mapping[str, F32], global_weight: Mapping[str, float]
    ) -> ForwardResult:
        """By the whole model."""
        with torch.no_grad(), evaluating(self._model.modules()):
            return super().forward(batch, rows, global_weight)

    def _target(self, batch: TrainingBatch, global_weight: Mapping[str, float]) -> Tensor:
        """(B, 2T): labels, then weights, which hold the divisor of the step's loss; a task without weight has zeros."""
        labels = [torch.from_numpy(batch.label_B[task.name]) for task in self._tasks]
        weights = [
            torch.from_numpy(batch.weight_B[task.name])
            * (task.weight / global_weight[task.name] if global_weight[task.name] else 0.0)
            for task in self._tasks
        ]
        return torch.stack([*labels, *weights], 1).float()

    def _differentiate(self, forward: ForwardResult) -> None:
        """`forward` has done it."""


def stage_plan(stage: Stage, config: PipelineSection, kinds: Sequence[str]) -> StagePlan:
    """The plan of a stage; `kinds`: the loss of each task."""
    return StagePlan(
        stage=stage,
        width_in=stage.width_in,
        width_out=stage.width_out,
        num_tasks=len(kinds),
        num_columns=2 * len(kinds),
        num_micro_batches=config.micro_batches,
        eager_backward=config.schedule == "1f1b",
        loss=lambda logits_MT, target_MK: summed_loss(kinds, logits_MT, target_MK),
    )


def summed_loss(kinds: Sequence[str], logits_MT: Tensor, target_MK: Tensor) -> Tensor:
    """The loss of a micro-batch; `kinds`: of each task."""
    label_MT, weight_MT = torch.split(target_MK, len(kinds), 1)
    losses = [
        functional.binary_cross_entropy_with_logits(logits_MT[:, at], label_MT[:, at], reduction="none")
        if kind == "bce"
        else functional.mse_loss(logits_MT[:, at], label_MT[:, at], reduction="none")
        for at, kind in enumerate(kinds)
    ]
    loss: Tensor = (torch.stack(losses, 1) * weight_MT).sum()
    return loss
