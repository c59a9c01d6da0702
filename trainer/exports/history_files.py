"""Writes the histories or counters of a slot, or the statistics of its rows, to the Parquet files of a base.

    histories-<slot>-<n>.parquet    slot, sign, key: those of the history's key; history: signs, oldest first
    statistics-<slot>-<n>.parquet   slot, sign, key of each row; show, click: at the version of the base

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
from pserver.protocol.shards import U64
from pserver.protocol.table_operations import ExportCut
from pserver.rows.history_kernels import unpacked
from pserver.rows.row_format import groups_of
from trainer.exports.counter_files import COUNTED, sub_windows
from trainer.exports.parquet_files import REST_SHARE, OpenFile, ParquetFiles
from trainer.exports.request import ExportedCounters, ExportedHistory, ExportedMemory, ExportedStatistics
from trainer.exports.row_selection import CommitTableRows, RowSelection, SelectedRows, weights_of

KEYED = (
    pa.field("slot", pa.dictionary(pa.int32(), pa.string()), nullable=False),
    pa.field("sign", pa.uint64(), nullable=False),
    pa.field("key", pa.uint64(), nullable=False),
)
SCHEMA = pa.schema(
    [*KEYED, pa.field("history", pa.list_(pa.field("element", pa.uint64(), nullable=False)), nullable=False)]
)
STATISTICS = [pa.field(name, pa.float32(), nullable=False) for name in ("show", "click")]


def write_memory(
    name: str, memory: ExportedMemory, source: CommitTableRows, version: int, open_file: OpenFile, deadline: Deadline
) -> dict[str, Any]:
    """Write histories, counters or statistics of slot `name` at `version`; returns the manifest's entry."""
    rows, pace = 0, Pace(REST_SHARE)
    kind, schema, told = _told(memory)
    chunks = source.all(RowSelection(ExportCut(since=0), version, is_base=True), deadline)
    with closing(chunks), ParquetFiles(open_file, f"{kind}-{name}", schema) as files:
        for chunk in chunks:
            if isinstance(memory, ExportedStatistics):
                chunk = _of_group(chunk, memory.group)
                show, click = (pa.array(column_U) for column_U in source.statistics(chunk.words_UW).T.copy())
                files.write([*_keyed(memory, chunk.keys_U), show, click])
            else:
                files.write(_columns(memory, chunk))
            rows += len(chunk.keys_U)
            pace.rest()
    return {"key": memory.key, **told, "table": memory.table, "rows": rows}


def _of_group(chunk: SelectedRows, group: int) -> SelectedRows:
    """The rows of one slot group."""
    own_U = groups_of(chunk.words_UW) == group
    return SelectedRows(chunk.keys_U[own_U], chunk.words_UW[own_U], {})


def _signs(memory: ExportedMemory, keys_U: U64) -> U64:
    sign_U, group_U = np.empty(len(keys_U), np.uint64), np.full(len(keys_U), memory.group, np.uint16)
    signs_of(keys_U, group_U, sign_U)
    return sign_U


def _keyed(memory: ExportedMemory, keys_U: U64) -> list[pa.Array]:
    """The columns KEYED."""
    return [_names(memory, len(keys_U)), pa.array(_signs(memory, keys_U)), pa.array(keys_U)]


def _columns(memory: ExportedMemory, chunk: SelectedRows) -> list[pa.Array]:
    words_UD, sign_U = weights_of(chunk.words_UW, memory.section.dim), _signs(memory, chunk.keys_U)
    if isinstance(memory, ExportedCounters):
        row_N, counts = sub_windows(words_UD, memory.windows_s)
        return [_names(memory, len(row_N)), *(pa.array(each) for each in (sign_U[row_N], chunk.keys_U[row_N], *counts))]
    count_U, sign_UL = unpacked(words_UD)
    sign_M = sign_UL[np.arange(sign_UL.shape[1]) < count_U[:, None]]
    offset_U1 = np.concatenate([np.zeros(1, np.int32), np.cumsum(count_U, dtype=np.int32)])
    signs = pa.ListArray.from_arrays(pa.array(offset_U1), pa.array(sign_M), type=SCHEMA.field("history").type)
    return [*_keyed(memory, chunk.keys_U), signs]


def _names(memory: ExportedMemory, num_rows: int) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(num_rows, np.int32)), pa.array([memory.key]))


def _told(memory: ExportedMemory) -> tuple[str, pa.Schema, Mapping[str, Any]]:
    """The beginning of the files' names, their columns, and what the manifest tells of this kind alone."""
    match memory:
        case ExportedHistory(of=of):
            return "histories", SCHEMA, {"of": of}
        case ExportedCounters(windows_s=windows_s):
            return "counters", pa.schema([*KEYED, *COUNTED]), {"windows_s": list(windows_s)}
        case ExportedStatistics():
            return "statistics", pa.schema([*KEYED, *STATISTICS]), {}
        case _:
            raise TypeError(f"{type(memory).__name__} has no files")
