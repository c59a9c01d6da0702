"""Writes the histories of a slot to the Parquet files of a base.

    histories-<slot>-<n>.parquet    slot, sign, key: those of the history's key; history: signs, oldest first

A base has all histories as they are at its version; a delta has none. The feature ids of a history are uint64.

Shapes: U rows of a chunk, M signs of all its histories.
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
from trainer.exports.parquet_files import REST_SHARE, OpenFile, ParquetFiles
from trainer.exports.request import ExportedHistory
from trainer.exports.row_selection import CommitTableRows, RowSelection, SelectedRows, weights_of

SCHEMA = pa.schema(
    [
        pa.field("slot", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("sign", pa.uint64(), nullable=False),
        pa.field("key", pa.uint64(), nullable=False),
        pa.field("history", pa.list_(pa.field("element", pa.uint64(), nullable=False)), nullable=False),
    ]
)


def write_histories(
    name: str, history: ExportedHistory, source: CommitTableRows, version: int, open_file: OpenFile, deadline: Deadline
) -> dict[str, Any]:
    """Write the histories of slot `name` at `version`; returns the manifest's entry."""
    rows, pace = 0, Pace(REST_SHARE)
    chunks = source.all(RowSelection(ExportCut(since=0), version, is_base=True), deadline)
    with closing(chunks), ParquetFiles(open_file, f"histories-{name}", SCHEMA) as files:
        for chunk in chunks:
            files.write(_columns(history, chunk))
            rows += len(chunk.keys_U)
            pace.rest()
    return {**_told(history), "rows": rows}


def _columns(history: ExportedHistory, chunk: SelectedRows) -> list[pa.Array]:
    count_U, sign_UL = unpacked(weights_of(chunk.words_UW, history.section.dim))
    sign_U, group_U = np.empty(len(count_U), np.uint64), np.full(len(count_U), history.group, np.uint16)
    signs_of(chunk.keys_U, group_U, sign_U)
    sign_M = sign_UL[np.arange(sign_UL.shape[1]) < count_U[:, None]]
    offset_U1 = np.concatenate([np.zeros(1, np.int32), np.cumsum(count_U, dtype=np.int32)])
    signs = pa.ListArray.from_arrays(pa.array(offset_U1), pa.array(sign_M), type=SCHEMA.field("history").type)
    names = pa.DictionaryArray.from_arrays(pa.array(np.zeros(len(count_U), np.int32)), pa.array([history.key]))
    return [names, pa.array(sign_U), pa.array(chunk.keys_U), signs]


def _told(history: ExportedHistory) -> Mapping[str, Any]:
    return {"key": history.key, "of": history.of, "table": history.table}
