"""The dense part and the counters of a commit, for a job whose slots have changed since.

A job with a changed job file continues from a commit of the version at which the old spec ended, so this is a pure
function of that commit and of the present spec: whatever is killed, the next start makes the same state again.
trainer.models.carried_weights decides which weights are kept. Rows are kept by the numbers of slot groups
(dataset.spec.slot_groups).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headrace.config import validate
from headrace.dataset.spec.schema import Schema
from headrace.errors import BadInput
from headrace.trainer.config import TrainerJob
from headrace.trainer.dense.flat_dense import PREFIX
from headrace.trainer.dense.flat_optimizer import STEP, initial_state
from headrace.trainer.dense.flat_parameters import begins_of
from headrace.trainer.dense.rank_tensors import PREFIXES
from headrace.trainer.features.default_rows import PREFIX as DEFAULT_ROW
from headrace.trainer.features.default_rows import widths_of
from headrace.trainer.models.carried_weights import Axes, CarriedWeight, Sizes, carried_weights
from headrace.trainer.models.contract import Shape
from headrace.trainer.models.needs import shape_of
from headrace.trainer.spec.defaults import fill_defaults
from headrace.trainer.train.model_building import build_model

MODEL = "model."
"""Before the names of weights in commits."""


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """The weights of one model, learnt default rows included."""

    sizes: Mapping[str, Sizes]
    """The shapes of weights and buffers, by name."""
    axes: Axes
    begins: Mapping[str, int]
    """Where each parameter begins in the flat buffer."""
    length: int
    """Floats of the flat buffer."""

    @classmethod
    def of(cls, job: TrainerJob, model: nn.Module) -> "ModelWeights":
        """The weights of the job's model."""
        rows = {DEFAULT_ROW + name: (size,) for name, size in widths_of(Schema.of(job.slots), job.tables).items()}
        sizes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        learnt = [name for name, each in model.named_parameters() if each.requires_grad]
        counts = [sizes[name] for name in learnt] + list(rows.values())
        begins, length = begins_of([int(np.prod(shape)) for shape in counts])
        axes = getattr(model, "slot_axes", None)
        return cls(sizes | rows, axes, dict(zip((*learnt, *rows), begins, strict=True)), length)


class CarriedState:
    """See module docstring. Nothing changes where the slots are those of the commit."""

    def __init__(self, job: TrainerJob, schema: Schema, model: nn.Module, folder: Path) -> None:
        """`model` is that of `job`; `folder`: where a user's model is imported from."""
        self._job, self._schema, self._model, self._folder = job, schema, model, folder

    def tensors(
        self, saved: Mapping[str, Tensor], spec: Mapping[str, Any], initial: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The dense tensors of a commit with `spec`, for the present slots; `initial`: those of a new job, by name.

        Raises NotCarried, and BadInput for state of another layout.
        """
        then = _job_of(spec)
        if not inputs_differ(then, self._job):
            return dict(saved)
        old, new = weights_of(then, self._folder), ModelWeights.of(self._job, self._model)
        plan = carried_between(then, old, self._job, new)
        found = {name: value for name, value in saved.items() if not name.startswith(MODEL)}
        for each in plan:
            name = MODEL + each.name
            if each.old is None:
                found[name] = initial[name].detach().cpu().clone()
            elif each.new is not None and name in saved:
                fill = 0.0 if each.name in new.begins else initial[name].detach().cpu().numpy()
                found[name] = torch.from_numpy(each.apply(saved[name].numpy(), fill))
        for name in (name for name in saved if _is_flat(name)):
            start = initial_state(self._job.dense.optimizer, name.removeprefix(PREFIX))
            found[name] = torch.from_numpy(_flat(saved[name].numpy(), old, new, plan, start))
        return found

    def counters(self, saved: Mapping[str, NDArray[Any]], spec: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        """The counters by slot, (slots, ...) each, for the present slots; those of a new slot are 0."""
        names = [slot.name for slot in self._schema.slots]
        before = {slot.name: row for row, slot in enumerate(Schema.of(_job_of(spec).slots).slots)}
        if names == list(before):
            return dict(saved)
        found = {}
        for key, array in saved.items():
            found[key] = np.zeros((len(names), *array.shape[1:]), array.dtype)
            for row, name in enumerate(names):
                if name in before:
                    found[key][row] = array[before[name]]
        return found


def inputs_differ(old: TrainerJob, new: TrainerJob) -> bool:
    """Whether the model of `new` has other inputs than that of `old`, or has them in another order."""
    return _inputs(_shape_of(old)) != _inputs(_shape_of(new))


def carried_between(
    old: TrainerJob, old_weights: ModelWeights, new: TrainerJob, weights: ModelWeights
) -> list[CarriedWeight]:
    """The weights of both models, in the order of the old one. Raises NotCarried."""
    before, after = (set().union(*_inputs(_shape_of(job))) for job in (old, new))
    changed = {name for name, _ in after - before}, {name for name, _ in before - after}
    return carried_weights((old_weights.sizes, old_weights.axes), (weights.sizes, weights.axes), *changed)


def weights_of(job: TrainerJob, folder: Path) -> ModelWeights:
    """The weights of a job's model, which is built for this. The state of random numbers stays as it is."""
    with torch.random.fork_rng(devices=[]):
        return ModelWeights.of(job, build_model(job, Schema.of(job.slots), folder, torch.device("cpu")))


def _job_of(spec: Mapping[str, Any]) -> TrainerJob:
    return validate(TrainerJob, fill_defaults(spec), only_known=True)


def _shape_of(job: TrainerJob) -> Shape:
    return shape_of(Schema.of(job.slots), job.tables, [task.name for task in job.tasks])


def _inputs(shape: Shape) -> tuple[tuple[tuple[str, int], ...], ...]:
    """Names and sizes of the inputs of a model, by kind, in order."""
    pooled, sequences = (tuple((s.name, s.dim) for s in slots) for slots in (shape.pooled, shape.sequences))
    return pooled, sequences, shape.dense


def _is_flat(name: str) -> bool:
    """Whether a tensor of a commit has a value for each float of the flat buffer."""
    return name.startswith(PREFIXES) or (name.startswith(PREFIX) and name != PREFIX + STEP)


def _flat(
    saved: NDArray[Any], old: ModelWeights, new: ModelWeights, plan: list[CarriedWeight], start: float
) -> NDArray[Any]:
    """The state of a flat buffer for other weights; that of new weights is `start`. Raises BadInput."""
    if len(saved) != old.length:
        raise BadInput(f"the commit's optimizer has {len(saved)} values, not {old.length}; start over with --fresh")
    made = np.full(new.length, start, saved.dtype)
    for each in plan:
        if each.old is not None and each.new is not None and each.name in old.begins and each.name in new.begins:
            begin, count = old.begins[each.name], int(np.prod(each.old))
            value = each.apply(saved[begin : begin + count].reshape(each.old), start)
            made[new.begins[each.name] : new.begins[each.name] + value.size] = value.reshape(-1)
    return made
