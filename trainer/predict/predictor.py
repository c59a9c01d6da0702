"""Predicts with the model of a commit, in inference mode, and returns any of its tensors by name.

A name means, in this order: a task (its prediction), another tensor that the model returns, "slot.<name>" (the pooled
vector of a slot), or a module by its path in torch's `named_modules` (its output).

Shapes: P samples of a padded batch, U unique keys of a table, D floats of a row.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from headrace.dataset.samples.batch import F32, Samples
from headrace.dataset.spec.schema import Schema
from headrace.errors import BadInput, SpecError
from headrace.pserver.protocol.shards import Floats
from headrace.trainer.collectives.ranks import SingleRank
from headrace.trainer.config import TaskSection, TrainerJob
from headrace.trainer.dense.all_reduce import AllReduceDense
from headrace.trainer.features.default_rows import DefaultRows, widths_of
from headrace.trainer.features.model_inputs import class_targets, inputs_of
from headrace.trainer.features.pooling import KernelPooling
from headrace.trainer.models.calibration import Calibration
from headrace.trainer.models.contract import Declared, Inputs
from headrace.trainer.models.module_checks import check_outputs
from headrace.trainer.predict.fixed_batches import FixedBatch, FixedBatches, filled_up, no_samples
from headrace.trainer.predict.metric_inputs import targets_of
from headrace.trainer.train.commit_state import DENSE
from headrace.trainer.train.model_building import build_model
from headrace.validation import nearest

SLOT = "slot."
"""Prefix of a slot's name for its pooled vector."""


@dataclass(frozen=True, slots=True)
class BatchOutputs:
    """Outputs of the model for a batch, (n, ...) each, without the padding."""

    prediction_B: Mapping[str, F32]
    """By task: probability (bce) or value (mse)."""
    tensors: Mapping[str, NDArray[Any]]
    """Requested outputs that are not predictions."""
    measured: Mapping[str, F32]
    """All tensors that the model returned beside its tasks, those that it measures of its classes, and "loss", the loss
    of each sample."""
    right_B: Mapping[str, F32]
    """By task with loss "softmax": the probability of the right class, which is what metrics judge."""


