"""Which keys of features go together, and with which kind of slot; and the fields of events that slots need. Pure."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from headrace.dataset.formats.generator_columns import RESERVED_COLUMNS
from headrace.dataset.spec.config import AnyPipe, ColumnsPipe, DenseSlot, MetaSlot, SlotEntry, SparseSlot
from headrace.dataset.spec.event_format import EventField, FieldKind
from headrace.dataset.spec.feature_keys import FIELD_SEPARATOR, TimeUnit
from headrace.dataset.spec.schema import Schema, Slot
from headrace.errors import SpecError
from headrace.validation import nearest

PATH = re.compile(r"[^.\s]+(?:\.[^.\s]+)*")
ONE_SOURCE = ("cross", "split", "time", "count", "in")
"""Keys that say what a value is; a slot has at most one."""
OF_CROSS = ("cross", "hash")
"""Keys that a cross may have."""
FITTING: Mapping[str, tuple[str, ...]] = {
    "cross": ("sparse",),
    "split": ("sparse", "dense"),
    "buckets": ("sparse",),
    "hash": ("sparse",),
    "log": ("dense",),
    "scale": ("dense", "float"),
    "in": ("float",),
}
"""The kinds of slots that a key fits, or the types of meta slots; a key that is not listed fits all."""


def check_slot_features(pipe: AnyPipe, entries: Sequence[SlotEntry]) -> None:
    """Raise SpecError at the first key of a slot that does not fit the pipe, the slot, or the other keys."""
    if not isinstance(pipe, ColumnsPipe):
        for number, entry in enumerate(entries):
            for key in entry.feature_keys:
                raise SpecError('needs pipe.kind = "columns"; a pipe command makes its values itself', at(number, key))
        return
    if pipe.explode is not None:
        _check_path(pipe.explode, "pipe.explode")
    for number, entry in enumerate(entries):
        for key, problem in _problems(entry, pipe):
            raise SpecError(problem, at(number, key))
        for key in ("from", "in"):
            if (path := getattr(entry, key)) is not None:
                _check_path(path, at(number, key))
    schema = Schema.of(entries)
    filled = {slot.name for slot in schema.filled}
    for number, entry in enumerate(entries):
        if known := [part for part in entry.cross if part in filled]:
            raise SpecError(
                f"of {known[0]!r}, a history, counters or crosses: the job fills it later", at(number, "cross")
            )
    fields_of(pipe, schema.emitted)


def check_pipe_slots(pipe: AnyPipe, entries: Sequence[SlotEntry]) -> None:
    """Raise SpecError at the first slot whose keys or name do not fit the pipe."""
    check_slot_features(pipe, entries)
    schema = Schema.of(entries)
    if not pipe.traced:
        for number, entry in enumerate(entries):
            if isinstance(entry, SparseSlot) and entry.weighted:
                raise SpecError('weights of signs need protocol = "arrow"', at(number, "weighted"))
        return
    if taken := [name for name in RESERVED_COLUMNS if name in schema.by_name]:
        raise SpecError(f"slot {taken[0]!r}: the arrow protocol reserves this name; rename the slot", "slots")
    for slot in schema.sparse:
        if slot.sparse.weighted and (name := f"{slot.name}.weight") in schema.by_name:
            raise SpecError(f"slot {name!r} has the name of the weights of slot {slot.name!r}; rename it", "slots")


def at(number: int, key: str) -> str:
    """The path of a key of slot entry `number`."""
    return f"slots.{number}.{key}"


def _check_path(path: str, where: str) -> None:
    if not PATH.fullmatch(path):
        raise SpecError(f'{path!r} is not a field: names with dots between, such as "user.id"', where)


def _problems(entry: SlotEntry, pipe: ColumnsPipe) -> Iterator[tuple[str, str]]:
    """Keys that do not fit, each with the reason."""
    keys = entry.feature_keys
    kind = entry.type if isinstance(entry, MetaSlot) else str(getattr(entry, "kind", ""))
    shown = f"a meta slot of type {kind!r}" if isinstance(entry, MetaSlot) else f"a {kind} slot"
    for key in keys:
        if key in FITTING and kind not in FITTING[key]:
            yield key, f"does not fit {shown}; it fits {' and '.join(FITTING[key])} slots"
    if several := [key for key in ONE_SOURCE if key in keys][1:]:
        first = next(key for key in ONE_SOURCE if key in keys)
        yield several[0], f"does not go with {first}: a slot has one of {', '.join(ONE_SOURCE)}"
    if "cross" in keys:
        if len(entry.cross) < 2:
            yield "cross", "needs at least two slots or fields"
        for key in keys:
            if key not in OF_CROSS:
                yield key, "does not go with cross; set it in the slots that are crossed"
    if isinstance(entry, SparseSlot) and (entry.history is not None or entry.pairs):
        for key in keys:
            yield key, f"does not go with {'pairs' if entry.pairs else 'history'}: the job fills this slot"
    if isinstance(entry, DenseSlot) and entry.counters is not None:
        for key in keys:
            yield key, "does not go with counters: the job fills this slot"
    if isinstance(entry, DenseSlot) and entry.statistics is not None:
        for key in keys:
            yield key, "does not go with statistics: the job fills this slot"
    if isinstance(entry, SparseSlot) and entry.weighted:
        yield "weighted", 'is not built for pipe.kind = "columns"; use a pipe command'
    if len(entry.expanded()) > 1:
        for key in ("from", "cross", "in"):
            if key in keys:
                yield key, "is of one slot; give each its own entry with name"
    yield from _of_values(entry, kind, pipe)


def _of_values(entry: SlotEntry, kind: str, pipe: ColumnsPipe) -> Iterator[tuple[str, str]]:
    texts = kind == "string" or (isinstance(entry, SparseSlot) and entry.values == "string")
    keys = entry.feature_keys
    if entry.unit is not None and entry.time is None:
        yield "unit", "is the unit of a time; set time too"
    for key in ("time", "count", "buckets", "scale"):
        if texts and key in keys:
            yield key, "gives a number; the slot's values are text"
    if entry.buckets and list(entry.buckets) != sorted(set(entry.buckets)):
        yield "buckets", "is not a rising list"
    if entry.scale is not None and not math.isfinite(entry.scale):
        yield "scale", "is not a finite number"
    if entry.split == "":
        yield "split", "is empty"
    if isinstance(entry, DenseSlot) and entry.size > 1:
        for key in ("time", "count", "default"):
            if key in keys:
                yield key, f"gives one number; the slot has size = {entry.size}"
    if is_below(entry.members or "", pipe.explode):
        yield "in", f"{entry.members!r} is below pipe.explode; the list is one of the whole event"
    if entry.count and entry.source != pipe.explode and is_below(entry.source or "", pipe.explode):
        yield "count", "is of a list inside the exploded list, and lists inside lists are not read"
    if entry.members is not None and entry.source is None and pipe.explode is None:
        yield "in", "needs from, or pipe.explode: the value that is looked for"
    if entry.default is not None:
        yield from _of_default(entry, kind, texts)


def _of_default(entry: SlotEntry, kind: str, texts: bool) -> Iterator[tuple[str, str]]:
    """`default` is the final value of the slot: behind buckets, log and scale."""
    value = entry.default
    if entry.members is not None:
        yield "default", "does not go with in, which always gives 0 or 1"
    elif texts and not isinstance(value, str):
        yield "default", "is not text; the slot's values are"
    elif not texts and (isinstance(value, str) or value is None):
        yield "default", "is text; the slot's values are numbers"
    elif not texts and kind in ("sparse", "uint64", "int64"):
        low, high = (-(1 << 63), 1 << 63) if kind == "int64" else (0, 1 << 64)
        if isinstance(value, float) or not low <= int(value or 0) < high:
            yield "default", f"is not a whole number from {low} to {high - 1}"


def is_below(path: str, explode: str | None) -> bool:
    """Whether a field is the exploded list, or a field of its elements."""
    return explode is not None and (path == explode or path.startswith(explode + FIELD_SEPARATOR))


def source_of(slot: Slot, explode: str | None) -> str:
    """The field with a slot's values; of a membership test, the value that is looked for."""
    if slot.entry.members is not None and slot.entry.source is None and explode is not None:
        return explode
    return slot.entry.source or slot.name


