"""Rank 0's part of a commit: dense tensors, metrics, counters and positions; captured in a pause, written after it.

Shards save rows themselves. A trainer that loads this state continues bit for bit.

A job with a changed job file continues from a commit of the version at which the old spec ended. What it carries over
is a pure function of that commit and of the present spec: whatever is killed, the next start makes the same state
again. trainer.models.carried_weights decides which weights are kept. Rows are kept by the numbers of slot groups
(dataset.spec.slot_groups).
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file as load_tensors
from safetensors.torch import save_file as save_tensors
from torch import Tensor, nn

from headrace.codec import NotUnderstood, plain, typed
from headrace.config import validate
from headrace.dataset.spec.schema import Schema
from headrace.deadline import Deadline
from headrace.errors import BadInput, HeadraceError
from headrace.failpoints import Failpoint, failpoint
from headrace.pserver.commit.commit_files import PartObjects
from headrace.pserver.protocol.shards import Shards
from headrace.pserver.server.commands import RestoreCommit
from headrace.relative_names import InvalidName, path_below
from headrace.trainer.checkpoint.commits import NAME, Commit, CommitDamaged, CommitManifest, read_commit
from headrace.trainer.collectives.ranks import Ranks, on_rank_0
from headrace.trainer.config import TrainerJob
from headrace.trainer.dense.flat_parameters import begins_of
from headrace.trainer.dense.rank_tensors import PREFIXES
from headrace.trainer.dense.strategy import PREFIX, DenseStrategy
from headrace.trainer.dense_optimizers import STEP
from headrace.trainer.features.default_rows import PREFIX as DEFAULT_ROW
from headrace.trainer.features.default_rows import widths_of
from headrace.trainer.metrics.meter import MeterState
from headrace.trainer.models.carried_weights import Axes, CarriedWeight, Sizes, carried_weights
from headrace.trainer.models.contract import Declared, Shape
from headrace.trainer.rank0.closes import CloseDuties
from headrace.trainer.rank0.recovery import RestartPoint
from headrace.trainer.rank0.resizing import Standby
from headrace.trainer.spec.defaults import fill_defaults
from headrace.trainer.status.progress import TrainerProgress
from headrace.trainer.train.learning_rate import LearningRate
from headrace.trainer.train.mixed_precision import LossScale
from headrace.trainer.train.model_building import build_model
from headrace.trainer.train.observer import Observer

DENSE, ARRAYS = "dense.safetensors", "metrics.safetensors"


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
        axes = Declared.of(model).slot_axes
        return cls(sizes | rows, axes, dict(zip((*learnt, *rows), begins, strict=True)), length)


class CarriedState:
    """The dense part and the counters of a commit, for a job whose slots have changed since; else all stays."""

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
            start = self._job.dense.optimizer.start(name.removeprefix(PREFIX))
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
    return Shape.of(Schema.of(job.slots), job.tables, [task.name for task in job.tasks])


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


@dataclass(frozen=True, slots=True)
class SavedState:
    """Copies of the state of one version."""

    version: int
    log_from: int
    """First log record that a replay from this commit needs."""
    positions: Mapping[str, int]
    dense: Mapping[str, Tensor]
    arrays: Mapping[str, NDArray[Any]]
    state: Mapping[str, Any]
    """JSON-able data."""

    def write(self, folder: Path, *, sync: bool = True) -> list[str]:
        """Write and `sync` rank 0's files of a commit; returns their names. Raises HeadraceError and OSError."""
        arrays = {name: np.ascontiguousarray(array) for name, array in self.arrays.items()}
        try:
            save_tensors(dict(self.dense), folder / DENSE)
            save_arrays(arrays, folder / ARRAYS)
        except SafetensorError as error:  # also raised for errors of the disk
            raise HeadraceError(f"{folder}: {error}") from error
        for name in (DENSE, ARRAYS) if sync else ():
            with (folder / name).open("rb") as file:
                os.fsync(file.fileno())
        return [DENSE, ARRAYS]


