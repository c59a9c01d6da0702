"""One step of one rank: forward pass, values to measure, backward pass. trainer.train.loop passes the results on.

Shapes: B samples of the batch; those of rows as in trainer.features.lookup_kernels.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from numpy.typing import NDArray
from torch import Tensor, nn

from headrace.dataset.spec.schema import Schema
from headrace.pserver.protocol.shards import Floats, Gradients
from headrace.trainer.config import TaskSection, TrainSection
from headrace.trainer.dense.batch_norms import BatchNorms, OwnBatchNorms, evaluating
from headrace.trainer.dense_config import DenseSection
from headrace.trainer.device_copies import DeviceCopies, Later
from headrace.trainer.features.default_rows import DefaultRows
from headrace.trainer.features.model_inputs import inputs_of
from headrace.trainer.features.pooling import Pooling, RowSums
from headrace.trainer.features.training_batches import TrainingBatch
from headrace.trainer.models.calibration import Calibration
from headrace.trainer.models.module_checks import check_outputs
from headrace.trainer.retrieval_config import USER_VECTOR
from headrace.trainer.train.activations import saved_activations
from headrace.trainer.train.forward_result import CalibratedTask, ForwardResult, GivenBatch
from headrace.trainer.train.in_batch import InBatchLearning
from headrace.trainer.train.kernel_choice import KernelSchedule
from headrace.trainer.train.losses import OwnLosses, fake_negative_weights
from headrace.trainer.train.mixed_precision import LossScale, Precision


@dataclass(frozen=True, slots=True)
class StepFacts:
    """Facts about a step that all ranks know before it begins, in one message with how the step before went."""

    weight: Mapping[str, float]
    """Weight of the step's samples over all ranks, by task."""
    num_samples: int
    num_batches: int
    """Number of ranks with a batch."""
    num_bad: int
    """Number of ranks on which a loss or gradient of the step before is not finite."""
    sums: Sequence[float] = ()
    """`Calibration.take_sums` of the step before, over all ranks."""

    @property
    def more(self) -> bool:
        """Whether any rank has a batch."""
        return self.num_batches > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """The settings of a job that its steps follow."""

    schema: Schema
    tasks: Sequence[TaskSection]
    train: TrainSection
    dense: DenseSection = DenseSection()
    """`recompute` and `offload` of it say how the activations of blocks wait for the backward pass."""
    measures_apart: bool = False
    """Whether samples are measured in a forward pass of their own, in inference mode."""
    at_once: str | None = None
    """The label whose negatives are learnt before it is known (trainer.train.losses)."""