def fields_of(pipe: ColumnsPipe, schema: Schema) -> tuple[EventField, ...]:
    """The fields of events that the slots need, each once, in order. Raises SpecError if two slots disagree on one."""
    found: dict[str, tuple[EventField, str]] = {}
    tests: list[tuple[str, str, str]] = []
    for slot in schema.slots:
        if slot.entry.cross:
            for part in slot.entry.cross:
                if part not in schema.by_name:
                    _add(found, _part(slot, part), slot.name)
                elif not isinstance(schema.by_name[part].entry, SparseSlot) or schema.by_name[part].entry.cross:
                    known = [each.name for each in schema.sparse if not each.entry.cross]
                    hint = nearest(part, known)
                    raise SpecError(
                        f"slot {slot.name!r}: cross of {part!r}, which is no plain sparse slot; {hint}", "slots"
                    )
        elif slot.entry.members is not None:
            tests.append((source_of(slot, pipe.explode), slot.entry.members, slot.name))
        else:
            _add(found, _field(slot, source_of(slot, pipe.explode)), slot.name)
    if pipe.explode is not None and not any(is_below(path, pipe.explode) for path in found):
        _add(found, EventField(pipe.explode, FieldKind.LENGTH), "pipe.explode")
    for value, members, name in tests:
        both = [found[path][0] for path in (value, members) if path in found]
        model = next((field for field in both if field.kind is not FieldKind.LENGTH), None)
        kind = FieldKind.TEXT if model is None else model.kind
        signed = any(field.signed for field in both)
        _add(found, EventField(value, kind, signed), name)
        _add(found, EventField(members, kind, found[value][0].signed), name)
        _add(found, EventField(value, kind, found[members][0].signed), name)
    return tuple(field for field, _ in found.values())


