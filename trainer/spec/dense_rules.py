"""Checks of the section `dense` against the other sections of a spec: what works with each strategy. Pure."""

from headrace.errors import SpecError
from headrace.trainer.config import TrainerJob
from headrace.trainer.models.registry import MODELS


def check_dense_rules(job: TrainerJob) -> None:
    """Raise SpecError for a strategy that does not work with the mode, or for a key that does not work with it."""
    mode, policy, strategy, kind = job.train.mode, job.train.policy, job.dense.strategy, job.dense.kind
    if not policy.meets_in_steps and kind.meets_in_steps:
        raise SpecError(
            f'"{strategy}" does not work with train.mode = "{mode}", as trainers would meet in every step; set '
            'dense.strategy = "shards"',
            "dense.strategy",
        )
    if policy.copies_rows and job.dense.slice_floats is not None:
        raise SpecError(
            f'train.mode = "{mode}" exchanges the dense parameters with rows, at most every train.k_steps steps: '
            "remove it",
            "dense.slice_floats",
        )
    if not policy.meets_in_steps and job.dense.buffers == "sync_bn":
        raise SpecError(
            f'"sync_bn" does not work with train.mode = "{mode}", as trainers would meet in every step; use "rank0"',
            "dense.buffers",
        )
    if kind.on_shards and job.train.staleness and not policy.copies_rows:
        raise SpecError(
            f'"{strategy}" does not work with train.staleness, since dense parameters are never stale', "dense.strategy"
        )
    if job.dense.offload and job.train.device == "cpu":
        raise SpecError(
            'train.device = "cpu" has all activations in the memory of the CPU already: remove it, or use '
            "dense.recompute",
            "dense.offload",
        )
    if kind.in_stages:
        _check_stages(job)


def _check_stages(job: TrainerJob) -> None:
    """Raise SpecError for a setting that does not work with stages of the model on the trainers."""
    pipeline = f'dense.strategy = "{job.dense.strategy}"'
    name = job.model.name
    model = MODELS.load(name) if name is not None and name in MODELS.names() else None
    if model is not None and not model.has_tower and not model.of_classes:
        towers = ", ".join(f'"{each}"' for each in MODELS.own if MODELS.load(each).has_tower)
        raise SpecError(f'"{name}" has no layers that can be divided, as {pipeline} needs; use {towers}', "model.name")
    if softmax := [number for number, task in enumerate(job.tasks) if task.loss == "softmax"]:
        raise SpecError(f'"softmax" does not work with {pipeline}', f"tasks.{softmax[0]}.loss")
    if job.dense.offload:
        raise SpecError(f"does not work with {pipeline}: remove it", "dense.offload")
    if job.train.device == "cuda":
        raise SpecError(f'{pipeline} works on CPUs only: set "cpu"', "train.device")
    if job.join is not None:
        raise SpecError(
            f"does not work with {pipeline}: every trainer gets samples whose window has ended, and not every "
            "one learns from samples",
            "join",
        )
    if job.model.settings.get("dropout") and job.metrics.progressive == "inference":
        raise SpecError(
            f'"inference" needs a forward pass of its own for a model with dropout, which {pipeline} does not make; '
            'set "training"',
            "metrics.progressive",
        )
