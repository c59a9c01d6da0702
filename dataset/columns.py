"""Samples, each a mapping from slot to values, as columns of many samples: what `generate` gives, made ready to write.

A generator runs this for every value of a stream, so it works by column: a list a slot, no call a value. Imports little
and late, as dataset.answers does.
"""

import base64
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

LONE = frozenset((int, float, str, bytes, bool))
"""Types of values that may stand without a sequence around them."""
STAYS = LONE | {tuple, type(None)}
"""Types of what does not change once it is given."""
MAX_LISTED = 200
"""Slots that a note of an error lists."""


Row = list[Any]
"""A value or a tuple of values for each slot, and for its weights where it has them; None where they are left out."""


class SlotShape(NamedTuple):
    """What a generator must know of a slot."""

    name: str
    kind: str
    """"sparse", "dense" or "meta"."""
    type: str
    """"uint64" or "string"; of meta slots also "float" and "int64"."""
    size: int
    """Floats of a dense slot; of a sparse one, 1 where its signs carry weights."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of its column, and of that of its weights where signs carry them."""
        return (self.name, f"{self.name}.weight") if self.kind == "sparse" and self.size else (self.name,)


class JobSlots(NamedTuple):
    """Slots in the order of the spec, and what happens to columns that are none."""

    slots: tuple[SlotShape, ...]
    drop: bool
    """pipe.extra = "drop": they are left out; else they are an error."""


def slots_of_job(spec: str | None) -> JobSlots | None:
    """Slots of the file `spec`, or as the pipe that started us says; None where none does."""
    told = os.environ.get("MILLRACE_SLOTS")
    if spec is None and told is not None:
        plain = told if told.startswith("[") else zlib.decompress(base64.b64decode(told))
        slots = tuple(SlotShape(*each) for each in json.loads(plain))
        return JobSlots(slots, os.environ.get("MILLRACE_EXTRA") == "drop")
    path = spec or os.environ.get("MILLRACE_SPEC")
    if path is None:
        return None
    # Only here, where nobody waits for a process to start: pydantic takes a moment.
    from dataset.spec import read_slots

    schema, drop = read_slots(Path(path))
    return JobSlots(tuple(SlotShape(*slot.shape) for slot in schema.slots), drop)


def values_of(value: Any) -> Sequence[Any]:
    """The values of a slot: a sequence as it is, a lone value as one, None as none."""
    if isinstance(value, list | tuple):
        return value
    if value is None:
        return ()
    if isinstance(value, str | bytes | int | float) or not hasattr(value, "tolist"):
        return (value,)
    listed = value.tolist()  # a NumPy array or scalar
    return listed if isinstance(listed, list) else (listed,)