class Stepper:
    """Runs batches through the model."""

    def __init__(
        self,
        model: nn.Module,
        settings: StepSettings,
        pooling: Pooling,
        device: torch.device,
        *,
        default_rows: DefaultRows | None = None,
        kernels: KernelSchedule | None = None,
        norms: BatchNorms | None = None,
        copies: DeviceCopies | None = None,
    ) -> None:
        self.copies = copies or DeviceCopies(device)
        """Between host and device."""
        self._kernels, tasks, train = kernels or KernelSchedule(), settings.tasks, settings.train
        self._model, self._schema, self._tasks = model, settings.schema, tasks
        self._default_rows = default_rows or DefaultRows({}, device)
        self._pooling, self._device = pooling, device
        self._own_losses = OwnLosses(model, tasks, device)
        self.calibration = Calibration.of(model)
        self._norms, self._measures_apart = norms or OwnBatchNorms(model), settings.measures_apart
        self._precision = Precision(train, device)
        self._saved = saved_activations(model, settings.dense, device, self._precision.forward)
        self.scale = LossScale(train.amp == "float16", train.loss_scale)
        self._losses, self._at_once = list[Later](), settings.at_once
        self._num_merged = settings.dense.accumulate
        self._in_batch = InBatchLearning(model, tasks, self.copies, settings.at_once)

    def open_pass(self, number: int) -> None:
        """Have the model follow the table of kernels of this pass."""
        self._kernels.use(self._model, number)

    def open_step(self, *, all_have: bool, num_samples: int) -> None:
        """Begin a step, on every rank; `all_have`: whether each has a batch; `num_samples`: of all ranks."""
        self._in_batch.num_samples = num_samples
        self.calibration.look(self.copies)
        self._norms.open_step(all_have=all_have)

    def follow(self, global_weight: Mapping[str, float], num_samples: int) -> None:
        """On a rank without a batch: take part in what the model of other ranks does together, on `num_samples`."""
        self._norms.follow(backward=any(global_weight.values()))
        self.precede((), global_weight)

    def precede(self, ends: Sequence[int], global_weight: Mapping[str, float]) -> None:
        """Before the micro-batches of a rank, which have these ends: take part in the losses of others that may have
        more of them. So every rank makes the collectives of a loss `dense.accumulate` times a step.
        """
        for _ in range(len(ends), self._num_merged):
            self._own_losses.follow(global_weight)

    def forward(
        self, batch: TrainingBatch, rows: Mapping[str, Floats], global_weight: Mapping[str, float]
    ) -> ForwardResult:
        """Predictions and this rank's share of the step's loss. `global_weight`: weight over all ranks, by task."""
        given = self._given(batch, rows)
        with self._precision.forward(), self._norms.forward(len(batch.samples)), self._saved.forward():
            outputs = check_outputs(self._model(given.inputs), [task.name for task in self._tasks], len(batch.samples))
        return self._result(batch, given, outputs, global_weight)

    def _given(self, batch: TrainingBatch, rows: Mapping[str, Floats]) -> GivenBatch:
        rows, readers = self._default_rows.filled(rows)
        leaves = {look.table.name: self._pooling.cells(look, rows[look.table.name]) for look in batch.lookups}
        inputs = inputs_of(self._schema, batch.samples, batch.lookups, leaves, self._device)
        return GivenBatch(inputs, leaves, readers, rows)

    def _result(
        self, batch: TrainingBatch, given: GivenBatch, found: Mapping[str, Tensor], global_weight: Mapping[str, float]
    ) -> ForwardResult:
        """Loss and predictions from what the model returned."""
        outputs = self._in_batch.corrected(batch, given.rows, found, global_weight)
        user_BV = outputs.get(USER_VECTOR)
        loss = torch.zeros((), device=self._device)
        sample_loss = torch.zeros(len(batch.samples), device=self._device)
        predictions, calibrated = dict[str, Tensor](), dict[str, tuple[Tensor, Tensor]]()
        reads = not (self._measures_apart and torch.is_grad_enabled())  # else the host reads those of `measured`
        for task in self._tasks:
            output = outputs.pop(task.name).float()
            if task.loss == "softmax":
                continue
            label, plain_weight = (self.copies.there(each[task.name]) for each in (batch.label_B, batch.weight_B))
            at_once = task.label == self._at_once
            weight = plain_weight * fake_negative_weights(output, label) if at_once else plain_weight
            if task.loss == "bce":
                loss_B = functional.binary_cross_entropy_with_logits(output, label, weight, reduction="none")
            else:
                loss_B = functional.mse_loss(output, label, reduction="none") * weight
            if global_weight[task.name]:
                loss = loss + loss_B.sum() * (task.weight / global_weight[task.name])
            if not reads:
                continue
            sample_loss = sample_loss + loss_B.detach() * task.weight
            logit = self.calibration(task.name, output.detach())
            predictions[task.name] = torch.sigmoid(logit) if task.loss == "bce" else output.detach()
            if task.name in self.calibration.tasks:
                if at_once:
                    plain_weight = plain_weight * fake_negative_weights(logit, label)
                calibrated[task.name] = output.detach().contiguous(), plain_weight
        own_loss, measured = self._own_losses.of(outputs, given.inputs, batch, global_weight, reads=reads)
        loss = loss + own_loss
        has_weight = any(global_weight.values())
        result = ForwardResult(loss=loss, leaves=given.leaves, readers=given.readers, has_weight=has_weight)
        if not reads:
            return result
        of_classes, prediction_B = self._own_losses.of_classes(batch)
        measured["loss"] = sample_loss + of_classes
        later = self.copies.later
        result.predictions = {name: later(value) for name, value in (predictions | prediction_B).items()}
        result.measured = {name: later(value.detach().float()) for name, value in measured.items()}
        result.calibrated = {
            name: CalibratedTask(later(logit), later(weight), batch.label_B[name])
            for name, (logit, weight) in calibrated.items()
        }
        result.users = None if user_BV is None else later(user_BV.detach().float())
        return result

    def predict(
        self, batch: TrainingBatch, rows: Mapping[str, Floats], global_weight: Mapping[str, float]
    ) -> ForwardResult:
        """As `forward`, with the model in inference mode (no dropout) and without autograd."""
        with torch.no_grad(), evaluating(self._model.modules()):
            found = self.forward(batch, rows, global_weight)
        found.leaves = {}
        return found

    def measured(
        self, batch: TrainingBatch, rows: Mapping[str, Floats], global_weight: Mapping[str, float]
    ) -> ForwardResult | None:
        """The predictions to measure, before `forward`; None if they are those of `forward`."""
        return self.predict(batch, rows, global_weight) if self._measures_apart else None

    def send_ahead(self, following: Callable[[], TrainingBatch | None]) -> None:
        """Begin to send what the device needs of the next batch, beside the present step. Of a batch of several
        micro-batches nothing goes ahead: each has arrays of its own."""
        if self._device.type == "cpu":
            return
        found, batch = list[NDArray[Any]](), following()
        if batch is not None and len(batch.ends) == 1:
            for look in batch.lookups:
                found += self._pooling.arrays(look)
            for task in self._tasks:
                found += () if task.loss == "softmax" else (batch.label_B[task.name], batch.weight_B[task.name])
        self.copies.ahead(found)

    def take_loss(self) -> float:
        """This rank's part of the loss of the batches learnt from since the last call."""
        loss, losses, self._losses = 0.0, self._losses, []
        for each in losses:
            loss += float(each.array)
        return loss

    def backward(self, batch: TrainingBatch, forward: ForwardResult, sums: RowSums) -> None:
        """Add the gradients of a micro-batch to `sums`. Autograd adds the dense gradients.

        In a step without weight all gradients are 0 on every rank; shows and clicks still count. The cells and all else
        that the pass needed may go: a step holds them of one micro-batch at a time.
        """
        self._losses.append(self.copies.later(forward.loss))
        if forward.has_weight:
            self._differentiate(forward)
        forward.loss = forward.loss.detach()
        sums.flags.append(self.copies.later(torch.isfinite(forward.loss)))
        sums.readers = forward.readers
        sums.add(batch, forward.leaves, self._pooling)
        forward.leaves = {}

    def _differentiate(self, forward: ForwardResult) -> None:
        with self._norms.backward():
            (forward.loss * self.scale.value).backward()  # type: ignore[no-untyped-call]

    def gradients(self, batch: TrainingBatch, sums: RowSums) -> dict[str, Gradients]:
        """Gradients by table of a batch, from the sums over its micro-batches. Default rows get theirs."""
        return sums.gradients(batch, self._default_rows, self.scale.value)
