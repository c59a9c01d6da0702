"""What a generator gives, as MultiSlot lines or Arrow columns: the generator's side of the two protocols.

Imports little and late: a MultiSlot generator starts once for each segment.
"""

import base64
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pyarrow as pa

NOT_UTF8 = "not UTF-8"
"""An error text that begins so is counted as such."""


class SlotShape(NamedTuple):
    """What a generator must know of a slot."""

    name: str
    kind: str
    """"sparse", "dense" or "meta"."""
    type: str
    """"uint64" or "string"; of meta slots also "float" and "int64"."""
    size: int
    """Floats of a dense slot; of a sparse one, 1 where its signs carry weights."""


def slots_of_job(spec: str | None) -> tuple[SlotShape, ...] | None:
    """Slots in the order of the spec: of the file `spec`, or as the pipe that started us says; None where none does."""
    told = os.environ.get("MILLRACE_SLOTS")
    if spec is None and told is not None:
        plain = told if told.startswith("[") else zlib.decompress(base64.b64decode(told))
        return tuple(SlotShape(*each) for each in json.loads(plain))
    path = spec or os.environ.get("MILLRACE_SPEC")
    if path is None:
        return None
    # Only here, where nobody waits for a process to start: pydantic takes a moment.
    from dataset.pipe.command import describe
    from dataset.spec import read_slots

    return tuple(SlotShape(*describe(slot)) for slot in read_slots(Path(path)).slots)  # type: ignore[arg-type]


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


def check_sample(slots: Sequence[SlotShape], sample: Mapping[str, Any]) -> None:
    """Raise ValueError where a sample has what is no slot, or lacks a dense slot."""
    known = {name for slot in slots for name in (slot.name, f"{slot.name}.weight")}
    if unknown := [name for name in sample if name not in known]:
        raise ValueError(f"{', '.join(map(repr, unknown))} is no slot; the spec has {[slot.name for slot in slots]}")
    for slot in slots:
        if slot.kind == "dense":
            if slot.name not in sample:
                raise ValueError(f"dense slot {slot.name!r} is missing")
            if (num := len(values_of(sample[slot.name]))) != slot.size:
                raise ValueError(f"dense slot {slot.name!r} has {num} values instead of {slot.size}")
        elif slot.kind == "meta" and (num := len(values_of(sample.get(slot.name)))) > 1:
            raise ValueError(f"meta slot {slot.name!r} has {num} values instead of 1")


def text_of(value: Any) -> str:
    """A value as a token. Raises ValueError where a text holds blanks, which end a token."""
    if isinstance(value, str):
        if not value or any(c in " \t\r\n" for c in value):
            raise ValueError(f"{value!r} is empty or holds blanks: MultiSlot text cannot carry it")
        return value
    if isinstance(value, bool):
        return str(int(value))
    return str(value) if isinstance(value, int) else repr(float(value))


def line_of(slots: Sequence[SlotShape], sample: Mapping[str, Any]) -> str:
    """A sample as a MultiSlot line."""
    check_sample(slots, sample)
    words: list[str] = []
    for slot in slots:
        values = values_of(sample.get(slot.name))
        words.append(str(len(values)))
        words.extend(map(text_of, values))
    return " ".join(words)


def error_line(error: str) -> str:
    """The line that rejects an event in the MultiSlot protocol: our parser takes what follows `!` as the reason."""
    return "!" + " ".join(error.split())


def error_text(error: BaseException) -> str:
    """What is said of an event whose generation raised `error`."""
    if isinstance(error, UnicodeDecodeError):
        return f"{NOT_UTF8}: {error}"
    return f"{type(error).__name__}: {error}"


