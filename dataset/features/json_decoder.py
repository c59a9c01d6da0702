"""Decodes events that are JSON objects.

Many events are read at once by Arrow's reader, with the types of one layout. Events of another form, and bad ones, are
read exactly, as Python values; and so are those between them where they are frequent, so that a stream whose types
alternate is read at the speed of Python. A layout decides the speed only: each event gets the same fields by every
layout that can read it, because a layout has only types whose values convert as dataset.features.conversion says.

Shapes: E events.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
from numpy.typing import NDArray

from headrace import documents
from headrace.dataset.features.conversion import as_lists, conform, is_list
from headrace.dataset.features.plain_rows import Unreadable, decoded_of
from headrace.dataset.spec.event_format import Decoded, EventField, FieldKind
from headrace.dataset.spec.feature_keys import FIELD_SEPARATOR
from headrace.dataset.stream.event_values import find_single_objects

OBSERVED = 16
"""Events that are looked at to find a layout."""
LIST, OBJECT = "list", "object"
FEW = 32
"""Events of which a reading by a layout is no quicker than one by one."""
MAX_TRIES = 32
"""Most halvings of a block whose reader does not say which event does not fit."""
FITS = re.compile(r" in row (\d+)$")
"""The end of Arrow's error for an event, by its number."""
MAX_BLOCK_BYTES = (1 << 31) - 2
"""Longest text that Arrow's reader takes at once; a longer block is halved."""


@dataclass(frozen=True)
class Layout:
    """The types by which Arrow's reader is told to read the fields."""

    lists: frozenset[str]
    """Paths whose value is a list."""
    types: tuple[pa.DataType, ...]
    """The type of each field's values."""
    schema: pa.Schema
    """The explicit schema of the reader."""


class JsonDecoder:
    """A `dataset.spec.event_format.Decoder` of JSON objects. Any thread may call it."""

    def __init__(self, fields: Sequence[EventField]) -> None:
        self._fields = tuple(fields)
        self._layout = layout_of(self._fields, {})

    def decode(self, events: pa.BinaryArray) -> Decoded:
        """The fields of the events; see dataset.spec.event_format.Decoder."""
        fit_E = np.zeros(len(events), np.bool_)
        offset_E1, data, buffer = _parts(events)
        find_single_objects(data, offset_E1[:-1], offset_E1[1:], documents.MAX_DEPTH, fit_E)
        fit_E &= _valid_texts(events)
        pieces: list[tuple[int, Decoded]] = []
        for begin, end, fit in _runs(fit_E):
            if fit:
                pieces += self._read(events, buffer, offset_E1, begin, end)
            else:
                pieces.append((begin, self._plainly(events, begin, end)))
        return merged(pieces, self._fields)

    def _read(
        self, events: pa.BinaryArray, buffer: pa.Buffer, offset_E1: NDArray[np.int64], begin: int, end: int
    ) -> Iterator[tuple[int, Decoded]]:
        """The events `begin` to `end`, in pieces, each with its first event.

        Where one does not fit the layout, those before it are read at once, and it is read plainly. Where the next that
        does not fit is near, another layout is tried, and then twice as many are read plainly as the time before.
        """
        at, stop, plain, tries = begin, end, 1, MAX_TRIES
        while at < end:
            text = buffer.slice(int(offset_E1[at]), int(offset_E1[stop] - offset_E1[at]))
            found, fits = self._try(text, stop - at, self._layout)
            if found is not None:
                yield at, found
                at, stop, plain = stop, end, plain if stop - at < FEW else 1
                continue
            if fits is None and stop - at > FEW and (tries or text.size > MAX_BLOCK_BYTES):
                tries -= 1
                stop = at + (stop - at) // 2
                continue
            if (fits or 0) >= FEW:
                stop = at + (fits or 0)
                continue
            if plain > 1 and self._adapts(events, buffer, offset_E1, at, end):
                stop, plain = end, 1
                continue
            stop = min(end, at + (fits or 0) + plain)
            yield at, self._plainly(events, at, stop)
            at, stop, plain = stop, end, 2 * plain

    def _adapts(
        self, events: pa.BinaryArray, buffer: pa.Buffer, offset_E1: NDArray[np.int64], at: int, end: int
    ) -> bool:
        """Whether the layout of the next events, which is then taken, reads more of them than the present one."""
        layout = layout_of(self._fields, _observed(events, at, min(end, at + OBSERVED), self._fields))
        if layout == self._layout:
            return False
        stop = min(end, at + FEW)
        text = buffer.slice(int(offset_E1[at]), int(offset_E1[stop] - offset_E1[at]))
        if self._try(text, stop - at, layout)[0] is None:
            return False
        self._layout = layout
        return True

    def _try(self, text: pa.Buffer, num_events: int, layout: Layout) -> tuple[Decoded | None, int | None]:
        """The fields of a text of `num_events` objects. None if an event does not fit the layout; then also how many
        do before it, if Arrow says so."""
        if not layout.schema.names or text.size > MAX_BLOCK_BYTES:
            return None, None
        try:
            table = pa.json.read_json(
                pa.BufferReader(text),
                read_options=pa.json.ReadOptions(use_threads=False, block_size=text.size + 1),
                parse_options=pa.json.ParseOptions(explicit_schema=layout.schema, unexpected_field_behavior="ignore"),
            )
        except pa.ArrowInvalid as misfit:
            where = FITS.search(str(misfit))
            return None, min(int(where[1]), num_events - 1) if where else None
        if len(table) != num_events:
            return None, None
        columns, errors = [], dict[int, str]()
        for field in self._fields:
            column, wrong = conform(_column(table, field.names), field)
            columns.append(column)
            for event, error in wrong:
                errors.setdefault(event, error)
        fields = pa.RecordBatch.from_arrays(columns, names=[field.path for field in self._fields])
        return Decoded(fields, sorted(errors.items())), None

    def _plainly(self, events: pa.BinaryArray, begin: int, end: int) -> Decoded:
        return decoded_of([_parsed(event) for event in events[begin:end].to_pylist()], self._fields)