@dataclass(frozen=True)
class StateHolders:
    """The parts of a trainer with state in commits."""

    dense: DenseStrategy
    observer: Observer
    closes: CloseDuties
    progress: TrainerProgress
    scale: LossScale
    rate: LearningRate
    carried: CarriedState

    def capture(self, log_from: int, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> SavedState:
        """Copies of the present state, on rank 0 between passes. `facts` join the state; `tensors`: consolidated."""
        meter, progress = self.observer.state(), self.progress
        arrays = {f"meter/{name}": array for name, array in meter.arrays.items()}
        arrays |= {f"slots/{name}": array for name, array in self.closes.arrays().items()}
        state = {
            "progress": progress.saved(),
            "closer": self.closes.state(),
            "meter": dict(meter.facts),
            "loss_scale": self.scale.state(),
            "learning_rate": self.rate.state(),
            **facts,
        }
        dense = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
        return SavedState(progress.version, log_from, dict(progress.positions), dense, arrays, state)

    def load(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Continue from a commit, on every rank, with its slots or others.

        Raises BadInput if the dense part is of another model.
        """
        tensors = self.carried.tensors(load_tensors(folder / DENSE), state["spec"], self.dense.tensors())
        if "imported" in state:  # a warm start (trainer.importing): the rest is that of a new job
            weights = {name: value for name, value in self.dense.tensors().items() if name.startswith("model.")}
            self.dense.load(weights | tensors)
            self.progress.load_saved(state["progress"])
            return
        self.dense.load(tensors)
        arrays = load_arrays(folder / ARRAYS)
        meter = {name.removeprefix("meter/"): array for name, array in arrays.items() if name.startswith("meter/")}
        self.observer.load_state(MeterState(meter, state["meter"]))
        slots = {name.removeprefix("slots/"): array for name, array in arrays.items() if name.startswith("slots/")}
        self.closes.load_state(state["closer"], self.carried.counters(slots, state["spec"]))
        self.progress.load_saved(state["progress"])
        self.scale.load_state(state["loss_scale"])
        self.rate.load_state(state.get("learning_rate", {"samples": self.progress.num_samples}))


RESTORE_S = 3600.0
"""Longest time to restore the rows of a commit."""


def restore(
    ranks: Ranks,
    beginning: RestartPoint | None,
    shards: Shards,
    holders: StateHolders,
    cache: Path | None,
    standby: Standby | None = None,
) -> None:
    """Restore the state of every rank and the rows of the shards from the commit that rank 0 chose.

    `cache`: the folder of this rank for files of a commit that were uploaded. After `standby` the shards have it,
    or soon will.
    """

    def rows() -> None:
        assert beginning is not None, "rank 0"
        commit = beginning.commit
        if standby is not None:
            standby.finish(shards, commit)
        elif commit is None:
            shards.call(RestoreCommit(Path(), [], 0), Deadline.after(RESTORE_S))
        else:
            shards.call(RestoreCommit(commit.folder, commit.shards, commit.version), Deadline.after(RESTORE_S))
        failpoint(Failpoint.RESTORED)

    on_rank_0(ranks, rows)
    commit = None if beginning is None else beginning.commit
    message = ranks.broadcast(_restored_message(beginning) if ranks.rank == 0 else None)
    if message["commit"] is not None:
        commit = commit or commit_in(message, cache)
        holders.load(commit.folder, commit.state)
    if beginning is not None:
        holders.progress.used(beginning.last_number)


def _restored_message(beginning: RestartPoint | None) -> dict[str, Any]:
    """The commit, for the other ranks: its folder, or all that its files can be fetched by."""
    assert beginning is not None, "rank 0"
    if (commit := beginning.commit) is None or beginning.fence is None:
        return {"commit": None if commit is None else str(commit.folder)}
    return {"commit": commit.name, "manifest": plain(commit.manifest)}


def commit_in(message: Mapping[str, Any], cache: Path | None) -> Commit:
    """The commit in a message of rank 0 or of the launcher, its dense part in a folder that this process can read."""
    if "manifest" not in message:
        return read_commit(Path(message["commit"]))
    assert cache is not None, "the launcher names a folder"
    shutil.rmtree(cache, ignore_errors=True)  # of the commit before
    try:
        manifest = typed(CommitManifest, message["manifest"], "manifest")
        commit = Commit(path_below(cache, message["commit"], NAME), manifest)
    except (InvalidName, NotUnderstood) as error:
        raise CommitDamaged(f"the commit that rank 0 names: {error}") from error
    assert manifest.objects_at is not None, "rank 0 names a commit that is uploaded"
    objects = PartObjects(manifest.objects_at, 0)
    objects.complete(commit.folder, commit.own_files, commit.objects, Deadline.after(RESTORE_S))
    return commit
