"""The generator's side of the Arrow protocol: columns to answers, and answers to rows.

Heavy imports are inside the functions, because a MultiSlot generator starts once for each segment.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.dataset.formats.generator_columns import GeneratorSlot, Row, unknown_slots

if TYPE_CHECKING:
    import pyarrow as pa

NOT_UTF8 = "not UTF-8"
"""An error text with this prefix is counted under this reason."""


def error_text(error: BaseException) -> str:
    """The error text of an event whose generation raised `error`; half a surrogate pair in it is escaped."""
    kind = NOT_UTF8 if isinstance(error, UnicodeDecodeError) else type(error).__name__
    return f"{kind}: {error}".encode(errors="backslashreplace").decode()


def answer_schema(slots: Sequence[GeneratorSlot]) -> "pa.Schema":
    """The schema of the answers that our generators write."""
    import pyarrow as pa

    types = {"float": pa.float32(), "uint64": pa.uint64(), "int64": pa.int64(), "string": pa.utf8()}
    fields = [pa.field("event", pa.int32()), pa.field("error", pa.utf8())]
    for slot in slots:
        if slot.kind == "sparse":
            fields.append(pa.field(slot.name, pa.list_(types[slot.type])))
            if slot.size:
                fields.append(pa.field(f"{slot.name}.weight", pa.list_(pa.float32())))
        elif slot.kind == "dense":
            fields.append(pa.field(slot.name, pa.list_(pa.float32(), slot.size)))
        else:
            fields.append(pa.field(slot.name, types[slot.type]))
    return pa.schema(fields)


def answer_of(slots: Sequence[GeneratorSlot], columns: Mapping[str, Any], schema: "pa.Schema") -> "pa.RecordBatch":
    """Columns (see DataGenerator.generate_columns) as an answer without errors.

    Raises ValueError (also pyarrow's) if they do not fit the slots or each other.
    """
    import pyarrow as pa

    if unknown := [name for name in columns if name not in schema.names]:
        raise unknown_slots(unknown, slots)
    event = pa.array(columns["event"], pa.int32())
    arrays = [event, pa.nulls(len(event), pa.utf8())]
    for slot in slots:
        if slot.name not in columns:
            raise ValueError(f"column {slot.name!r} is missing")
        try:
            arrays.append(_array(columns[slot.name], schema.field(slot.name).type, len(event)))
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise ValueError(f"slot {slot.name!r}: {error}{_hint(slot, columns[slot.name])}") from None
        if slot.kind == "sparse" and slot.size:
            weights = columns.get(f"{slot.name}.weight")
            empty = pa.nulls(len(event), pa.list_(pa.float32()))
            kind = schema.field(f"{slot.name}.weight").type
            arrays.append(_array(weights, kind, len(event)) if weights is not None else empty)
    for field, array in zip(schema, arrays, strict=True):
        if len(array) != len(event):
            raise ValueError(f"column {field.name!r} has {len(array)} rows, column 'event' {len(event)}")
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _hint(slot: GeneratorSlot, column: Any) -> str:
    """A hint for a user who gives text where numbers are expected."""
    values = column[0] if isinstance(column, tuple) else column
    if slot.kind == "sparse" and slot.type == "uint64" and any(isinstance(value, str) for value in values):
        return '; for text, set values = "string" in the slot of the job file'
    return ""


def _array(column: Any, kind: "pa.DataType", num_rows: int) -> "pa.Array":
    """One column as an Arrow array."""
    import numpy as np
    import pyarrow as pa

    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if isinstance(column, pa.Array):
        return column.cast(kind)
    if pa.types.is_fixed_size_list(kind):
        values = np.ascontiguousarray(column, np.float32).reshape(-1)
        return pa.FixedSizeListArray.from_arrays(pa.array(values), kind.list_size)
    if not pa.types.is_list(kind):
        return pa.array(column, kind)
    if isinstance(column, tuple):
        values, lengths = column
    else:
        values = column
        width = column.shape[1] if getattr(column, "ndim", 1) == 2 else 1
        values = column.reshape(-1) if width != 1 or getattr(column, "ndim", 1) == 2 else column
        lengths = np.full(num_rows if width == 0 else len(values) // width, width, np.int32)
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    if offsets[-1] != len(values):
        raise ValueError(f"lengths add up to {offsets[-1]}, but there are {len(values)} values")
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(values, kind.value_type))


def rows_of(slots: Sequence[GeneratorSlot], answer: "pa.RecordBatch") -> Iterator[tuple[int, str | None, Row]]:
    """The rows of an answer: event, error, values (see dataset.formats.generator_columns)."""
    names = ("event", "error", *(name for slot in slots for name in slot.names))
    for event, error, *row in zip(*(answer.column(name).to_pylist() for name in names), strict=True):
        yield event, error, row


def with_errors(
    answers: Iterable["pa.RecordBatch"], errors: Mapping[int, str], schema: "pa.Schema"
) -> "pa.RecordBatch":
    """One answer from the answers of some events and the errors of others, in order of events."""
    import pyarrow as pa
    import pyarrow.compute as pc

    columns: dict[str, Any] = {"event": pa.array(list(errors), pa.int32()), "error": pa.array(list(errors.values()))}
    failed = [columns.get(field.name) for field in schema]
    failed = [pa.nulls(len(errors), f.type) if a is None else a for a, f in zip(failed, schema, strict=True)]
    table = pa.Table.from_batches([*answers, pa.RecordBatch.from_arrays(failed, schema=schema)])
    order = pc.sort_indices(table, sort_keys=[("event", "ascending")])
    return table.take(order).combine_chunks().to_batches()[0] if len(table) else empty_answer(schema)


def empty_answer(schema: "pa.Schema") -> "pa.RecordBatch":
    """An answer without rows."""
    import pyarrow as pa

    return pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)