class Predictor:
    """The model, on one thread and on the CPU, so that rounding does not depend on the machine's load."""

    def __init__(self, job: TrainerJob, schema: Schema, folder: Path, outputs: Sequence[str]) -> None:
        """Build the model with initial weights; `load` loads those of a commit. Raises SpecError."""
        self._schema, self._tasks, self._weight = schema, job.tasks, job.sample.weight
        self._device = torch.device("cpu")
        self._model = build_model(job, schema, folder, self._device)
        self._default_rows = DefaultRows(widths_of(schema, job.tables), self._device)
        self._dense = AllReduceDense(self._model, job.dense, SingleRank(), self._default_rows.parameters)
        self._model.eval()
        self._declared, self._calibration = Declared.of(self._model), Calibration.of(self._model)
        self._pooling = KernelPooling(1)
        tasks = [task.name for task in job.tasks]
        self._outputs = [name for name in outputs if name not in tasks]

    def load(self, commit: Path) -> None:
        """Load the weights of a commit. Raises BadInput where they are of another model."""
        try:
            self._dense.load(load_file(commit / DENSE))
        except (OSError, SafetensorError) as error:
            raise BadInput(f"{commit / DENSE}: cannot be read: {error}") from error

    def predict(self, batch: FixedBatch, rows: Mapping[str, Floats]) -> BatchOutputs:
        """The outputs for a batch, given the (U, D) rows of its keys. Raises SpecError."""
        modules = [name for name in self._outputs if name in self._modules]
        inputs = self._inputs(batch, rows)
        with torch.no_grad(), self._listening(modules) as heard:
            returned = check_outputs(self._model(inputs), [t.name for t in self._tasks], len(batch.samples))
            lost_P, of_classes = self._classes(returned, inputs, batch)
        given = dict(returned)
        logits = {task.name: given.pop(task.name).float() for task in self._tasks}
        tensors = {name: self._named(name, given, inputs, heard) for name in self._outputs}
        measured = {name: value.float().numpy() for name, value in given.items()}
        measured |= {name: value.float().numpy() for name, value in of_classes.items()}
        measured["loss"] = self._losses(logits, lost_P, batch.samples)
        n, size = batch.num_samples, len(batch.samples)
        return BatchOutputs(
            {task.name: self._predicted(task, logits[task.name])[:n] for task in self._tasks},
            {name: value[:n] for name, value in tensors.items()},
            {name: value[:n] if value.shape[:1] == (size,) else value for name, value in measured.items()},
            {name: torch.exp(-lost).numpy()[:n] for name, lost in lost_P.items()},
        )

    def _classes(
        self, returned: Mapping[str, Tensor], inputs: Inputs, batch: FixedBatch
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Of tasks with loss "softmax": (P,) losses of the right class by task; and the tensors that the model
        measures."""
        chosen = [task.name for task in self._tasks if task.loss == "softmax"]
        if not chosen or self._declared.losses is None:
            return {}, {}
        samples = batch.samples
        label_P, weight_P = targets_of(samples, self._tasks, self._weight)
        is_sample_P = np.arange(len(samples)) < batch.num_samples
        weight_P = {name: np.where(is_sample_P, weight, np.float32(0)) for name, weight in weight_P.items()}
        if not any(weight_P[name].any() for name in chosen):
            return {name: torch.zeros(len(samples)) for name in chosen}, {}
        targets = class_targets(samples, self._tasks, label_P, weight_P)
        losses = self._declared.losses(dict(returned), inputs, targets)
        measures = self._declared.measures
        return (
            {name: losses[name].float() for name in chosen},
            {} if measures is None else dict(measures(dict(returned), inputs, targets)),
        )

    def _losses(self, logits: Mapping[str, Tensor], lost_P: Mapping[str, Tensor], samples: Samples) -> F32:
        """(P,) losses, as in trainer.train.step."""
        label_P, weight_P = targets_of(samples, self._tasks, self._weight)
        total_P = torch.zeros(len(samples))
        for task in self._tasks:
            label, weight = torch.from_numpy(label_P[task.name]), torch.from_numpy(weight_P[task.name])
            if task.loss == "softmax":
                loss_P = lost_P.get(task.name, torch.zeros(len(samples))) * weight
            elif task.loss == "bce":
                loss_P = functional.binary_cross_entropy_with_logits(logits[task.name], label, weight, reduction="none")
            else:
                loss_P = functional.mse_loss(logits[task.name], label, reduction="none") * weight
            total_P = total_P + loss_P * task.weight
        found: F32 = total_P.numpy()
        return found

    def _predicted(self, task: TaskSection, logit_P: Tensor) -> F32:
        """(P,) probabilities or values."""
        is_bce = task.loss == "bce"
        value: F32 = (torch.sigmoid(self._calibration(task.name, logit_P)) if is_bce else logit_P).numpy()
        return value

    def try_out(self, batches: FixedBatches, size: int) -> dict[str, NDArray[Any]]:
        """Values of one empty batch for each requested output that is not a prediction: they show type and shape.

        Raises SpecError for an unknown name, with the known ones.
        """
        (batch,) = batches.block(filled_up(no_samples(self._schema), size)).batches
        rows = {look.table.name: np.zeros((0, look.table.width), np.float32) for look in batch.lookups}
        inputs = self._inputs(batch, rows)
        with torch.no_grad(), self._listening(list(self._modules)) as heard:
            given = dict(check_outputs(self._model(inputs), [t.name for t in self._tasks], size))
        tasks = {task.name for task in self._tasks}
        known = [name for name, value in given.items() if _by_sample(value, size)]
        known += [f"{SLOT}{name}" for name in inputs.vectors]
        known += [name for name, value in heard.items() if _by_sample(value, size) and name not in known]
        for name in self._outputs:
            if name not in known:
                there = dict.fromkeys((*tasks, *known))
                raise SpecError(f"the model has no tensor {name!r}; {nearest(name, there)}", "outputs")
        returned = {name: value for name, value in given.items() if name not in tasks}
        return {name: self._named(name, returned, inputs, heard) for name in self._outputs}

    @property
    def _modules(self) -> dict[str, nn.Module]:
        return {name: module for name, module in self._model.named_modules() if name}

    def _inputs(self, batch: FixedBatch, rows: Mapping[str, Floats]) -> Inputs:
        filled, _ = self._default_rows.filled(rows)
        leaves = {
            look.table.name: self._pooling.cells(look, filled[look.table.name]).detach() for look in batch.lookups
        }
        return inputs_of(self._schema, batch.samples, batch.lookups, leaves, self._device)

    @contextmanager
    def _listening(self, names: Sequence[str]) -> Iterator[dict[str, object]]:
        """The outputs of modules while the context lasts, by name; the last one of a module called more than once."""
        heard: dict[str, object] = {}
        modules = self._modules
        handles = [
            modules[name].register_forward_hook(lambda _module, _args, output, name=name: heard.update({name: output}))
            for name in names
        ]
        try:
            yield heard
        finally:
            for handle in handles:
                handle.remove()

    def _named(
        self, name: str, returned: Mapping[str, Tensor], inputs: Inputs, heard: Mapping[str, object]
    ) -> NDArray[Any]:
        """(P, ...) values of an output."""
        slot = name.removeprefix(SLOT)
        value: object = returned.get(name)
        if value is None:
            value = inputs.vectors[slot] if slot != name and slot in inputs.vectors else heard.get(name)
        if not isinstance(value, Tensor) or not _by_sample(value, inputs.num_samples):
            raise SpecError(f"{name!r} returned no value per sample, although it did for the empty batch", "outputs")
        array: NDArray[Any] = (value.float() if value.is_floating_point() else value).contiguous().numpy()
        return array


def _by_sample(value: object, num_samples: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == num_samples
