"""Changes of the spec of a job that continues: which keys may change at once, which only between passes, which never.

Also the keys that may be set while the job runs (`millrace set`). Such an override wins over the job file until the
file changes the same key. Pure functions. The log holds the spec in force; a new spec, and a set, is logged as an
operation before it acts.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dataset.spec.schema import Schema
from millrace.config import is_index, validate
from millrace.errors import SpecError
from millrace.renamed_keys import present_path
from millrace.secrets import SECRET_KEYS
from millrace.validation import nearest
from trainer.config import TrainerJob
from trainer.spec.defaults import fill_defaults
from trainer.spec.slot_rules import check_slot_rules

AT_ONCE = (
    "commit",
    "store",
    "defaults",
    "cluster",
    "pipe.dead_letters",
    "pipe.processes",
    "train.step_deadline",
    "train.prefetch_batches",
    "train.on_nonfinite",
    "train.early_rows",
    "dense.slice_floats",
    "dense.priority",
    "passes.max_outage",
    "passes.max_day_jump",
    "exports",
    "predict",
)
"""Sections and keys without effect on the result of a pass. The number of its trainers is in its plan."""
WIRE = "cluster.wire"
"""The key of its section that has an effect: it rounds rows and gradients."""
TRAINERS, SHARDS = "cluster.trainers", "cluster.shards"
"""The keys that `millrace resize` overrides."""
NEVER = ("name", "seed", "slots")
"""Rows and their keys are made with these."""
NEVER_OF_TABLES = ("dim", "first_order", "optimizer.kind", "optimizer.per", "default_row")
"""These define the layout of a row, and whether the dense part has a default row, which stored rows rely on."""
OF_SLICES = "dense.optimizer.kind"
"""This defines the layout of a row with a slice of the dense parameters."""
_LIFE = ("delete_below", "delete_after_days", "extend_at", "decay")
HOT = (
    *(f"tables.*.{key}" for key in ("optimizer.lr", "first_order_optimizer.lr", *_LIFE, "max_shrink_fraction")),
    *(f"tables.*.slots.*.{key}" for key in ("lr", "first_order_lr", *_LIFE)),
    *(f"tables.*.admission.#.{key}" for key in ("n", "p", "score")),
    "dense.optimizer.lr",
    "dense.schedule",
)
"""Keys that may be set while the job runs; "*" is any name, "#" a number from 0."""

Overrides = Mapping[str, Any]
"""Values that were set while the job ran, by the path of their key."""


def flat_values(spec: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every value of a spec by the path of its key, as text; lists are values.

    Secrets are left out: another password, or another place for it, does not change the job.
    """
    for name, value in spec.items():
        path = f"{prefix}{name}"
        if name in SECRET_KEYS:
            continue
        if isinstance(value, Mapping):
            yield from flat_values(value, f"{path}.")
        else:
            yield path, json.dumps(value, default=str, sort_keys=True)


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Keys with different values in two specs; a default that is written out is not a change."""
    before, after = dict(flat_values(fill_defaults(old))), dict(flat_values(fill_defaults(new)))
    return sorted(key for key in {*before, *after} if before.get(key) != after.get(key))


def significant_keys(old: Mapping[str, Any], new: Mapping[str, Any], *, learnt: bool = True) -> list[str]:
    """Changed keys with an effect on the result of a pass: they act between passes only.

    Raises SpecError for a key that stored rows depend on. `learnt`: whether there can be such rows.
    """
    keys = [key for key in changed_keys(old, new) if key == WIRE or not _below(key, AT_ONCE)]
    before, after = fill_defaults(old), fill_defaults(new)
    _check_names(list(before.get("sources", ())), list(after.get("sources", ())))
    for key in keys:
        table = key.split(".", 2)[2] if key.startswith("tables.") and key.count(".") > 1 else ""
        lays_out = table.endswith("extend_at") and _extends(before, key) != _extends(after, key)
        lays_out |= key == OF_SLICES and all(_on_shards(spec) for spec in (before, after))
        if learnt and (_below(key, NEVER) or _below(table, NEVER_OF_TABLES) or lays_out):
            was, now = (dict(flat_values(spec)).get(key, "nothing") for spec in (before, after))
            values = "" if key == "slots" else f"from {was} to {now} "
            raise SpecError(
                f"cannot change {values}while the store holds rows made with its old value; put it back, "
                "choose another store.path, or start over with --fresh",
                key,
            )
    return keys


def _check_names(was: Sequence[str], now: Sequence[str]) -> None:
    """Raise SpecError where partitions would get other names: those of several sources contain their source's."""
    if len(was) != len(now) or (len(was) > 1 and set(was) != set(now)):
        names = ", ".join(was)
        raise SpecError(
            f"the store's positions are those of {names}: the sources of a job that has begun keep their number and, "
            "where there are several, their names; put them back, choose another store.path, or start over with "
            "--fresh",
            "sources",
        )


def _on_shards(spec: Mapping[str, Any]) -> bool:
    return bool(spec.get("dense", {}).get("strategy") == "shards")


def _extends(spec: Mapping[str, Any], key: str) -> bool:
    """True if rows of the table of `key` get their vector later; then each row records whether it has one."""
    table = spec.get("tables", {}).get(key.split(".")[1], {})
    lives = (table, *table.get("slots", {}).values())
    return any(life.get("extend_at") is not None for life in lives)


