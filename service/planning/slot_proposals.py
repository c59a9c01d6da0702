"""Proposes the slots of a job of `pipe.kind = "columns"` from the roles of the fields of its events. Pure."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from headrace.dataset.formats.generator_columns import RESERVED_COLUMNS
from headrace.dataset.spec.feature_keys import MAX_NUMBER
from headrace.service.planning.feature_worth import FeatureWorth, Gain, entry_of
from headrace.service.planning.field_facts import FieldFacts, ValueKind
from headrace.service.planning.field_roles import (
    HIGH_CARDINALITY,
    EventRoles,
    FieldRole,
    Reading,
    fits_64_bits,
    is_single,
    is_skewed,
)

MAX_CROSSED = 100
"""Most distinct values of a field that is crossed with the exploded one."""
MAX_CROSSES = 8
NUM_BUCKETS = 20
MAX_SCALED = 1e30
MAX_LEN = 100
"""Signs kept of a longer list."""
MAX_EXAMPLE = 40
"""Longest example in a comment, in characters."""
SLOT_NAME = re.compile(r"[A-Za-z_][\w.-]*")
LEFT_OUT = (
    FieldRole.UNIQUE,
    FieldRole.CONSTANT,
    FieldRole.MIXED,
    FieldRole.NESTED,
    FieldRole.EMPTY,
    FieldRole.ALIGNED,
    FieldRole.DATE,
)


@dataclass(frozen=True, slots=True)
class SlotProposal:
    """One entry of `slots`."""

    keys: Mapping[str, Any]
    comment: str
    """Facts about its field, and why it is proposed."""
    active: bool = True
    """Otherwise it is only written as a comment."""
    made_up: bool = False
    """Whether it is beside the slot of its field, and must pay."""

    @property
    def name(self) -> str:
        """The name of the slot."""
        return str(self.keys["name"])

    @property
    def is_feature(self) -> bool:
        """Whether the model gets it."""
        return self.active and self.keys.get("kind") != "meta"


@dataclass(frozen=True, slots=True)
class Proposals:
    """The slots of a job, by what they are for."""

    features: tuple[SlotProposal, ...]
    crosses: tuple[SlotProposal, ...]
    label: SlotProposal | None
    group: SlotProposal | None
    num_numbers: int
    """Slots of numbers."""
    ids: tuple[tuple[SlotProposal, tuple[str, ...]], ...] = ()
    """Whole numbers as ids, not active, and the slots in whose place they would be: a measurement decides."""
    measured: tuple[SlotProposal, ...] = ()
    """Features that a measurement proposes."""
    found: FeatureWorth | None = None
    """The measurement."""

    @property
    def sparse(self) -> list[SlotProposal]:
        """Those that the model gets rows of."""
        slots = (*self.features, *self.crosses, *self.measured)
        return [slot for slot in slots if slot.is_feature and slot.keys.get("kind") != "dense"]


class _Names:
    """Names of slots, each given once."""

    def __init__(self) -> None:
        self._given = set(RESERVED_COLUMNS)

    def free(self, path: str) -> str:
        """The path itself where it can be a name, else one like it."""
        base = path if SLOT_NAME.fullmatch(path) else re.sub(r"[^\w.-]", "_", path)
        base = base if SLOT_NAME.fullmatch(base) else f"_{base}"
        name, number = base, 1
        while name in self._given:
            number += 1
            name = f"{base}_{number}"
        self._given.add(name)
        return name


def propose_slots(roles: EventRoles, fields: Mapping[str, FieldFacts], num_events: int) -> Proposals:
    """The slots for the fields of `num_events` events."""
    names = _Names()
    label = None if roles.label is None else _label(roles, fields, names, num_events)
    features, ids = [], list[tuple[SlotProposal, tuple[str, ...]]]()
    group = None
    for reading in roles.readings:
        path = reading.facts.path
        if path == roles.group:
            group = _group(reading, names, num_events)
        elif roles.label is None or path != roles.label.path:
            features.append(_feature(reading, roles, names, num_events))
            if reading.role is FieldRole.NUMBER and "buckets" not in features[-1].keys:
                keys = {"name": names.free(f"{path}_step"), "from": path, "buckets": boundaries(reading.facts)}
                features.append(
                    SlotProposal(keys, "the same number as an id: that of a range with many values", made_up=True)
                )
            whole = reading.facts.is_whole and fits_64_bits(reading.facts)
            if reading.role is FieldRole.NUMBER and whole and reading.facts.low >= 0:  # ids below 0 are texts
                of = tuple(each.name for each in features if each.keys.get("from", each.name) == path)
                ids.append((_as_ids(reading, names, num_events), of))
    features += list(_time_parts(roles, fields, names))
    crosses = tuple(_crosses(roles, features, names))
    num_numbers = sum(each.active and each.keys.get("kind") == "dense" for each in features)
    return Proposals(tuple(features), crosses, label, group, num_numbers, tuple(ids))


def _label(roles: EventRoles, fields: Mapping[str, FieldFacts], names: _Names, num_events: int) -> SlotProposal:
    assert roles.label is not None
    facts = fields[roles.label.path]
    if roles.label.of is None:
        keys = _keys(names.free(facts.path), facts.path, kind="meta")
        if _is_missing(facts, num_events):
            keys["default"] = 0.0
    else:
        keys = {"name": names.free(f"in_{facts.path}"), "kind": "meta"}
        if roles.label.of != roles.explode:
            keys["from"] = roles.label.of
        keys["in"] = facts.path
    return SlotProposal(keys, f"{seen(facts, num_events)}\nthe label: {roles.label.why}")


def _group(reading: Reading, names: _Names, num_events: int) -> SlotProposal:
    facts = reading.facts
    kind = "string" if facts.is_text else "int64" if facts.low < 0 else "uint64"
    keys = _keys(names.free(facts.path), facts.path, kind="meta", type=kind)
    return SlotProposal(keys, f"{seen(facts, num_events)}\nnames the event, whose samples are one group")


def _feature(reading: Reading, roles: EventRoles, names: _Names, num_events: int) -> SlotProposal:
    """The slot of a field; one that is left out is not active."""
    facts, role = reading.facts, reading.role
    comment = f"{seen(facts, num_events)}\n{_purpose(reading)}: {reading.why}"
    if role in LEFT_OUT:
        keys = _keys(facts.path, facts.path)
        if role is FieldRole.DATE:
            keys |= {"time": "hour"} | ({"unit": "iso"} if facts.is_text else {})
        elif facts.is_text or role is FieldRole.MIXED:
            keys["values"] = "string"
        return SlotProposal(keys, comment, active=False)
    keys = _keys(names.free(facts.path), facts.path)
    match role:
        case FieldRole.NUMBER if is_skewed(facts) and facts.low < 0:
            keys["buckets"] = boundaries(facts)
        case FieldRole.NUMBER:
            keys |= {"kind": "dense"} | _evened_out(facts)
            if _is_missing(facts, num_events) or facts.is_list:
                keys["default"] = 0.0
        case FieldRole.NUMBERS:
            keys |= {"kind": "dense", "size": facts.max_len}
        case _:
            if facts.is_text or facts.low < 0:
                keys["values"] = "string"
            if reading.split:
                keys["split"] = reading.split
            if role is FieldRole.WORDS or not is_single(facts, roles.explode):
                keys["pooling"] = "mean"
            if facts.max_len > MAX_LEN and not is_single(facts, roles.explode):
                keys["max_len"] = MAX_LEN
    return SlotProposal(keys, comment)


def _as_ids(reading: Reading, names: _Names, num_events: int) -> SlotProposal:
    """The slot of a number as an id."""
    keys = _keys(names.free(f"{reading.facts.path}_id"), reading.facts.path)
    return SlotProposal(keys, f"{seen(reading.facts, num_events)}\nids: in place of the number", active=False)


def _evened_out(facts: FieldFacts) -> dict[str, Any]:
    """Keys that bring a number near the range of -1 to 1, where models learn best."""
    if is_skewed(facts):
        return {"log": True}
    largest = max(abs(facts.low), abs(facts.high))
    return {"scale": 10.0 ** -math.ceil(math.log10(largest))} if 10 < largest < MAX_SCALED else {}


def boundaries(facts: FieldFacts) -> list[float]:
    """Rising boundaries between which about equally many numbers lie; none beyond those that a slot may have."""
    found = {facts.quantile(number / NUM_BUCKETS) for number in range(1, NUM_BUCKETS)}
    return sorted({min(max(each, -MAX_NUMBER), MAX_NUMBER) for each in found})


def _keys(name: str, path: str, **more: Any) -> dict[str, Any]:
    return {"name": name} | more | ({} if name == path else {"from": path})


def _is_missing(facts: FieldFacts, num_events: int) -> bool:
    """Whether an event, or an element of a list, lacks it."""
    return facts.num_null > 0 or facts.num_present < num_events


def _time_parts(roles: EventRoles, fields: Mapping[str, FieldFacts], names: _Names) -> Iterator[SlotProposal]:
    if roles.time is None:
        return
    path, unit, _ = roles.time
    for part, other in (("hour", "hour"), ("weekday", "day")):
        if not any(other in known.lower() for known in fields):
            keys = {"name": names.free(part), "from": path, "time": part} | ({} if unit == "s" else {"unit": unit})
            yield SlotProposal(keys, f'the {part} of "{path}", in UTC', made_up=True)


def _crosses(roles: EventRoles, features: list[SlotProposal], names: _Names) -> Iterator[SlotProposal]:
    """Crosses of the exploded list with fields of few values: they tell the elements of a list apart."""
    if roles.explode is None:
        return
    slots = {slot.keys.get("from", slot.name): slot.name for slot in features if slot.is_feature}
    ids = [each.facts for each in roles.readings if each.role is FieldRole.ID and each.facts.path in slots]
    items = [each for each in ids if roles.explode in (each.path, each.within)]
    if not items:
        return
    item = max(items, key=lambda each: len(each.distinct))
    few = [each for each in ids if not each.is_list and 2 <= len(each.distinct) <= MAX_CROSSED]
    for each in few[:MAX_CROSSES]:
        parts = [slots[item.path], slots[each.path]]
        keys = {"name": names.free("_".join(parts)), "cross": parts}
        yield SlotProposal(keys, "")


def _purpose(reading: Reading) -> str:
    match reading.role:
        case FieldRole.ID:
            many = len(reading.facts.distinct) > HIGH_CARDINALITY
            return f"ids of {'high' if many else 'low'} cardinality"
        case FieldRole.WORDS:
            return "ids of the parts of a text"
        case FieldRole.NUMBER:
            return "a number" + (", in buckets or as log(1 + x) for its long tail" if is_skewed(reading.facts) else "")
        case FieldRole.NUMBERS:
            return "numbers"
        case _:
            return "left out"


def seen(facts: FieldFacts, num_events: int) -> str:
    """Facts about a field, in one line."""
    if not facts.num_values:
        return f"{json.dumps(facts.path)}: no value"
    kinds = " or ".join(kind.value for kind in ValueKind if facts.kinds[kind])
    parts = [f"lists of {facts.min_len} to {facts.max_len} x {kinds}" if facts.is_list else kinds]
    share = facts.num_present / max(1, num_events)
    parts.append("in every event" if facts.num_present == num_events else f"in {share:.1%} of the events")
    if facts.num_null:
        parts.append(f"null in {facts.num_null:,}")
    parts.append(f"{'more than ' if facts.is_capped else ''}{len(facts.distinct):,} distinct")
    if facts.numbers:
        parts.append(f"{facts.low:.16g} to {facts.high:.16g}")
    return f"{json.dumps(facts.path)}: {', '.join(parts)}, such as {_example(facts)}"


def _example(facts: FieldFacts) -> str:
    text = json.dumps(facts.example)
    return text if len(text) <= MAX_EXAMPLE else text[:MAX_EXAMPLE] + "..."


def with_measured(slots: Proposals, found: FeatureWorth) -> Proposals:
    """The proposals with what each is worth, ids in place of numbers where that pays, and the features that pay."""
    out = {name for feature, _ in found.replaced for name in feature.of}
    ids = {slot.name: (slot, of) for slot, of in slots.ids}
    crossed = {part for slot in slots.crosses for part in slot.keys["cross"]}
    crossed |= {part for feature, _ in found.features for part in feature.of}

    def judged(slot: SlotProposal) -> SlotProposal:
        if slot.name in out:
            return replace(slot, comment=f"{slot.comment}\nleft out: as an id it says more", active=False)
        if slot.name not in found.slots:
            return slot
        gain, num_rows = found.slots[slot.name]
        lines = [slot.comment] if slot.comment else []
        if dropped := slot.name in found.dropped and slot.name not in crossed:
            lines.append(f"left out: without it {-gain.loss:.4f} less log loss and {gain.auc:+.4f} AUC")
        else:
            lines.append(f"worth {-gain.auc:+.4f} AUC; {num_rows:,} rows")
        return replace(slot, comment="\n".join(lines), active=slot.active and not dropped)

    features = []
    chosen = {str(feature.keys["name"]): gain for feature, gain in found.replaced}
    last = {ids[name][1][-1]: name for name in chosen}
    for slot in slots.features:
        features.append(judged(slot))
        if slot.name in last:
            as_id = ids[last[slot.name]][0]
            comment = f"{as_id.comment}: {worth(chosen[as_id.name], found.samples)}"
            features.append(judged(replace(as_id, comment=comment, active=True)))
    names = {slot.name for slot in (*features, *slots.crosses, slots.label, slots.group) if slot is not None}
    texts = {slot.name for slot in features if slot.keys.get("values") == "string"}
    measured = []
    for number, (feature, gain) in enumerate([*found.features, *found.others]):
        keys = entry_of(feature, names, texts)
        names.add(str(keys["name"]))
        measured.append(SlotProposal(keys, worth(gain, found.samples), active=number < len(found.features)))
    crosses = tuple(map(judged, slots.crosses))
    num_numbers = sum(each.active and each.keys.get("kind") == "dense" for each in features)
    changed = replace(slots, features=tuple(features), crosses=crosses, num_numbers=num_numbers)
    return replace(changed, measured=tuple(measured), found=found)


def worth(gain: Gain, samples: int) -> str:
    """A gain in words."""
    return f"{gain.auc:+.4f} AUC on {samples:,} samples, p {gain.p:.4f}"
