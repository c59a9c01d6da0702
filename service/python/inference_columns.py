"""Columns of samples as tensors of the Open Inference Protocol, which replicas and `Export.predict` both read.

Source: the protocol's binary tensor data extension. trainer.replica.inference_messages has the rules of the inputs.

Shapes: B samples, N values of one column.
"""

import struct
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.errors import SpecError
from headrace.trainer.replica.inference_messages import DTYPES, LENGTHS, TEXT, TIME, WEIGHT

Columns: TypeAlias = Mapping[str, Any] | pa.Table | pa.RecordBatch
"""Samples by slot: a number, a text, or a list of them for each sample."""
Event = Mapping[str, Any] | str
"""A raw event of the stream: an object, or its text. For jobs with pipe.kind = "columns"."""


def table_of(columns: Columns, event_time: Sequence[float] | None) -> pa.Table:
    """Columns as a table, with the times as one more. Raises SpecError for one that is none."""
    table = _table_of(columns)
    if event_time is None:
        return table
    try:
        return table.append_column(TIME, pa.array(event_time, pa.float64()))
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise SpecError(f"is not one number for each of the {len(table)} samples: {error}", TIME) from None


def _table_of(columns: Columns) -> pa.Table:
    if isinstance(columns, pa.Table):
        return columns.combine_chunks()
    if isinstance(columns, pa.RecordBatch):
        return pa.Table.from_batches([columns])
    try:
        found = {name: _array_of(values) for name, values in columns.items()}
        return pa.table(found)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise SpecError(f"the samples are no columns of one length: {error}") from None


def _array_of(values: Any) -> pa.Array:
    if isinstance(values, np.ndarray) and values.ndim == 2:
        return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(values).reshape(-1)), values.shape[1])
    return values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values)


def request_of(
    columns: Columns | None, events: Sequence[Event] | None, event_time: Sequence[float] | None, outputs: Sequence[str]
) -> dict[str, Any]:
    """A request whose tensors have raw bytes as `data`. Raises SpecError unless it has columns or events."""
    if (columns is None) == (events is None):
        raise SpecError("give the samples as columns, or events; one of the two")
    named = {"outputs": [{"name": each} for each in outputs]} if outputs else {}
    if events is not None:
        times = {} if event_time is None else {TIME: [*event_time]}
        return {"events": [*events], **times, **named}
    assert columns is not None
    table = table_of(columns, event_time)
    return {"inputs": [each for name in table.column_names for each in tensors_of(name, table[name])], **named}


def tensors_of(name: str, column: pa.ChunkedArray) -> list[dict[str, Any]]:
    """The tensor of a column; of lists with different lengths, also the tensor of their lengths. Raises SpecError."""
    array = column.combine_chunks()
    array = array if isinstance(array, pa.Array) else pa.concat_arrays(array.chunks)
    kind = array.type
    if pa.types.is_dictionary(kind):
        array, kind = array.dictionary_decode(), kind.value_type
    if array.null_count:
        raise SpecError("has no value for some samples; an empty list stands for none", name)
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        return [_tensor(name, array, [len(array)])]
    length_B, values = _lengths(array), array.flatten()
    if len(length_B) and (length_B == length_B[0]).all():
        shape = [len(length_B), int(length_B[0])]
        return [_tensor(name, values, shape)]
    tensor = _tensor(name, values, [len(values)])
    if name.endswith(WEIGHT):  # its lists are as long as those of its slot
        return [tensor]
    lengths = pa.array(length_B, pa.int64())
    return [tensor, _tensor(name + LENGTHS, lengths, [len(lengths)])]


def _lengths(array: pa.Array) -> np.ndarray:
    found: np.ndarray = np.asarray(pc.list_value_length(array))
    return found


def _tensor(name: str, values: pa.Array, shape: list[int]) -> dict[str, Any]:
    """A tensor with its raw bytes. Raises SpecError."""
    if values.null_count:
        raise SpecError("has a list with a missing value", name)
    kind = values.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind) or pa.types.is_null(kind):
        texts = [each.encode() if isinstance(each, str) else each for each in values.to_pylist()]
        data = b"".join(struct.pack("<I", len(each)) + each for each in texts)
        datatype = TEXT if len(values) else "INT64"  # an empty list says nothing of its type
        return {"name": name, "datatype": datatype, "shape": shape, "data": data}
    numbers = np.ascontiguousarray(values.to_numpy(zero_copy_only=False))
    datatype = {"float16": "FP16", "float32": "FP32", "float64": "FP64", "bool": "BOOL"}.get(
        str(numbers.dtype), str(numbers.dtype).upper()
    )
    if datatype not in DTYPES:
        raise SpecError(f"holds values of type {kind}; numbers and texts are predicted", name)
    return {"name": name, "datatype": datatype, "shape": shape, "data": numbers.astype(DTYPES[datatype]).tobytes()}


def predictions_of(outputs: Mapping[str, np.ndarray], version: str) -> pa.Table:
    """A column for each output; the version that predicted is in the table's metadata."""
    columns = {}
    for name, values in outputs.items():
        flat = pa.array(np.ascontiguousarray(values).reshape(-1))
        columns[name] = flat if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, values[0].size)
    return pa.table(columns).replace_schema_metadata({"version": version})
