"""Writes the statistics of rows of a slot to the Parquet files of a base, where a dense slot of the job tells of them.

statistics-<slot>-<n>.parquet   slot, sign, key of each row; show, click: at the version of the base
"""

from contextlib import closing
from typing import Any

import numpy as np
import pyarrow as pa

from millrace.deadline import Deadline
from millrace.keys import signs_of
from millrace.priority import Pace
from pserver.protocol.table_operations import ExportCut
from pserver.rows.row_format import groups_of
from trainer.exports.parquet_files import REST_SHARE, OpenFile, ParquetFiles
from trainer.exports.request import ExportedStatistics
from trainer.exports.row_selection import CommitTableRows, RowSelection

SCHEMA = pa.schema(
    [
        pa.field("slot", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("sign", pa.uint64(), nullable=False),
        pa.field("key", pa.uint64(), nullable=False),
        pa.field("show", pa.float32(), nullable=False),
        pa.field("click", pa.float32(), nullable=False),
    ]
)


def write_statistics(
    asked: ExportedStatistics, source: CommitTableRows, version: int, open_file: OpenFile, deadline: Deadline
) -> dict[str, Any]:
    """Write show and click of all rows of one slot at `version`; returns the manifest's entry."""
    rows, pace = 0, Pace(REST_SHARE)
    chunks = source.all(RowSelection(ExportCut(since=0), version, is_base=True), deadline)
    with closing(chunks), ParquetFiles(open_file, f"statistics-{asked.key}", SCHEMA) as files:
        for chunk in chunks:
            own_U = groups_of(chunk.words_UW) == asked.group
            keys_U, value_U2 = chunk.keys_U[own_U], source.statistics(chunk.words_UW[own_U])
            sign_U = np.empty(len(keys_U), np.uint64)
            signs_of(keys_U, np.full(len(keys_U), asked.group, np.uint16), sign_U)
            names = pa.DictionaryArray.from_arrays(pa.array(np.zeros(len(keys_U), np.int32)), pa.array([asked.key]))
            files.write([names, *(pa.array(each) for each in (sign_U, keys_U, *value_U2.T.copy()))])
            rows += len(keys_U)
            pace.rest()
    return {"table": asked.table, "rows": rows}
