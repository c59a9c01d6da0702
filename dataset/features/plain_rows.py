"""Fields of events that are Python values, row by row: exact, and slow; other decoders may use it.

For formats whose library gives one event at a time, and where columns cannot be read.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from headrace.dataset.features.conversion import BadValue, plain_value
from headrace.dataset.spec.event_format import Decoded, EventField, FieldKind

MAX_LISTED = 1 << 20
"""Most elements of a list in an event; an event with more is rejected."""


class Unreadable:
    """An event that could not be read; `error` says why."""

    def __init__(self, error: str) -> None:
        self.error = error


def decoded_of(events: Sequence[Mapping[str, Any] | Unreadable], fields: Sequence[EventField]) -> Decoded:
    """The fields of the events. A value that its field cannot take rejects its event."""
    errors: list[tuple[int, str]] = []
    rows: list[Sequence[Any]] = []
    nothing, named = (None,) * len(fields), [(field, field.names) for field in fields]
    for number, event in enumerate(events):
        if isinstance(event, Unreadable):
            errors.append((number, event.error))
            rows.append(nothing)
            continue
        try:
            rows.append([field_of(event, field, names) for field, names in named])
        except BadValue as error:
            errors.append((number, str(error)))
            rows.append(nothing)
    columns = zip(*rows, strict=True) if rows else [()] * len(fields)
    arrays = [_array(column, field) for column, field in zip(columns, fields, strict=True)]
    if not arrays:
        return Decoded(pa.RecordBatch.from_struct_array(pa.array([{}] * len(events), pa.struct([]))), errors)
    return Decoded(pa.RecordBatch.from_arrays(arrays, names=[field.path for field in fields]), errors)


def field_of(event: Mapping[str, Any], field: EventField, names: Sequence[str]) -> Any:
    """A field of an event: a value, a list of values and None, or None. `names`: those of its path. Raises BadValue,
    which names the field."""
    try:
        found = _at(event, names) if len(names) > 1 else event.get(names[0])
        if isinstance(found, list):
            if len(found) > MAX_LISTED:
                raise BadValue(f"a list of {len(found):,} elements; at most {MAX_LISTED:,}")
            if field.kind is FieldKind.LENGTH:
                return len(found)
            return [None if value is None else plain_value(value, field) for value in found]
        return None if found is None else plain_value(found, field)
    except BadValue as error:
        raise BadValue(f"field {field.path!r}: {error}") from None


def _at(node: Any, names: Sequence[str]) -> Any:
    if node is None or (not names and not isinstance(node, list)):
        return node
    if isinstance(node, list):
        if not names:
            return node
        found = [_at(each, names) for each in node]
        if any(isinstance(each, list) for each in found):
            raise BadValue("a list inside a list")
        return found
    if not isinstance(node, Mapping):
        raise BadValue(f"{names[0]!r} is looked for in a value that is no object")
    return _at(node.get(names[0]), names[1:])


def _array(column: Sequence[Any], field: EventField) -> pa.Array:
    if any(isinstance(value, list) for value in column):
        lists = [value if value is None or isinstance(value, list) else [value] for value in column]
        return pa.array(lists, pa.list_(field.type))
    return pa.array(column, field.type)