class ColumnsOfSamples:
    """Collects samples and gives columns."""

    def __init__(self, slots: Sequence[SlotShape]) -> None:
        self._slots = slots
        self._known = {name for slot in slots for name in (slot.name, f"{slot.name}.weight")}
        self._values: dict[str, list[Any]] = {slot.name: [] for slot in slots}
        self._lengths: dict[str, list[int]] = {slot.name: [] for slot in slots if slot.kind == "sparse"}
        self._weights: dict[str, list[float]] = {s.name: [] for s in slots if s.kind == "sparse" and s.size}
        self._events: list[int] = []

    def add(self, event: int, samples: Iterable[Mapping[str, Any]]) -> None:
        """Take the samples of an event: all, or none and what they raised. ValueError where one does not fit."""
        lists: list[list[Any]] = [
            *self._values.values(),
            *self._lengths.values(),
            *self._weights.values(),
            self._events,
        ]
        before = [len(each) for each in lists]
        try:
            for sample in samples:
                self._add(sample)
                self._events.append(event)
        except BaseException:
            for each, length in zip(lists, before, strict=True):
                del each[length:]
            raise

    def _add(self, sample: Mapping[str, Any]) -> None:
        if not self._known.issuperset(sample):
            check_sample(self._slots, sample)
        for slot in self._slots:
            values = values_of(sample.get(slot.name))
            if slot.kind == "sparse":
                self._lengths[slot.name].append(len(values))
                if slot.size:
                    self._weights[slot.name].extend(values_of(sample.get(f"{slot.name}.weight", [1.0] * len(values))))
            elif len(values) != slot.size:
                check_sample(self._slots, sample)
                values = (None,)
            self._values[slot.name].extend(values)

    def columns(self) -> dict[str, Any]:
        """What `answer_of` takes."""
        columns: dict[str, Any] = {"event": self._events}
        for slot in self._slots:
            values = self._values[slot.name]
            columns[slot.name] = (values, self._lengths[slot.name]) if slot.kind == "sparse" else values
            if slot.name in self._weights:
                columns[f"{slot.name}.weight"] = (self._weights[slot.name], self._lengths[slot.name])
        return columns


def answer_schema(slots: Sequence[SlotShape]) -> "pa.Schema":
    """Schema of the answers we write."""
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


def answer_of(slots: Sequence[SlotShape], columns: Mapping[str, Any], schema: "pa.Schema") -> "pa.RecordBatch":
    """Columns (see DataGenerator.generate_columns) as an answer without errors.

    Raises ValueError (also pyarrow's) where they do not fit the slots or each other.
    """
    import pyarrow as pa

    if unknown := [name for name in columns if name not in schema.names]:
        raise ValueError(f"{', '.join(map(repr, unknown))} is no slot; the spec has {[slot.name for slot in slots]}")
    event = pa.array(columns["event"], pa.int32())
    arrays = [event, pa.nulls(len(event), pa.utf8())]
    for slot in slots:
        if slot.name not in columns:
            raise ValueError(f"column {slot.name!r} is missing")
        arrays.append(_array(columns[slot.name], schema.field(slot.name).type, len(event)))
        if slot.kind == "sparse" and slot.size:
            weights = columns.get(f"{slot.name}.weight")
            empty = pa.nulls(len(event), pa.list_(pa.float32()))
            kind = schema.field(f"{slot.name}.weight").type
            arrays.append(_array(weights, kind, len(event)) if weights is not None else empty)
    for field, array in zip(schema, arrays, strict=True):
        if len(array) != len(event):
            raise ValueError(f"column {field.name!r} has {len(array)} rows, column 'event' {len(event)}")
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _array(column: Any, kind: "pa.DataType", num_rows: int) -> "pa.Array":
    """One column as Arrow has it."""
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


def samples_of(
    slots: Sequence[SlotShape], answer: "pa.RecordBatch"
) -> Iterator[tuple[int, str | None, dict[str, Any]]]:
    """Rows of an answer: event, error, sample."""
    listed = {name: answer.column(name).to_pylist() for name in answer.schema.names}
    for row in range(answer.num_rows):
        sample = {slot.name: listed[slot.name][row] for slot in slots}
        yield listed["event"][row], listed["error"][row], sample


def with_errors(
    answers: Iterable["pa.RecordBatch"], errors: Mapping[int, str], schema: "pa.Schema"
) -> "pa.RecordBatch":
    """Answers of some events and the errors of others, in order of events."""
    import pyarrow as pa
    import pyarrow.compute as pc

    columns: dict[str, Any] = {"event": pa.array(list(errors), pa.int32()), "error": pa.array(list(errors.values()))}
    failed = [columns.get(field.name) for field in schema]
    failed = [pa.nulls(len(errors), f.type) if a is None else a for a, f in zip(failed, schema, strict=True)]
    table = pa.Table.from_batches([*answers, pa.RecordBatch.from_arrays(failed, schema=schema)])
    order = pc.sort_indices(table, sort_keys=[("event", "ascending")])
    return table.take(order).combine_chunks().to_batches()[0] if len(table) else failed_batch(schema)


def failed_batch(schema: "pa.Schema") -> "pa.RecordBatch":
    """An answer of no rows."""
    import pyarrow as pa

    return pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)