def _parsed(event: bytes | None) -> Mapping[str, Any] | Unreadable:
    try:
        text = (event or b"").decode()
    except UnicodeDecodeError as error:
        return Unreadable(f"not UTF-8: {error}")
    try:
        found = documents.parse(text, "the event")
    except documents.InvalidDocument as error:
        return Unreadable(str(error))
    return found if isinstance(found, Mapping) else Unreadable("the event is not a JSON object")


def _parts(events: pa.BinaryArray) -> tuple[NDArray[np.int64], NDArray[np.uint8], pa.Buffer]:
    """(E + 1,) offsets, the bytes, and their buffer, of an array without nulls."""
    _, offsets, buffer = events.buffers()
    if not len(events) or buffer is None:
        return np.zeros(len(events) + 1, np.int64), np.empty(0, np.uint8), pa.py_buffer(b"")
    wide = pa.types.is_large_binary(events.type)
    offset_E1 = np.frombuffer(offsets, np.int64 if wide else np.int32)[events.offset : events.offset + len(events) + 1]
    data = np.frombuffer(buffer, np.uint8) if buffer.size else np.empty(0, np.uint8)
    data.setflags(write=False)
    return offset_E1.astype(np.int64), data, buffer


def _valid_texts(events: pa.BinaryArray) -> NDArray[np.bool_]:
    """(E,) whether an event is valid UTF-8."""
    try:
        events.cast(pa.utf8())
    except pa.ArrowInvalid:
        return np.array([_is_text(event.as_py()) for event in events], np.bool_)
    return np.ones(len(events), np.bool_)


def _is_text(event: bytes | None) -> bool:
    try:
        (event or b"").decode()
    except UnicodeDecodeError:
        return False
    return True


def _runs(fit_E: NDArray[np.bool_]) -> Iterator[tuple[int, int, bool]]:
    """Ranges of events that fit, and of events that do not."""
    cuts = [0, *(np.flatnonzero(np.diff(fit_E)) + 1).tolist(), len(fit_E)]
    for begin, end in zip(cuts[:-1], cuts[1:], strict=True):
        if end > begin:
            yield begin, end, bool(fit_E[begin])