def present_names(overrides: Overrides) -> dict[str, Any]:
    """The overrides by the present paths of their keys; of two names of a key the later one counts."""
    return {present_path(key, TrainerJob.renamed): value for key, value in overrides.items()}


def is_hot(key: str) -> bool:
    """True if `key` may be set while the job runs."""
    parts = key.split(".")
    return any(_fits(parts, pattern.split(".")) for pattern in HOT)


def _hint(job: TrainerJob, key: str) -> str:
    """A hint at the most similar key for a misspelt one; empty for a key that exists but is not hot."""
    if any(_below(name, (key,)) for name, _ in flat_values(job.model_dump(mode="json"))):
        return ""
    parts = key.split(".")
    names = [
        ".".join(parts[i] if part in ("*", "#") and i < len(parts) else part for i, part in enumerate(hot.split(".")))
        for hot in HOT
    ]
    hint = nearest(key, names)
    return f"{hint} " if hint.startswith("did you mean") else ""


def _fits(parts: list[str], pattern: list[str]) -> bool:
    pairs = zip(parts, pattern, strict=False)
    return len(parts) == len(pattern) and all(
        is_index(part) if wanted == "#" else bool(part) and wanted in ("*", part) for part, wanted in pairs
    )


def with_overrides(job: TrainerJob, overrides: Overrides) -> TrainerJob:
    """The job with these values instead of its own. Raises SpecError as for a job file with them."""
    hot = {key: value for key, value in present_names(overrides).items() if key not in (TRAINERS, SHARDS)}
    if not hot:
        return job
    raw = job.model_dump(mode="json")
    for key, value in hot.items():
        _put(raw, key, value)
    changed = validate(TrainerJob, raw)
    check_slot_rules(changed.tables, Schema.of(changed.slots))
    return changed


def after_set(job: TrainerJob, overrides: Overrides, keys: Overrides) -> TrainerJob:
    """The job after `keys` are set on top of `overrides`. Raises SpecError if they may not be set."""
    if not keys:
        raise SpecError("nothing is set: give KEY=VALUE")
    keys = present_names(keys)
    for key in keys:
        if key in (TRAINERS, SHARDS):
            raise SpecError("cannot be set; `millrace resize` changes it while the job runs", key)
        if not is_hot(key):
            raise SpecError(f"cannot be set while the job runs; {_hint(job, key)}these can: {', '.join(HOT)}", key)
    before, changed = with_overrides(job, overrides), with_overrides(job, {**overrides, **keys})
    for key in (key for key in keys if key.endswith(".extend_at")):
        if None in (_extend_at(before, key), _extend_at(changed, key)):
            raise SpecError("can be set from a number to a number only: the layout of rows depends on it", key)
    return changed


def _extend_at(job: TrainerJob, key: str) -> float | None:
    """The value in force for a key tables.<t>.extend_at or tables.<t>.slots.<s>.extend_at."""
    _, table, *slot, _ = key.split(".")
    section = job.tables[table]
    life = section.slots.get(slot[1]) if slot else None
    return section.extend_at if life is None or life.extend_at is None else life.extend_at


def _put(raw: dict[str, Any], key: str, value: Any) -> None:
    """Set a hot key in a whole spec as JSON; a first-order optimizer starts with the settings of the optimizer."""
    *sections, last = key.split(".")
    node: Any = raw
    for depth, name in enumerate(sections):
        path = ".".join(sections[: depth + 1])
        if isinstance(node, list):
            if int(name) >= len(node):
                raise SpecError(f"there are {len(node)} entries, numbered from 0", path)
            node = node[int(name)]
            continue
        if depth == 1 and name not in node:
            what = "table" if sections[0] == "tables" else "section"
            raise SpecError(f"there is no {what} {name!r}; {nearest(name, node)}", path)
        if name == "first_order_optimizer" and node[name] is None:
            node[name] = dict(node["optimizer"])
        node = node.setdefault(name, {})
    node[last] = value


def remaining(overrides: Overrides, old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The overrides that remain when the job file changes: for a key that it changes, the file wins."""
    keys = changed_keys(old, new)
    return {
        name: value for name, value in present_names(overrides).items() if not any(_touches(key, name) for key in keys)
    }


def _touches(changed: str, key: str) -> bool:
    """True if an override of `key` ends when the job file changes `changed_keys`."""
    return _below(key, (changed,)) or _below(changed, (key,)) or changed == f"{key.rpartition('.')[0]}.kind"


def _below(key: str, sections: tuple[str, ...]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def hot_keys(spec: Mapping[str, Any]) -> list[str]:
    """Keys that can be set while the job runs: those in the spec, and those that may be added to its tables."""
    written = [key for key in (present_path(key, TrainerJob.renamed) for key, _ in flat_values(spec)) if is_hot(key)]
    tables = [key.replace("*", table, 1) for table in spec.get("tables", {}) for key in HOT if key.count("*") == 1]
    return sorted({*written, *(key for key in tables if "#" not in key)})


def check_set(spec: Mapping[str, Any], overrides: Overrides, keys: Overrides) -> None:
    """Raise SpecError where `keys` cannot be set over the `overrides` of a running job with this spec."""
    after_set(validate(TrainerJob, spec, only_known=True), overrides, keys)
