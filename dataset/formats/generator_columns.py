"""Turns the samples of `generate` (mappings from slot to values) into columns of many samples, or MultiSlot lines.

A generator runs this for every value of a stream, so it works by column: one list per slot, no call per value. Heavy
imports are inside the functions, as in dataset.formats.generator_answers.
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
"""Types of values that need no sequence around them."""
STAYS = LONE | {tuple, type(None)}
"""Immutable types."""
MAX_LAYOUTS = 1024
"""Most combinations of types whose layout is kept; beyond that, all are forgotten."""
RESERVED_COLUMNS = ("event", "error")
"""Columns of the answers in the Arrow protocol that are not slots."""
MAX_LISTED = 200
"""Most slots that the note of an error lists."""


Row = list[Any]
"""For each slot, and its weights if it has them: a value or a tuple of values; None if left out."""


class GeneratorSlot(NamedTuple):
    """A slot as a generator sees it."""

    name: str
    kind: str
    """"sparse", "dense" or "meta"."""
    type: str
    """"uint64" or "string"; of meta slots also "float" and "int64"."""
    size: int
    """Floats of a dense slot; for a sparse slot, 1 if its signs carry weights, else 0."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its column, and of the column of its weights if it has one."""
        return (self.name, f"{self.name}.weight") if self.kind == "sparse" and self.size else (self.name,)


class JobSlots(NamedTuple):
    """The slots in the order of the spec, and what happens to other columns."""

    slots: tuple[GeneratorSlot, ...]
    drop: bool
    """pipe.extra = "drop": other columns are left out; else they are an error."""


def slots_of_job(spec: str | None) -> JobSlots | None:
    """The slots of the file `spec`, or those that the pipe passed in the environment; None without either."""
    passed = os.environ.get("HEADRACE_SLOTS")
    if spec is None and passed is not None:
        plain = passed if passed.startswith("[") else zlib.decompress(base64.b64decode(passed))
        slots = tuple(GeneratorSlot(*each) for each in json.loads(plain))
        return JobSlots(slots, os.environ.get("HEADRACE_EXTRA") == "drop")
    path = spec or os.environ.get("HEADRACE_SPEC")
    if path is None:
        return None
    # Imported here, because pydantic is slow to import and a pipe passes the slots.
    from headrace.dataset.spec.stream_spec import read_slots

    schema, drop = read_slots(Path(path))
    return JobSlots(tuple(GeneratorSlot(*slot.shape) for slot in schema.slots), drop)


def values_of(value: Any) -> Sequence[Any]:
    """The values of a slot as a sequence: a lone value becomes one, None becomes none."""
    if isinstance(value, list | tuple):
        return value
    if value is None:
        return ()
    if isinstance(value, str | bytes | int | float) or not hasattr(value, "tolist"):
        return (value,)
    listed = value.tolist()  # a NumPy array or scalar
    return listed if isinstance(listed, list) else (listed,)