def no_slot(unknown: Iterable[str], slots: Sequence[SlotShape]) -> ValueError:
    """The error for names that are no slots; the slots themselves are a note, which is printed once."""
    import difflib

    known = [slot.name for slot in slots]
    first, *more = unknown
    near = difflib.get_close_matches(first, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    names = f"{first!r} and {len(more)} more are no slots" if more else f"{first!r} is no slot"
    error = ValueError(f'{names}; {hint}pipe.extra = "drop" leaves out what is none')
    listed = ", ".join(known[:MAX_LISTED]) + (f" and {len(known) - MAX_LISTED} more" if len(known) > MAX_LISTED else "")
    error.add_note(f"the spec has slots {listed}")
    return error


class SampleReader:
    """Samples as rows: the values of every slot, and of its weights, in the order of the spec; None where left out.

    A row does not change when its sample does: a generator may yield one mapping again and again.
    """

    def __init__(self, slots: Sequence[SlotShape], drop: bool) -> None:
        self._slots, self._drop = slots, drop
        self._names = tuple(name for slot in slots for name in slot.names)
        self._fixed = tuple(
            (self._names.index(slot.name), slot.name, slot.kind, slot.size) for slot in slots if slot.kind != "sparse"
        )

    def __call__(self, sample: Mapping[str, Any]) -> Row:
        """Raises ValueError where a sample has what is no slot, lacks a dense slot, or has too many or few values."""
        row = [
            tuple(value) if type(value) is list else value if type(value) in STAYS else tuple(values_of(value))
            for value in map(sample.get, self._names)
        ]
        if len(sample) + row.count(None) != len(row) and not self._drop:
            known = {*self._names, *(f"{slot.name}.weight" for slot in self._slots)}
            if unknown := [name for name in sample if name not in known]:
                raise no_slot(unknown, self._slots)
        for place, name, kind, size in self._fixed:
            value = row[place]
            num = 1 if type(value) in LONE else 0 if value is None else len(value)
            if num != size and (num or kind == "dense"):
                if name not in sample:
                    raise ValueError(f"dense slot {name!r} is missing")
                raise ValueError(f"{kind} slot {name!r} has {num} values instead of {size}")
        return row


def flattened(column: Sequence[Any]) -> tuple[list[Any], list[int] | None]:
    """A slot's values in all rows, one after the other, and how many each row has: None where each has one."""
    kinds = set(map(type, column))
    if kinds <= LONE:
        return list(column), None
    if kinds != {tuple}:
        column = list(map(values_of, column))
    lengths = list(map(len, column))
    values = list(chain.from_iterable(column))
    return values, None if set(lengths) == {1} else lengths


def _by_slot(slots: Sequence[SlotShape], rows: Sequence[Row]) -> Iterator[tuple[SlotShape, Sequence[Any]]]:
    """Each slot and its column, and again with the column of its weights, where it has them."""
    columns = iter(zip(*rows, strict=True) if rows else [()] * sum(len(slot.names) for slot in slots))
    for slot in slots:
        for _ in slot.names:
            yield slot, next(columns)


def columns_of(slots: Sequence[SlotShape], rows: Sequence[Row], events: list[int]) -> dict[str, Any]:
    """Rows as `dataset.answers.answer_of` takes them; `events` tells the event of each. ValueError for bad weights."""
    columns: dict[str, Any] = {"event": events}
    for slot, column in _by_slot(slots, rows):
        if slot.name in columns:
            columns[f"{slot.name}.weight"] = _weights(slot, column, columns[slot.name])
            continue
        values, lengths = flattened(column)
        if slot.kind == "sparse":
            columns[slot.name] = values if lengths is None else (values, lengths)
        elif slot.kind == "meta" and lengths is not None:  # where it is absent
            rest = iter(values)
            columns[slot.name] = [next(rest) if length else None for length in lengths]
        else:
            columns[slot.name] = values
    return columns


def _weights(slot: SlotShape, column: Sequence[Any], signs: Any) -> tuple[list[Any], list[int]]:
    """Weights of a slot's signs; 1 each in a row that has none."""
    lengths = signs[1] if isinstance(signs, tuple) else [1] * len(column)
    weights = [(1.0,) * n if each is None else values_of(each) for each, n in zip(column, lengths, strict=True)]
    for each, length in zip(weights, lengths, strict=True):
        if len(each) != length:
            raise ValueError(f"slot {slot.name!r} has {length} signs and {len(each)} weights")
    return list(chain.from_iterable(weights)), lengths


def without_extra(columns: Mapping[str, Any], slots: Sequence[SlotShape]) -> dict[str, Any]:
    """The columns that are slots or the protocol's own."""
    known = {"event", *(name for slot in slots for name in slot.names)}
    return {name: column for name, column in columns.items() if name in known}


def text_of(value: Any) -> str:
    """A value as a token. Raises ValueError where a text holds blanks, which end a token."""
    if isinstance(value, str):
        if not value or any(c in " \t\r\n" for c in value):
            raise ValueError(f"{value!r} is empty or holds blanks: MultiSlot text cannot carry it")
        return value
    if isinstance(value, bool):
        return str(int(value))
    return str(value) if isinstance(value, int) else repr(float(value))


def lines_of(slots: Sequence[SlotShape], rows: Sequence[Row]) -> list[str]:
    """Rows as MultiSlot lines, without their line feeds. Raises ValueError where text cannot carry one."""
    columns: list[list[str]] = []
    last = None
    for slot, column in _by_slot(slots, rows):
        if slot is last:  # weights, which this protocol lacks
            continue
        last = slot
        values, lengths = flattened(column)
        words = list(map(str if set(map(type, values)) == {int} else text_of, values))
        if lengths is None:
            columns.append([f"1 {word}" for word in words])
            continue
        texts, at = [], 0
        for length in lengths:
            texts.append(" ".join((str(length), *words[at : at + length])))
            at += length
        columns.append(texts)
    return [" ".join(row) for row in zip(*columns, strict=True)]


def error_line(error: str) -> str:
    """The line that rejects an event in the MultiSlot protocol: our parser takes what follows `!` as the reason."""
    return "!" + " ".join(error.split())