def merged(pieces: Sequence[tuple[int, Decoded]], fields: Sequence[EventField]) -> Decoded:
    """One answer from those of ranges of events, each given with its first event."""
    if len(pieces) == 1:
        return pieces[0][1]
    if not pieces:
        return decoded_of([], fields)
    errors = [(begin + event, error) for begin, piece in pieces for event, error in piece.errors]
    columns = []
    for index in range(len(fields)):
        parts = [piece.fields.column(index) for _, piece in pieces]
        if any(is_list(part.type) for part in parts):
            parts = [as_lists(part) for part in parts]
        columns.append(pa.concat_arrays(parts))
    return Decoded(pa.RecordBatch.from_arrays(columns, names=[field.path for field in fields]), errors)


def _column(table: pa.Table, names: Sequence[str]) -> pa.Array:
    """The column at a path; a list of structs on the way gives lists."""
    chunked = table.column(names[0])
    column = chunked.chunk(0) if chunked.num_chunks == 1 else chunked.combine_chunks()
    for number, name in enumerate(names[1:], 1):
        if pa.types.is_struct(column.type):
            column = pc.struct_field(column, name)
            continue
        inner = pa.table({"": column.values})
        values = _column(inner, ("", *names[number:]))
        mask = column.is_null() if column.null_count else None
        return pa.ListArray.from_arrays(column.offsets, values, mask=mask)
    return column


Found = dict[str, str | type]
"""The values of events by path: LIST, OBJECT, or the type of a value. Elements of a list are at its path + "[]"."""


def _observed(events: pa.BinaryArray, begin: int, end: int, fields: Sequence[EventField]) -> Found:
    found: Found = {}
    for event in events[begin:end]:
        parsed = _parsed(event.as_py())
        for field in fields if not isinstance(parsed, Unreadable) else ():
            _look(parsed, field.names, "", found)
    return found


def _look(node: Any, names: Sequence[str], path: str, found: Found) -> None:
    if node is None:
        return
    if isinstance(node, list):
        found.setdefault(path, LIST)
        for each in node[:OBSERVED]:
            if not isinstance(each, list):
                _look(each, names, f"{path}[]", found)
    elif isinstance(node, Mapping):
        found.setdefault(path, OBJECT)
        if names:
            _look(node.get(names[0]), names[1:], f"{path}{FIELD_SEPARATOR}{names[0]}", found)
    else:
        found.setdefault(path, type(node))


def layout_of(fields: Sequence[EventField], found: Found) -> Layout:
    """The layout for events with what was found in some."""
    lists: list[str] = []
    types: list[pa.DataType] = []
    tree: dict[str, Any] = {}
    for field in fields:
        path, node = "", tree
        for name in field.names:
            path += f"{FIELD_SEPARATOR}{name}"
            node = node.setdefault(name, {})
            if found.get(path) == LIST:
                lists.append(path)
                path += "[]"
        seen = found.get(path)
        kind = pa.struct([]) if seen == OBJECT else _type(field, seen)
        types.append(kind)
        node.setdefault("", kind)
    schema = pa.schema([(name, _arrow(below, f"{FIELD_SEPARATOR}{name}", lists)) for name, below in tree.items()])
    return Layout(frozenset(lists), tuple(types), schema)


def _arrow(node: Mapping[str, Any], path: str, lists: Sequence[str]) -> pa.DataType:
    listed = path in lists
    inner = f"{path}[]" if listed else path
    below = [(name, _arrow(each, f"{inner}{FIELD_SEPARATOR}{name}", lists)) for name, each in node.items() if name]
    kind = pa.struct(below) if below else node[""]
    return pa.list_(kind) if listed else kind


def _type(field: EventField, seen: str | type | None) -> pa.DataType:
    """The type by which values of a Python type are read, so that they convert exactly."""
    if seen is str:
        return pa.utf8()
    if seen is bool:
        return pa.bool_()
    match field.kind:
        case FieldKind.WHOLE | FieldKind.NUMBER:
            return field.type
        case FieldKind.TEXT:
            return pa.int64() if seen is int else pa.utf8()
        case FieldKind.LENGTH:
            return pa.float64()
