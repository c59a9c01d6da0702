"""Checks of sections of a spec against its others. Pure.

Of `dense`: what works with each strategy. Of epochs, shuffling and kept samples. Of rules for rows, by table and slot.
"""

from collections.abc import Mapping

from headrace.dataset.spec.schema import Schema
from headrace.errors import SpecError
from headrace.pserver.config import SlotLife, TableSection
from headrace.trainer.config import TrainerJob
from headrace.trainer.models.registry import MODELS
from headrace.validation import nearest


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


def check_order(job: TrainerJob, schema: Schema) -> None:
    """Raise SpecError where events are read again, or in another order, and something depends on their order."""
    passes = job.passes
    repeated = next((name for name, source in job.sources.items() if source.epochs > 1), None)
    if passes.shuffle and not job.pipe.traced:
        raise SpecError(
            'orders samples by their events, and those of protocol = "multislot" cannot be traced to events; use '
            'protocol = "arrow", or leave it out',
            "passes.shuffle",
        )
    if passes.keep and repeated is None and passes.keep_in is None:
        raise SpecError(
            "keeps samples for the next epoch, and no source has one: set epochs of a source, or keep_in", "passes.keep"
        )
    path = "passes.shuffle" if passes.shuffle else f"sources.{repeated}.epochs"
    if schema.remembered and (passes.shuffle or repeated is not None):
        raise SpecError(
            f"does not go with slot {schema.remembered[0].name!r}, which is filled in the order of time: in a second "
            "epoch it would hold what comes later",
            path,
        )
    if job.join is not None and (passes.shuffle or repeated is not None):
        raise SpecError("does not go with a join, which follows the order of time", path)


def check_slot_rules(tables: Mapping[str, TableSection], schema: Schema) -> None:
    """Check the sections of all tables.

    Raises SpecError for a slot of `tables.<t>.slots` that does not use the table, or that differs from a slot with the
    same rows; for `extend_at` without a vector or a first-order weight; and for a default row that cannot be learnt.
    """
    for name, table in tables.items():
        path = f"tables.{name}"
        slots = {slot.name: slot.group for slot in schema.sparse if slot.sparse.table == name}
        for slot in table.slots:
            if slot not in slots:
                raise SpecError(f"no slot {slot!r} uses this table; {nearest(slot, slots)}", f"{path}.slots.{slot}")
        lives: dict[int, tuple[str, SlotLife]] = {}
        for slot, group in slots.items():
            life = table.slots.get(slot, SlotLife())
            first, shared = lives.setdefault(group, (slot, life))
            if life != shared:
                raise SpecError(
                    f"slots {first!r} and {slot!r} share rows, so what is set for one must be set alike for the other",
                    f"{path}.slots.{slot if slot in table.slots else first}",
                )
        _check_extension(table, path)
        _check_default_row(table, path)


def _check_default_row(table: TableSection, path: str) -> None:
    """Raise SpecError for a learnt default row without weights, or one that no key would ever train."""
    if not table.learns_default_row:
        return
    if table.dim == 0 and not table.first_order:
        raise SpecError(
            "a row without weights (dim = 0, first_order = false) has nothing to learn", f"{path}.default_row"
        )
    if not table.admission and not any(life.admission for life in table.slots.values()):
        raise SpecError(
            'is "learnt" from keys that are not admitted, and this table admits all; give it admission, or use "zeros"',
            f"{path}.default_row",
        )


def _check_extension(table: TableSection, path: str) -> None:
    ways = {"extend_at": table.extend_at} | {f"slots.{name}.extend_at": s.extend_at for name, s in table.slots.items()}
    for key, score in ways.items():
        if score is not None and (table.dim == 0 or not table.first_order):
            what = "has no vector (dim = 0)" if table.dim == 0 else "has no weight before it (first_order = false)"
            raise SpecError(f"a row that waits for its vector {what}", f"{path}.{key}")
