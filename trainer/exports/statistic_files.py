"""Writes the statistics of rows of a slot to the Parquet files of a base, where a dense slot of the job tells of them.

statistics-<slot>-<n>.parquet   slot, sign, key of each row; show, click: at the version of the base
"""

from contextlib import closing
from typing import Any

import pyarrow as pa

from headrace.deadline import Deadline
from headrace.priority import Pace
from headrace.pserver.protocol.table_operations import ExportCut
from headrace.pserver.rows.row_format import groups_of
from headrace.trainer.exports.parquet_files import (
    KEYED,
    REST_SHARE,
    OpenFile,
    ParquetFiles,
    keyed_columns,
    signs_in_group,
)
from headrace.trainer.exports.request import ExportedStatistics
from headrace.trainer.exports.row_selection import CommitTableRows, RowSelection

SCHEMA = pa.schema(
    [
        *KEYED,
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
            keyed = keyed_columns(asked.key, signs_in_group(keys_U, asked.group), keys_U)
            files.write([*keyed, *(pa.array(each) for each in value_U2.T.copy())])
            rows += len(keys_U)
            pace.rest()
    return {"table": asked.table, "rows": rows}
