"""One table for all keys of a job file: what a change of a key means for a job that has rows.

The start of a job (trainer.spec.changes.significant_keys), `headrace set` and `headrace spec diff` read this table. A
test demands a class for every key. Pure.
"""

from enum import StrEnum
from functools import cache
from typing import NamedTuple

from headrace.config import is_index


class ChangeClass(StrEnum):
    """The meaning of a change of a key."""

    HOT = "hot"
    """It acts at the next close (`headrace set`), or at a restart, between passes."""
    AT_ONCE = "at a restart"
    """It acts at a restart; the result of a pass does not depend on it."""
    BETWEEN = "between passes"
    """It acts at a restart, between passes: those logged before are first trained with the old value."""
    CARRIED = "carried over"
    """As BETWEEN; rows are kept and dense weights are transformed."""
    NEW = "a new model"
    """Stored rows or weights depend on it; a job that has any refuses the change."""


class KeyClass(NamedTuple):
    """The class of some keys."""

    pattern: str
    """Path of the key, or of its section; "*" is any name, "#" a number from 0."""
    change: ChangeClass
    note: str = ""
    """More about it, for people."""


_HOT, _AT_ONCE, _BETWEEN, _NEW = ChangeClass.HOT, ChangeClass.AT_ONCE, ChangeClass.BETWEEN, ChangeClass.NEW
_LIFE = ("delete_below", "delete_after_days", "extend_at", "decay")
AT_ONCE = (
    "commit",
    "store",
    "defaults",
    "cluster",
    "pipe.dead_letters",
    "pipe.processes",
    "train.tune",
    "tuning",
    "crosses",
    "train.step_deadline",
    "train.prefetch_batches",
    "train.on_nonfinite",
    "train.early_rows",
    "train.rows_memory",
    "dense.slice_floats",
    "dense.priority",
    "dense.recompute",
    "dense.offload",
    "passes.max_outage",
    "passes.max_day_jump",
    "passes.keep",
    "passes.keep_in",
    "exports",
    "guards",
    "predict",
    "evaluator",
    "retrieval",
)
"""Sections and keys without effect on the result of a pass. The number of its trainers is in its plan."""
WIRE = "cluster.wire"
"""The key of its section that has an effect: it rounds rows and gradients."""
NEVER = ("name", "seed")
"""Rows and their keys are made with these."""
NEVER_OF_TABLES = ("dim", "first_order", "optimizer.kind", "optimizer.per", "default_row")
"""These define the layout of a row, and whether the dense part has a default row, which stored rows rely on."""
OF_MODELS = ("hidden", "towers", "cross_layers", "low_rank", "structure", "bottom", "classes", "mode")
"""Settings of Headrace's own models that define the shapes of their weights."""
HOT = (
    *(f"tables.*.{key}" for key in ("optimizer.lr", "first_order_optimizer.lr", "schedule", "weight_decay", "l2")),
    *(f"tables.*.{key}" for key in (*_LIFE, "max_shrink_fraction")),
    *(f"tables.*.slots.*.{key}" for key in ("lr", "first_order_lr", *_LIFE)),
    *(f"tables.*.admission.#.{key}" for key in ("n", "p", "score")),
    "dense.optimizer.lr",
    "dense.schedule",
)
"""Keys that may be set while the job runs; "*" is any name, "#" a number from 0."""
_RESIZE = "`headrace resize` changes it while the job runs"
_SHAPES = "if the shapes of the weights stay; a model with other ones is a new model, and is refused"

TABLE: tuple[KeyClass, ...] = (
    *(KeyClass(key, _NEW) for key in NEVER),
    KeyClass("slots", ChangeClass.CARRIED),
    KeyClass("without", ChangeClass.CARRIED, "the slots that it leaves out are removed"),
    *(KeyClass(f"tables.*.{key}", _NEW) for key in NEVER_OF_TABLES),
    *(KeyClass(f"model.settings.{key}", _NEW) for key in OF_MODELS),
    KeyClass("model.name", _NEW),
    KeyClass("model.class", _BETWEEN, _SHAPES),
    KeyClass("model.settings", _BETWEEN, _SHAPES),
    *(KeyClass(f"join.{key}", _BETWEEN) for key in ("window", "keep_negatives", "max_ahead")),
    KeyClass("join", _NEW),
    KeyClass("tasks", _BETWEEN, _SHAPES),
    *(KeyClass(key, _HOT) for key in HOT),
    KeyClass("tables.*.admission", _BETWEEN, "`headrace set` changes n, p and score of an entry while the job runs"),
    KeyClass("cluster.trainers", _AT_ONCE, _RESIZE),
    KeyClass("cluster.shards", _AT_ONCE, _RESIZE),
    KeyClass(WIRE, _BETWEEN),
    *(KeyClass(key, _AT_ONCE) for key in AT_ONCE),
    KeyClass("dense.optimizer.kind", _BETWEEN, "the state of the optimizer begins anew"),
    *(
        KeyClass(section, _BETWEEN)
        for section in ("sources", "pipe", "sample", "tables.*", "train", "dense", "passes", "metrics")
    ),
)
"""The classes, the narrower pattern first: for a key the first one that fits it counts."""


@cache
def class_of(key: str) -> KeyClass | None:
    """The class of the key at this path; None for a key that the table lacks."""
    parts = key.split(".")
    return next((each for each in TABLE if _is_below(parts, each.pattern.split("."))), None)


def is_hot(key: str) -> bool:
    """True if `key` may be set while the job runs."""
    parts = key.split(".")
    return any(_is_below(parts, pattern.split(".")) and _covers(parts, pattern) for pattern in HOT)


def _covers(parts: list[str], pattern: str) -> bool:
    return len(parts) == pattern.count(".") + 1


def _is_below(parts: list[str], pattern: list[str]) -> bool:
    """Whether the key is that of the pattern, or in the section that it names."""
    return len(parts) >= len(pattern) and all(
        is_index(part) if wanted == "#" else bool(part) and wanted in ("*", part)
        for part, wanted in zip(parts, pattern, strict=False)
    )
