"""Writes the histories or counters of a slot to the Parquet files of an export, from a commit.

A base has all keys, a delta those that changed since its parent, and the deleted ones. No threshold leaves any out. The
columns, and how they are read: trainer.exports.memory_files.

Shapes: U keys of a chunk.
"""

from contextlib import closing
from typing import Any

import pyarrow as pa

from headrace.deadline import Deadline
from headrace.priority import Pace
from headrace.pserver.protocol.histories import Memory
from headrace.pserver.protocol.table_operations import ExportCut
from headrace.trainer.exports.memory_files import columns_of, schema_of
from headrace.trainer.exports.parquet_files import (
    KEYED,
    REST_SHARE,
    OpenFile,
    ParquetFiles,
    keyed_columns,
    signs_in_group,
)
from headrace.trainer.exports.request import ExportedCounters, ExportedHistory, ExportedMemory
from headrace.trainer.exports.row_selection import CommitTableRows, RowSelection, weights_of


def write_memory(
    name: str,
    memory: ExportedMemory,
    source: CommitTableRows,
    version: int,
    since: int | None,
    open_file: OpenFile,
    deadline: Deadline,
) -> dict[str, Any]:
    """Write the histories or counters of slot `name` at `version`, or what changed after `since`; the manifest's entry.

    Raises DeltaImpossible.
    """
    rows, pace, dim = 0, Pace(REST_SHARE), memory.section.dim
    kind, remembered, told = _told(memory)
    selection = RowSelection(ExportCut(since=since or 0), version, is_base=since is None)
    changes = None if since is None else source.changes(since)
    chunks = source.all(selection, deadline) if changes is None else source.among(changes, selection, deadline)
    with closing(chunks), ParquetFiles(open_file, f"{kind}-{name}", schema_of(remembered)) as files:
        for chunk in chunks:
            sign_U = signs_in_group(chunk.keys_U, memory.group)
            rows_UD = weights_of(chunk.words_UW, dim)
            files.write(columns_of(memory.key, remembered, sign_U, chunk.keys_U, rows_UD))
            rows += len(chunk.keys_U)
            pace.rest()
    entry = {"key": memory.key, **told, "table": memory.table, "rows": rows}
    if changes is None:
        return entry
    tombstones = 0
    with ParquetFiles(open_file, f"tombstones-{memory.table}", pa.schema(KEYED)) as files:
        for keys_U, _ in source.gone(changes, selection, deadline):
            files.write(keyed_columns(memory.key, signs_in_group(keys_U, memory.group), keys_U))
            tombstones += len(keys_U)
    return {**entry, "tombstones": tombstones}


def _told(memory: ExportedMemory) -> tuple[str, Memory, dict[str, Any]]:
    """The beginning of the files' names, what a row remembers, and what the manifest tells of this kind alone."""
    match memory:
        case ExportedHistory(of=of, last=last):
            return "histories", last, {"of": of}
        case ExportedCounters(windows_s=windows_s):
            return "counters", windows_s, {"windows_s": list(windows_s)}
        case _:
            raise TypeError(f"{type(memory).__name__} has no files")
