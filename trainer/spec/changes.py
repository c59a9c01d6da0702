"""Changes of the spec of a job that continues: which keys may change at once, which only between passes, which never.

trainer.spec.change_classes has the class of each key. Keys may also be set while the job runs (`headrace set`). Such an
override wins over the job file until the file changes the same key. Pure functions. The log holds the spec in force; a
new spec, and a set, is logged as an operation before it acts.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from headrace.config import validate
from headrace.dataset.spec.schema import Schema
from headrace.dataset.spec.stream_spec import SlotsSpec
from headrace.errors import SpecError
from headrace.pserver.row_optimizers import ROW_OPTIMIZERS
from headrace.renamed_keys import present_path
from headrace.secrets import SECRET_KEYS
from headrace.trainer.config import TrainerJob
from headrace.trainer.dense_config import DENSE_STRATEGIES, strategy_kind
from headrace.trainer.spec.change_classes import HOT, ChangeClass, class_of, is_hot
from headrace.trainer.spec.defaults import fill_defaults, unwritten_defaults
from headrace.trainer.spec.section_rules import check_slot_rules
from headrace.trainer.spec.slot_changes import SlotChanges, slot_changes
from headrace.validation import nearest, no_such

TRAINERS, SHARDS, MOST_TRAINERS = OF_RESIZES = "cluster.trainers", "cluster.shards", "cluster.trainers.max"
"""The keys that `headrace resize` overrides; the last one where the number of trainers is elastic."""
OF_SLICES = "dense.optimizer.kind"
"""This defines the layout of a row with a slice of the dense parameters."""
OF_MOMENTUM = "dense.optimizer.momentum"
"""And so does this, where it is above 0."""

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


class KeyChange(NamedTuple):
    """A key with different values in two specs, and what the change means."""

    key: str
    change: ChangeClass
    note: str
    was: str
    """The values as text; "nothing" where a spec lacks the key."""
    now: str

    def check(self) -> None:
        """Raise SpecError for a change that a job with rows refuses."""
        if self.change is ChangeClass.NEW:
            values = self.note if self.note else f"from {self.was} to {self.now}"
            raise SpecError(
                f"cannot change {values} while the store holds rows made with its old value; put it back, "
                "choose another store.path, or start over with --fresh",
                self.key,
            )


def key_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[KeyChange]:
    """The changed keys of two specs, each with its class; see trainer.spec.change_classes."""
    before, after = fill_defaults(old), fill_defaults(new)
    was, now = ({**dict(flat_values(unwritten_defaults(spec))), **dict(flat_values(spec))} for spec in (before, after))
    found = []
    for key in changed_keys(old, new):
        change, note = _meaning(key, before, after)
        found.append(KeyChange(key, change, note, was.get(key, "nothing"), now.get(key, "nothing")))
    return found


def _meaning(key: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[ChangeClass, str]:
    """The class of a change, with a note: that of the table, unless it depends on other keys."""
    each = class_of(key)
    change, note = (ChangeClass.BETWEEN, "") if each is None else (each.change, each.note)
    section, _, rest = key.partition(".")
    match section:
        case "slots":
            return _meaning_of_slots(before, after)
        case "tables" if any(rest.split(".")[0] not in spec.get("tables", {}) for spec in (before, after)):
            return ChangeClass.CARRIED, "the table comes or goes with its slots"
        case "tables" if key.endswith("extend_at") and _extends(before, key) != _extends(after, key):
            return ChangeClass.NEW, ""
        case "tables" if rest.split(".")[1:2] == ["schedule"] and _ends_schedule(before, after, rest.split(".")[0]):
            return ChangeClass.NEW, f"the schedule to none with {_FOLLOWS_RATE}"
        case "dense" if key == OF_SLICES and all(_on_shards(spec) for spec in (before, after)):
            return ChangeClass.NEW, ""
        case "dense" if key == OF_MOMENTUM and _begins_momentum(before, after):
            return ChangeClass.NEW, "momentum from or to 0 on shards, whose rows hold it,"
        case "model" if change is ChangeClass.NEW and key != "model.name" and _own_class(before, after):
            return ChangeClass.BETWEEN, "if the shapes of the weights stay"
    return change, note


def _meaning_of_slots(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[ChangeClass, str]:
    try:
        changes = slots_between(before, after)
    except SpecError as error:
        return ChangeClass.NEW, f"slots that cannot be compared ({error})"
    if changes.altered:
        name, why = next(iter(changes.altered.items()))
        return ChangeClass.NEW, f"slot {name!r} ({why}; another name would make it a new slot)"
    schemas = [schema_of(spec) for spec in (before, after)]
    filled = {slot.name for schema in schemas for slot in (*schema.histories, *schema.counters)}
    if filled.intersection([*changes.added, *changes.removed]):
        return ChangeClass.NEW, "the slots with a history or counters, whose tables are made with the store,"
    if changes != SlotChanges() and any(spec.get("join") for spec in (before, after)):
        return ChangeClass.NEW, "the slots of a job with a join, whose waiting samples have the old ones,"
    if (changes.added or changes.removed or changes.moved) and any(_on_shards(spec) for spec in (before, after)):
        return ChangeClass.NEW, 'its order and number with dense.strategy = "shards", whose weights are in rows,'
    if changes.added or changes.removed or changes.moved:
        return ChangeClass.CARRIED, changes.words()
    return (ChangeClass.BETWEEN, changes.words()) if changes.settings else (ChangeClass.AT_ONCE, "the same slots")


def slots_between(old: Mapping[str, Any], new: Mapping[str, Any]) -> SlotChanges:
    """The changes of the slots from one spec to another. Raises SpecError for a list that is not valid."""
    return slot_changes(schema_of(old), schema_of(new))


def schema_of(spec: Mapping[str, Any]) -> Schema:
    """The slots of a spec. Raises SpecError for a list that is not valid."""
    return Schema.of(validate(SlotsSpec, {"slots": spec.get("slots", [])}).slots)


_FOLLOWS_RATE = 'an optimizer whose weights follow from the rate; schedule = {kind = "constant"} keeps them'


def _ends_schedule(before: Mapping[str, Any], after: Mapping[str, Any], table: str) -> bool:
    """Whether rows lose the schedule of a table and cannot do without it: FTRL's state is for the last rate."""
    was, now = before["tables"][table], after["tables"][table]
    ends = was.get("schedule") is not None and now.get("schedule") is None
    kind = now.get("optimizer", {}).get("kind")
    return ends and kind is not None and ROW_OPTIMIZERS.load(kind).follows_rate


