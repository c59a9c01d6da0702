"""Writes the histories or counters of a slot to the Parquet files of a base.

    histories-<slot>-<n>.parquet    slot, sign, key: those of the history's key; history: signs, oldest first

A base has all of them as they are at its version; a delta has none. The feature ids of a history are uint64. The files
of counters: trainer.exports.counter_files.

Shapes: U rows of a chunk, D words of a row, M signs of all its histories, N rows of a file of counters.
"""

from collections.abc import Mapping
from contextlib import closing
from typing import Any

import numpy as np
import pyarrow as pa

from millrace.deadline import Deadline
from millrace.keys import signs_of
from millrace.priority import Pace
from pserver.protocol.table_operations import ExportCut
from pserver.rows.history_kernels import unpacked
from trainer.exports.counter_files import COUNTED, sub_windows
from trainer.exports.parquet_files import REST_SHARE, OpenFile, ParquetFiles
from trainer.exports.request import ExportedCounters, ExportedHistory, ExportedMemory
from trainer.exports.row_selection import CommitTableRows, RowSelection, SelectedRows, weights_of

KEYED = (
    pa.field("slot", pa.dictionary(pa.int32(), pa.string()), nullable=False),
    pa.field("sign", pa.uint64(), nullable=False),
    pa.field("key", pa.uint64(), nullable=False),
)
SCHEMA = pa.schema(
    [*KEYED, pa.field("history", pa.list_(pa.field("element", pa.uint64(), nullable=False)), nullable=False)]
)


def write_memory(
    name: str, memory: ExportedMemory, source: CommitTableRows, version: int, open_file: OpenFile, deadline: Deadline
) -> dict[str, Any]:
    """Write the histories or counters of slot `name` at `version`; returns the manifest's entry."""
    rows, pace = 0, Pace(REST_SHARE)
    kind, schema, told = _told(memory)
    chunks = source.all(RowSelection(ExportCut(since=0), version, is_base=True), deadline)
    with closing(chunks), ParquetFiles(open_file, f"{kind}-{name}", schema) as files:
        for chunk in chunks:
            files.write(_columns(memory, chunk))
            rows += len(chunk.keys_U)
            pace.rest()
    return {"key": memory.key, **told, "table": memory.table, "rows": rows}


def _columns(memory: ExportedMemory, chunk: SelectedRows) -> list[pa.Array]:
    words_UD = weights_of(chunk.words_UW, memory.section.dim)
    sign_U, group_U = np.empty(len(words_UD), np.uint64), np.full(len(words_UD), memory.group, np.uint16)
    signs_of(chunk.keys_U, group_U, sign_U)
    if isinstance(memory, ExportedCounters):
        row_N, counts = sub_windows(words_UD, memory.windows_s)
        return [_names(memory, len(row_N)), *(pa.array(each) for each in (sign_U[row_N], chunk.keys_U[row_N], *counts))]
    count_U, sign_UL = unpacked(words_UD)
    sign_M = sign_UL[np.arange(sign_UL.shape[1]) < count_U[:, None]]
    offset_U1 = np.concatenate([np.zeros(1, np.int32), np.cumsum(count_U, dtype=np.int32)])
    signs = pa.ListArray.from_arrays(pa.array(offset_U1), pa.array(sign_M), type=SCHEMA.field("history").type)
    return [_names(memory, len(sign_U)), pa.array(sign_U), pa.array(chunk.keys_U), signs]


def _names(memory: ExportedMemory, num_rows: int) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(num_rows, np.int32)), pa.array([memory.key]))


def _told(memory: ExportedMemory) -> tuple[str, pa.Schema, Mapping[str, Any]]:
    """The beginning of the files' names, their columns, and what the manifest tells of this kind alone."""
    match memory:
        case ExportedHistory(of=of):
            return "histories", SCHEMA, {"of": of}
        case ExportedCounters(windows_s=windows_s):
            return "counters", pa.schema([*KEYED, *COUNTED]), {"windows_s": list(windows_s)}
        case _:
            raise TypeError(f"{type(memory).__name__} has no files")
