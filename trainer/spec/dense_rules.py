"""Checks of the section `dense` against the other sections of a spec: which strategy works with which mode. Pure."""

from millrace.errors import SpecError
from trainer.config import TrainerJob


def check_dense_rules(job: TrainerJob) -> None:
    """Raise SpecError for a strategy that does not work with the mode."""
    mode, strategy = job.train.mode, job.dense.strategy
    if mode != "sync" and strategy != "shards":
        raise SpecError(
            f'"{strategy}" does not work with train.mode = "{mode}", as trainers would meet in every step; set '
            'dense.strategy = "shards"',
            "dense.strategy",
        )
    if mode == "geo" and job.dense.slice_floats is not None:
        raise SpecError(
            'train.mode = "geo" exchanges the dense parameters with rows, at most every train.k_steps steps: remove it',
            "dense.slice_floats",
        )
    if mode != "sync" and job.dense.buffers == "sync_bn":
        raise SpecError(
            f'"sync_bn" does not work with train.mode = "{mode}", as trainers would meet in every step; use "rank0"',
            "dense.buffers",
        )
    if strategy == "shards" and job.train.staleness:
        raise SpecError(
            '"shards" does not work with train.staleness, since dense parameters are never stale', "dense.strategy"
        )
    if job.dense.offload and job.train.device == "cpu":
        raise SpecError(
            'train.device = "cpu" has all activations in the memory of the CPU already: remove it, or use '
            "dense.recompute",
            "dense.offload",
        )