def _own_class(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether the model is a class of the user's own, whose settings may mean anything."""
    return all(spec.get("model", {}).get("class") is not None for spec in (before, after))


def significant_keys(old: Mapping[str, Any], new: Mapping[str, Any], *, learnt: bool = True) -> list[str]:
    """Changed keys with an effect on the result of a pass: they act between passes only.

    Raises SpecError for a key that stored rows depend on. `learnt`: whether there can be such rows.
    """
    _check_names(*(list(fill_defaults(spec).get("sources", ())) for spec in (old, new)))
    found = [each for each in key_changes(old, new) if each.change is not ChangeClass.AT_ONCE]
    for each in found if learnt else ():
        each.check()
    return [each.key for each in found]


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
    name = spec.get("dense", {}).get("strategy")
    return name in DENSE_STRATEGIES.names() and strategy_kind(name).on_shards


def _begins_momentum(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether one of two specs with the dense parameters on shards has momentum."""
    has = [bool(spec.get("dense", {}).get("optimizer", {}).get("momentum")) for spec in (before, after)]
    return has[0] != has[1] and _on_shards(before) and _on_shards(after)


def _extends(spec: Mapping[str, Any], key: str) -> bool:
    """True if rows of the table of `key` get their vector later; then each row records whether it has one."""
    table = spec.get("tables", {}).get(key.split(".")[1], {})
    lives = (table, *table.get("slots", {}).values())
    return any(life.get("extend_at") is not None for life in lives)


def present_names(overrides: Overrides) -> dict[str, Any]:
    """The overrides by the present paths of their keys; of two names of a key the later one counts."""
    return {present_path(key, TrainerJob.renamed): value for key, value in overrides.items()}


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


def with_overrides(job: TrainerJob, overrides: Overrides) -> TrainerJob:
    """The job with these values instead of its own. Raises SpecError as for a job file with them."""
    hot = {key: value for key, value in present_names(overrides).items() if key not in OF_RESIZES}
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
        if key in OF_RESIZES:
            raise SpecError("cannot be set; `headrace resize` changes it while the job runs", key)
        if not is_hot(key):
            raise SpecError(f"cannot be set while the job runs; {_hint(job, key)}these can: {', '.join(HOT)}", key)
    before, changed = with_overrides(job, overrides), with_overrides(job, {**overrides, **keys})
    for key in (key for key in keys if key.endswith(".extend_at")):
        if None in (_extend_at(before, key), _extend_at(changed, key)):
            raise SpecError("can be set from a number to a number only: the layout of rows depends on it", key)
    for key in (key for key in keys if key.startswith("tables.") and key.endswith(".schedule")):
        if _ends_schedule(before.model_dump(mode="json"), changed.model_dump(mode="json"), key.split(".")[1]):
            raise SpecError(f"cannot be removed with {_FOLLOWS_RATE}", key)
    changed.train.policy.check_optimizers(changed.dense.optimizer.of_rows(), changed.tables)
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
            raise SpecError(no_such(what, name, node), path)
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