def unknown_slots(unknown: Iterable[str], slots: Sequence[GeneratorSlot]) -> ValueError:
    """The error for names that are not slots; its note lists the slots and is printed once."""
    import difflib

    known = [slot.name for slot in slots]
    first, *more = unknown
    near = difflib.get_close_matches(first, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    names = f"{first!r} and {len(more)} more are not slots" if more else f"{first!r} is not a slot"
    error = ValueError(f'{names}; {hint}pipe.extra = "drop" ignores such columns')
    listed = ", ".join(known[:MAX_LISTED]) + (f" and {len(known) - MAX_LISTED} more" if len(known) > MAX_LISTED else "")
    error.add_note(f"the spec has slots {listed}")
    return error


class _Layout(NamedTuple):
    """The work on samples whose values have the same types."""

    num_given: int
    """Number of names that have a value."""
    lists: tuple[int, ...]
    """Places of lists. They are copied, because the generator may change them."""
    others: tuple[int, ...]
    """Places of other values that the generator may change, such as arrays."""
    counted: tuple[tuple[int, str, str, int], ...]
    """Place, name, kind and size of the slots whose number of values is checked."""


class SampleReader:
    """Turns samples into rows: the values of every slot, and of its weights, in the order of the spec.

    A row is a copy, so a generator may yield the same mapping again and again.
    """

    def __init__(self, slots: Sequence[GeneratorSlot], drop: bool) -> None:
        self._slots, self._drop = slots, drop
        self._names = tuple(name for slot in slots for name in slot.names)
        self._fixed = tuple(
            (self._names.index(slot.name), slot.name, slot.kind, slot.size) for slot in slots if slot.kind != "sparse"
        )
        self._layouts: dict[tuple[type, ...], _Layout] = {}
        self._types: tuple[type, ...] = ()
        """Types of the last sample's values; the next sample often has the same, and comparing is less than hashing."""
        self._layout = _Layout(0, (), (), ())

    def __call__(self, sample: Mapping[str, Any]) -> Row:
        """Raises ValueError if a sample has unknown slots, lacks a dense slot, or has a wrong number of values."""
        row: Row = list(map(sample.get, self._names))
        types = tuple(map(type, row))
        if types != self._types:
            self._types, self._layout = types, self._layouts.get(types) or self._layout_of(types)
        num_given, lists, others, counted = self._layout
        for place in lists:
            row[place] = tuple(row[place])
        for place in others:
            row[place] = tuple(values_of(row[place]))
        if len(sample) != num_given and not self._drop:
            self._check_names(sample)
        for place, name, kind, size in counted:
            value = row[place]
            num = 1 if type(value) in LONE else 0 if value is None else len(value)
            if num != size and (num or kind == "dense"):
                if name not in sample:
                    raise ValueError(f"dense slot {name!r} is missing")
                raise ValueError(f"{kind} slot {name!r} has {num} values instead of {size}")
        return row

    def _layout_of(self, types: tuple[type, ...]) -> _Layout:
        if len(self._layouts) >= MAX_LAYOUTS:
            self._layouts.clear()
        lists = tuple(place for place, kind in enumerate(types) if kind is list)
        others = tuple(place for place, kind in enumerate(types) if kind not in STAYS and kind is not list)
        counted = tuple(each for each in self._fixed if each[-1] != 1 or types[each[0]] not in LONE)
        layout = self._layouts[types] = _Layout(len(types) - types.count(type(None)), lists, others, counted)
        return layout

    def _check_names(self, sample: Mapping[str, Any]) -> None:
        known = {*self._names, *(f"{slot.name}.weight" for slot in self._slots)}
        if unknown := [name for name in sample if name not in known]:
            raise unknown_slots(unknown, self._slots)


def flattened(column: Sequence[Any]) -> tuple[list[Any], list[int] | None]:
    """A slot's values of all rows, concatenated, and the number in each row; None if every row has one."""
    kinds = set(map(type, column))
    if kinds <= LONE:
        return list(column), None
    if kinds != {tuple}:
        column = list(map(values_of, column))
    lengths = list(map(len, column))
    values = list(chain.from_iterable(column))
    return values, None if set(lengths) == {1} else lengths


def _by_slot(slots: Sequence[GeneratorSlot], rows: Sequence[Row]) -> Iterator[tuple[GeneratorSlot, Sequence[Any]]]:
    """Each slot with its column, and again with the column of its weights if it has one."""
    columns = iter(zip(*rows, strict=True) if rows else [()] * sum(len(slot.names) for slot in slots))
    for slot in slots:
        for _ in slot.names:
            yield slot, next(columns)


def columns_of(slots: Sequence[GeneratorSlot], rows: Sequence[Row], events: list[int]) -> dict[str, Any]:
    """Rows as columns for `dataset.formats.generator_answers.answer_of`; `events` is the event of each. ValueError for
    bad weights."""
    columns: dict[str, Any] = {"event": events}
    for slot, column in _by_slot(slots, rows):
        if slot.name in columns:
            columns[f"{slot.name}.weight"] = _weights(slot, column, columns[slot.name])
            continue
        values, lengths = flattened(column)
        if slot.kind == "sparse":
            columns[slot.name] = values if lengths is None else (values, lengths)
        elif slot.kind == "meta" and lengths is not None:  # some values are absent
            rest = iter(values)
            columns[slot.name] = [next(rest) if length else None for length in lengths]
        else:
            columns[slot.name] = values
    return columns


def _weights(slot: GeneratorSlot, column: Sequence[Any], signs: Any) -> tuple[list[Any], list[int]]:
    """The weights of a slot's signs; 1 each in a row without weights."""
    lengths = signs[1] if isinstance(signs, tuple) else [1] * len(column)
    weights = [(1.0,) * n if each is None else values_of(each) for each, n in zip(column, lengths, strict=True)]
    for each, length in zip(weights, lengths, strict=True):
        if len(each) != length:
            raise ValueError(f"slot {slot.name!r} has {length} signs and {len(each)} weights")
    return list(chain.from_iterable(weights)), lengths


def without_extra(columns: Mapping[str, Any], slots: Sequence[GeneratorSlot]) -> dict[str, Any]:
    """Only the columns that are slots or belong to the protocol."""
    known = {"event", *(name for slot in slots for name in slot.names)}
    return {name: column for name, column in columns.items() if name in known}


def text_of(value: Any) -> str:
    """A value as a token. Raises ValueError for a text with blanks, since a blank ends a token."""
    if isinstance(value, str):
        if not value or any(c in " \t\r\n" for c in value):
            raise ValueError(f"{value!r} is empty or contains blanks: MultiSlot text cannot carry it")
        return value
    if isinstance(value, bool):
        return str(int(value))
    return str(value) if isinstance(value, int) else repr(float(value))


def lines_of(slots: Sequence[GeneratorSlot], rows: Sequence[Row]) -> list[str]:
    """Rows as MultiSlot lines without line feeds. Raises ValueError if text cannot carry a value."""
    columns: list[list[str]] = []
    last = None
    for slot, column in _by_slot(slots, rows):
        if slot is last:  # weights; this protocol has none
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
    lines = [" ".join(row) for row in zip(*columns, strict=True)]
    "".join(lines).encode()  # a ValueError for half a surrogate pair, which is no text
    return lines


def error_line(error: str) -> str:
    """The line that rejects an event in the MultiSlot protocol: the parser takes the text after `!` as the reason."""
    return "!" + " ".join(error.split())
