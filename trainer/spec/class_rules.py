"""Checks of a softmax over many classes against the other sections of a spec: what works with it. Pure."""

from headrace.dataset.pipe.label_bounds import LabelBounds
from headrace.errors import SpecError
from headrace.trainer.config import TaskSection, TrainerJob
from headrace.trainer.models.registry import is_of_classes

WHOLE_NUMBERS = ("uint64", "int64")


def label_bounds_of(job: TrainerJob) -> list[LabelBounds]:
    """The labels that tasks take; "mse" takes any number."""
    found = [LabelBounds.of_probability(task.label, task.mask) for task in job.tasks if task.loss == "bce"]
    number = job.model.settings.get("classes")
    if not is_of_classes(job.model.name) or not isinstance(number, int):
        return found
    return found + [LabelBounds.of_classes(task.label, number) for task in job.tasks if task.loss == "softmax"]


def masks_of(job: TrainerJob) -> dict[str, str]:
    """The labels that may be absent: the slot that is 0 then, or "" where a join adds the label."""
    return {task.label: task.mask for task in job.tasks if task.mask} | ({job.join.label: ""} if job.join else {})


def has_divided_classes(job: TrainerJob) -> bool:
    """Whether classes of a model of Headrace are divided over trainers, so that none has the whole model."""
    return is_of_classes(job.model.name) and job.model.settings.get("mode", "full") != "full"


def check_class_rules(job: TrainerJob) -> None:
    """Raise SpecError for a task with many classes that does not fit the rest."""
    many = [number for number, task in enumerate(job.tasks) if task.loss == "softmax"]
    if is_of_classes(job.model.name) and many != [0]:
        raise SpecError(
            f'the first task of {job.model.name} has loss = "softmax" and the number of the item as its label, and '
            "others have other losses",
            "tasks",
        )
    for number in many:
        _check_task(job, job.tasks[number], f"tasks.{number}")
    if has_divided_classes(job):
        _check_divided(job)


def _check_task(job: TrainerJob, task: TaskSection, path: str) -> None:
    if job.model.name is not None and not is_of_classes(job.model.name):
        raise SpecError(f'"softmax" is the loss of model "next_item"; {job.model.name} has none', f"{path}.loss")
    types = {name: getattr(slot, "type", "") for slot in job.slots for name in slot.expanded()}
    if types.get(task.label) not in WHOLE_NUMBERS:
        raise SpecError(
            f'{task.label!r} must hold the number of a class: a meta slot with type = "uint64"', f"{path}.label"
        )
    if task.mask is not None:
        raise SpecError("a task with many classes has no mask; leave such samples out in the pipe", f"{path}.mask")
    if task.weight != 1 and len(job.tasks) == 1:
        raise SpecError("this task is the only one: change dense.optimizer.lr instead", f"{path}.weight")
    if job.join is not None and job.join.label == task.label:
        raise SpecError("a join tells whether there was a click, not the number of a class", "join.label")


def _check_divided(job: TrainerJob) -> None:
    """Raise SpecError for a key that does not work with items divided over trainers."""
    mode, dense, train = job.model.settings["mode"], job.dense, job.train
    refused = {
        "train.mode": not train.policy.meets_in_steps,
        "train.staleness": train.staleness > 0,
        "train.learn": not train.learn,
        "train.learn_until": train.learn_until is not None,
        "metrics.infer_first": job.metrics.infer_first,
        "dense.strategy": dense.strategy != "all_reduce",
        "dense.overlap": dense.overlap,
        "dense.hierarchy": dense.hierarchy is not None,
        "dense.compression": dense.compression != "none",
        "dense.clip_norm": dense.clip_norm is not None,
    }
    if path := next((path for path, wrong in refused.items() if wrong), None):
        raise SpecError(
            f'does not work with items that are divided over trainers (model.settings.mode = "{mode}"): remove it, or '
            'use mode = "full"',
            path,
        )
    optimizer = dense.optimizer
    if optimizer.whole:
        raise SpecError(
            f"{optimizer.kind} needs whole parameters, and items are divided over trainers (model.settings."
            f'mode = "{mode}"): use "adam", "adagrad" or "sgd"',
            "dense.optimizer.kind",
        )
    if mode == "sampled" and not optimizer.rests:
        raise SpecError(
            'items that are not drawn must stay as they are (model.settings.mode = "sampled"): use "adagrad", or "sgd" '
            "without momentum",
            "dense.optimizer",
        )
