"""Samples as columns of Arrow, and back: for files of kept segments, and for samples that travel between processes."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headrace.dataset.samples.batch import I64, Ragged, Samples
from headrace.dataset.spec.config import SlotKind
from headrace.dataset.spec.schema import Schema


def file_of(columns: Mapping[str, pa.Array], metadata: Mapping[bytes, bytes], *, packed: bool = False) -> bytes:
    """An Arrow file of one batch with these columns, at least one of no rows. `packed`: by LZ4."""
    table = pa.RecordBatch.from_pydict(columns or {"event": pa.array([], pa.int64())})
    table = table.replace_schema_metadata(metadata)
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="lz4" if packed else None)
    with pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_batch(table)
    return bytes(sink.getvalue())


def columns_of(samples: Samples, *, narrow: bool = False) -> dict[str, pa.Array]:
    """The columns of samples: "event", "time", and a prefix before the names of slots.

    `narrow`: lists of one length have no offsets, and others have short ones. Kept files do not.
    """
    lists = _narrow_lists if narrow else _wide_lists
    columns = {"event": pa.array(samples.event_B), "time": pa.array(samples.time_s_B)}
    for name, column in samples.sparse.items():
        columns[f"sparse/{name}"] = lists(column.offset_B1, column.values_N)
        if column.weights_N is not None:
            columns[f"weights/{name}"] = lists(column.offset_B1, column.weights_N)
    for name, values in samples.dense.items():
        columns[f"dense/{name}"] = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
    for name, meta in samples.meta.items():
        columns[f"meta/{name}"] = pa.array(meta, pa.utf8()) if meta.dtype == np.object_ else pa.array(meta)
    return columns


def _wide_lists(offset_B1: I64, values_N: NDArray[Any]) -> pa.Array:
    return pa.LargeListArray.from_arrays(pa.array(offset_B1), pa.array(values_N))


def _narrow_lists(offset_B1: I64, values_N: NDArray[Any]) -> pa.Array:
    values_N, length_B = values_N[offset_B1[0] : offset_B1[-1]], np.diff(offset_B1)
    if len(length_B) and length_B[0] and (length_B == length_B[0]).all():
        return pa.FixedSizeListArray.from_arrays(pa.array(values_N), int(length_B[0]))
    if len(values_N) > np.iinfo(np.int32).max:
        return _wide_lists(offset_B1 - offset_B1[0], values_N)
    return pa.ListArray.from_arrays(pa.array((offset_B1 - offset_B1[0]).astype(np.int32)), pa.array(values_N))


def _offsets(lists: pa.Array) -> I64:
    """(B + 1,) where each list begins, and where the last one ends."""
    if pa.types.is_fixed_size_list(lists.type):
        return np.arange(len(lists) + 1) * np.int64(lists.type.list_size)
    found: I64 = lists.offsets.to_numpy().astype(np.int64)
    return found


def samples_of(batch: pa.RecordBatch, schema: Schema) -> Samples:
    """The inverse of `columns_of`, with the slots of `schema`."""
    sparse: dict[str, Ragged] = {}
    dense: dict[str, Any] = {}
    meta: dict[str, Any] = {}
    for slot in schema.slots:
        match slot.kind:
            case SlotKind.SPARSE:
                lists = batch.column(f"sparse/{slot.name}")
                weights_N = batch.column(f"weights/{slot.name}").values.to_numpy() if slot.sparse.weighted else None
                sparse[slot.name] = Ragged(lists.values.to_numpy(), _offsets(lists), weights_N)
            case SlotKind.DENSE:
                column = batch.column(f"dense/{slot.name}")
                dense[slot.name] = column.values.to_numpy().reshape(len(column), -1)
            case SlotKind.META:
                meta[slot.name] = _meta(batch.column(f"meta/{slot.name}"))
    return Samples(sparse, dense, meta, batch.column("event").to_numpy(), batch.column("time").to_numpy())


def _meta(column: pa.Array) -> Any:
    if not pa.types.is_string(column.type):
        return column.to_numpy()
    texts = np.empty(len(column), object)
    texts[:] = column.to_pylist()
    return texts
