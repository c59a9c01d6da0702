"""The step of a rank with one stage of the model (trainer.dense.pipeline), in the place of trainer.train.step.

The first rank has the batch: it pools rows, brings the input of the tower, and gets its logits and the gradient of its
input. The others compute their stages. Passes that are only predicted are the first one's alone, which has the whole
model then.

Shapes: B samples of the batch, M of a micro-batch, T tasks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby, pairwise

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from headrace.pserver.protocol.shards import Floats
from headrace.trainer.collectives.ranks import Ranks
from headrace.trainer.collectives.stage_steps import StagePlan
from headrace.trainer.config import TrainerJob
from headrace.trainer.dense.batch_norms import evaluating
from headrace.trainer.dense.pipeline import PipelineDense, Stage
from headrace.trainer.dense_config import DenseSection, PipelineSection
from headrace.trainer.features.training_batches import TrainingBatch
from headrace.trainer.models.contract import Declared
from headrace.trainer.models.layers import by_task
from headrace.trainer.train.activations import (
    RECOMPUTE,
    SavedActivations,
    Surroundings,
    blocks_of,
    recomputed_parts,
    saved_activations,
)
from headrace.trainer.train.forward_result import ForwardResult
from headrace.trainer.train.step import Stepper


class PipelineStepper(Stepper):
    """`forward` has the backward pass of the model in it."""

    def open_stages(self, model: nn.Module, job: TrainerJob, dense: PipelineDense, ranks: Ranks) -> None:
        """Connect the stages; once, before the first step."""
        tower = Declared.of(model).tower
        assert tower is not None, "the strategy refuses a model without one"
        self._tower, stage = tower(), dense.stage
        self._saved = stage_activations(model, stage, job.dense, self._precision.forward)
        self._surroundings = stage.surroundings = entered(self._precision.forward, self._saved.forward)
        kinds = [task.loss for task in job.tasks]
        self._is_first = stage.number == 0
        tells = self._num_merged > 1 or dense.num_stages < ranks.world
        plan = stage_plan(stage, job.dense.pipeline or PipelineSection(), kinds, lambda: self.scale.value)
        plan = replace(plan, num_told=self._num_merged if tells else 0)
        self._steps = ranks.stages(plan, dense.num_stages)

    def precede(self, ends: Sequence[int], global_weight: Mapping[str, float]) -> None:
        """Tell the other stages the sizes of the micro-batches, where they do not know them."""
        self._steps.tell([end - begin for begin, end in pairwise([0, *ends])])

    def follow(self, global_weight: Mapping[str, float], num_samples: int) -> None:
        """This rank's stage computes the batch of the first one, if that has one."""
        if self._is_first:
            self._steps.tell([])
        else:
            self._steps.follow(num_samples)

    def forward(
        self, batch: TrainingBatch, rows: Mapping[str, Floats], global_weight: Mapping[str, float]
    ) -> ForwardResult:
        """Forward and backward pass of all stages. `loss` has no graph."""
        given = self._given(batch, rows)
        with self._surroundings():
            x_BW, beside_BT = self._tower.enter(given.inputs)
        target_BK = self._target(batch, global_weight)
        logits_BT = self._steps.lead(x_BW, beside_BT.expand(-1, len(self._tasks)), target_BK)
        outputs = by_task(logits_BT, [task.name for task in self._tasks])
        return self._result(batch, given, outputs, global_weight)

    def predict(
        self, batch: TrainingBatch, rows: Mapping[str, Floats], global_weight: Mapping[str, float]
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


def entered(types: Surroundings, saved: Surroundings) -> Surroundings:
    """Makes both contexts."""

    @contextmanager
    def both() -> Iterator[None]:
        with types(), saved():
            yield

    return both


def stage_activations(model: nn.Module, stage: Stage, config: DenseSection, types: Surroundings) -> SavedActivations:
    """As `dense.recompute` says, on this rank. Of a block that is divided over stages, the layers of each stage are a
    sequence of its own. Raises SpecError."""
    cpu = torch.device("cpu")
    if config.recompute is None:
        return SavedActivations({})
    rest, parts, layers = list[str](), list[Callable[[Tensor], Tensor]](), stage.layers
    named = blocks_of(model, config.recompute.blocks, RECOMPUTE)
    inside = dict.fromkeys(model.modules()) | {part: name for name, block in named.items() for part in block.modules()}
    of_layer = [{inside[each] for each in layer.modules() if each in inside} for layer in layers]
    names = [next(iter(each)) if len(each) == 1 else None for each in of_layer]
    for name, run in groupby(zip(names, layers, strict=True), key=lambda pair: pair[0]):
        found = [layer for _, layer in run]
        parts += found if name is None else recomputed_parts(name, found, config.recompute, cpu, types)
    stage.parts = parts
    for name, block in named.items():
        numbers = {stage.numbers.get(id(each), 0) for each in block.parameters()}
        if name not in names and stage.number in numbers:
            rest.append(name)
    left = config.recompute.model_copy(update={"blocks": tuple(rest)})
    return saved_activations(model, config.model_copy(update={"recompute": left}), cpu, types)


def stage_plan(
    stage: Stage, config: PipelineSection, kinds: Sequence[str], scale: Callable[[], float] = lambda: 1.0
) -> StagePlan:
    """The plan of a stage; `kinds`: the loss of each task; `scale`: of the loss that is differentiated."""
    return StagePlan(
        stage=stage,
        width_in=stage.width_in,
        width_out=stage.width_out,
        type_in=stage.type_in,
        type_out=stage.type_out,
        num_tasks=len(kinds),
        num_columns=2 * len(kinds),
        num_told=0,
        num_micro_batches=config.micro_batches,
        eager_backward=config.schedule == "1f1b",
        loss=lambda logits_MT, target_MK: summed_loss(kinds, logits_MT, target_MK) * scale(),
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