def _add(found: dict[str, tuple[EventField, str]], field: EventField, name: str) -> None:
    """Add a field, or combine it with what another slot needs of it."""
    old, first = found.setdefault(field.path, (field, name))
    kinds = {old.kind, field.kind} - {FieldKind.LENGTH} or {FieldKind.LENGTH}
    if FieldKind.TEXT in kinds and len(kinds) > 1:
        other = next(each for each in (old, field) if each.kind is not FieldKind.TEXT)
        what = "a whole number" if other.kind is FieldKind.WHOLE else "a number"
        first, second = (first, name) if old.kind is FieldKind.TEXT else (name, first)
        raise SpecError(
            f'field {field.path!r} is text for {first!r} and {what} for {second!r}; set values = "string" in both, '
            "or in neither",
            "slots",
        )
    kind = FieldKind.WHOLE if FieldKind.WHOLE in kinds else kinds.pop()
    signed = kind is FieldKind.WHOLE and (old.signed or field.signed)
    found[field.path] = (replace(field, kind=kind, signed=signed), first)


def _part(slot: Slot, path: str) -> EventField:
    """A field that is a part of a cross."""
    if not PATH.fullmatch(path):
        raise SpecError(f"slot {slot.name!r}: cross of {path!r}, which is neither a slot nor a field", "slots")
    return EventField(path, FieldKind.TEXT if slot.sparse.values == "string" else FieldKind.WHOLE)


def _field(slot: Slot, path: str) -> EventField:
    entry = slot.entry
    if entry.time is not None:
        return EventField(path, FieldKind.TEXT if entry.unit is TimeUnit.ISO else FieldKind.NUMBER)
    if entry.count:
        return EventField(path, FieldKind.LENGTH)
    if entry.split is not None:
        return EventField(path, FieldKind.TEXT)
    match entry:
        case SparseSlot(values="string") | MetaSlot(type="string"):
            return EventField(path, FieldKind.TEXT)
        case SparseSlot(buckets=buckets):
            return EventField(path, FieldKind.NUMBER if buckets else FieldKind.WHOLE)
        case MetaSlot(type="uint64" | "int64" as kind):
            return EventField(path, FieldKind.WHOLE, kind == "int64")
        case _:
            return EventField(path, FieldKind.NUMBER)
