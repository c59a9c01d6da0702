"""Writes the rows and tombstones of one table to the Parquet files of an export, and counts them.

    rows-<table>-<n>.parquet        slot, sign, key, and weight, vector, scale where the table has them
    tombstones-<table>-<n>.parquet  slot, sign, key

Rows ascend by `order_of(key)` over all files of a table. No value is null, so that readers need no masks. Numbers are
plain and not compressed: for trained weights lz4 saves 4 %, and zstd 10 % for a third more time. Vectors of
int8 use a dictionary, one byte per number, since Parquet has no type so small.

Shapes: U rows of a chunk, G slot groups (65,536).
"""

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from headrace.blob.blob_writer import BlobWriter
from headrace.deadline import Deadline
from headrace.failpoints import Failpoint, failpoint
from headrace.key_kernels import signs_of
from headrace.priority import Pace
from headrace.pserver.config import TableSection
from headrace.pserver.lifecycle.aging import KEEPERS
from headrace.pserver.protocol.shards import U16, U64
from headrace.pserver.rows.row_format import groups_of
from headrace.trainer.exports.row_selection import CommitTableRows, RowSelection, SelectedRows, weights_of
from headrace.trainer.exports.row_values import EncodedValues, encode, value_columns, value_fields
from headrace.trainer.value_types import Dtype

MAX_FILE_ROWS = 1_000_000
"""A file ends with the chunk that reaches this many rows."""
REST_SHARE = 0.25
"""Pause after each chunk, as a fraction of the time it took: training keeps four fifths of its rate."""
NUM_GROUPS = 1 << 16
KEYED = (
    pa.field("slot", pa.dictionary(pa.int32(), pa.string()), nullable=False),
    pa.field("sign", pa.uint64(), nullable=False),
    pa.field("key", pa.uint64(), nullable=False),
)
"""The columns that all files have; tombstones have no others."""

OpenFile = Callable[[str], AbstractContextManager[BlobWriter]]
"""Opens a new file of the export by name."""


@dataclass(slots=True)
class TableCounts:
    """The content of one table in an export."""

    rows: int = 0
    tombstones: int = 0
    kept_back: Counter[str] = field(default_factory=Counter)
    """Rows that a threshold excluded, by its name: of a delta changed rows, of a base any."""
    model_rows: int = 0
    """All rows at the version."""
    rows_by_group: Counter[int] = field(default_factory=Counter)
    tombstones_by_group: Counter[int] = field(default_factory=Counter)
    weights: int = 0
    """Numbers exported."""
    squares: float = 0.0
    """Sum of their squares."""
    clamped: int = 0
    not_finite: int = 0

    def take(self, values: EncodedValues, group_U: U16, kept_back: Mapping[str, int], num_weights: int) -> None:
        """Count rows that were written, and rows that were excluded."""
        self.rows += len(group_U)
        self.kept_back.update(kept_back)
        self.rows_by_group.update(_counts_of(group_U))
        self.weights += len(group_U) * num_weights
        self.squares += values.squares
        self.clamped += values.clamped
        self.not_finite += values.not_finite

    def message(self, slots: "SlotNames", section: TableSection, dtype: Dtype) -> dict[str, Any]:
        """As the manifest has it."""
        groups = sorted(self.rows_by_group.keys() | self.tombstones_by_group.keys())
        by_slot = {
            slots.name(g): {"rows": self.rows_by_group[g], "tombstones": self.tombstones_by_group[g]} for g in groups
        }
        return {
            "rows": self.rows,
            "tombstones": self.tombstones,
            "pending": self.kept_back.total(),
            "pending_by": {name: self.kept_back[name] for name in KEEPERS if self.kept_back[name]},
            "by_slot": by_slot,
            "model_rows": self.model_rows,
            "dim": section.dim,
            "first_order": section.first_order,
            "dtype": dtype,
            "norm": (self.squares / self.weights) ** 0.5 if self.weights else 0.0,
            "clamped": self.clamped,
            "not_finite": self.not_finite,
        }


class SlotNames:
    """The names of slot groups in files."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = dict(names)
        self._code_G = np.full(NUM_GROUPS, -1, np.int32)
        self._arrange()

    def name(self, group: int) -> str:
        """Name of a group; one that the spec does not have any more is called "group-<n>"."""
        return self._names.get(group, f"group-{group}")

    def column(self, group_U: U16) -> pa.DictionaryArray:
        """(U,) names."""
        code_U = self._code_G[group_U]
        if (unknown_U := code_U < 0).any():
            self._names |= {group: self.name(group) for group in np.unique(group_U[unknown_U]).tolist()}
            self._arrange()
            code_U = self._code_G[group_U]
        return pa.DictionaryArray.from_arrays(pa.array(code_U), self._column)

    def _arrange(self) -> None:
        self._code_G[list(self._names)] = np.arange(len(self._names))
        self._column = pa.array(list(self._names.values()), pa.string())


@dataclass(frozen=True, slots=True)
class ExportTableWriter:
    """Writes one table's files."""

    table: str
    section: TableSection
    slots: SlotNames
    dtype: Dtype
    open: OpenFile
    deadline: Deadline

    @property
    def num_weights(self) -> int:
        """D, the number of weights in a row."""
        return self.section.num_weights

    def base(self, source: CommitTableRows, selection: RowSelection) -> TableCounts:
        """Write every selected row."""
        counts = TableCounts()
        for chunk in self._rows(source.all(selection, self.deadline), counts):
            counts.model_rows += len(chunk.keys_U) + sum(chunk.kept_back.values())
        return counts

    def delta(self, source: CommitTableRows, selection: RowSelection) -> TableCounts:
        """Write the rows that changed, and the deletions. Raises DeltaImpossible."""
        counts = TableCounts(model_rows=source.num_rows)
        changes = source.changes(selection.cut.since)
        for _ in self._rows(source.among(changes, selection, self.deadline), counts):
            pass
        with ParquetFiles(self.open, f"tombstones-{self.table}", pa.schema(KEYED)) as files:
            for keys_U, group_U in source.gone(changes, selection, self.deadline):
                files.write(self._head(keys_U, group_U))
                counts.tombstones += len(keys_U)
                counts.tombstones_by_group.update(_counts_of(group_U))
        return counts

    def _rows(self, chunks: Generator[SelectedRows, None, None], counts: TableCounts) -> Iterator[SelectedRows]:
        """Write each chunk, then yield it."""
        # Closed even after an error: an unfinished reader holds a store open.
        pace, schema = Pace(REST_SHARE), row_schema(self.section.first_order, self.section.dim, self.dtype)
        with closing(chunks), ParquetFiles(self.open, f"rows-{self.table}", schema) as files:
            for chunk in chunks:
                group_U = groups_of(chunk.words_UW)
                values = encode(weights_of(chunk.words_UW, self.num_weights), self.section.first_order, self.dtype)
                files.write([*self._head(chunk.keys_U, group_U), *value_columns(values)])
                counts.take(values, group_U, chunk.kept_back, self.num_weights)
                pace.rest()
                yield chunk

    def _head(self, keys_U: U64, group_U: U16) -> list[pa.Array]:
        sign_U = np.empty(len(keys_U), np.uint64)
        signs_of(keys_U, group_U, sign_U)
        return [self.slots.column(group_U), pa.array(sign_U), pa.array(keys_U)]


class ParquetFiles:
    """Files of one kind of one table, made when rows come. A context. Without rows there are no files."""

    def __init__(self, open_file: OpenFile, prefix: str, schema: pa.Schema) -> None:
        self._open, self._prefix, self._schema = open_file, prefix, schema
        self._num_files = 0
        self._stack = ExitStack()
        self._writer: pq.ParquetWriter | None = None
        self._sink: BlobWriter | None = None

    def __enter__(self) -> "ParquetFiles":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._end()
        else:
            self._stack.__exit__(kind, error, trace)  # an incomplete file does not count

    def write(self, columns: Sequence[pa.Array]) -> None:
        """Append rows."""
        if not len(columns[0]):
            return
        if self._writer is None:
            self._begin()
        assert self._writer is not None and self._sink is not None and self._sink.rows is not None
        batch = pa.record_batch(columns, schema=self._schema)
        self._writer.write_batch(batch, row_group_size=batch.num_rows)
        self._sink.rows += batch.num_rows
        if self._sink.rows >= MAX_FILE_ROWS:
            self._end()

    def _begin(self) -> None:
        sink = self._stack.enter_context(self._open(f"{self._prefix}-{self._num_files}.parquet"))
        sink.rows = 0
        dictionary = ["slot"]
        if "vector" in self._schema.names and self._schema.field("vector").type.value_type.bit_width == 8:
            dictionary.append("vector.list.element")
        self._sink = sink
        self._writer = pq.ParquetWriter(
            sink, self._schema, compression="none", use_dictionary=dictionary, write_statistics=False
        )
        self._stack.callback(self._writer.close)
        self._num_files += 1

    def _end(self) -> None:
        self._stack.close()
        if self._writer is not None:
            failpoint(Failpoint.EXPORT_ROWS)
        self._writer = self._sink = None


def row_schema(first_order: bool, dim: int, dtype: str) -> pa.Schema:
    """Columns of the rows of a table."""
    return pa.schema([*KEYED, *value_fields(first_order, dim, dtype)])


def keyed_columns(slot: str, sign_N: U64, keys_N: U64) -> list[pa.Array]:
    """The columns KEYED of rows of one slot."""
    names = pa.DictionaryArray.from_arrays(pa.array(np.zeros(len(keys_N), np.int32)), pa.array([slot]))
    return [names, pa.array(sign_N), pa.array(keys_N)]


def signs_in_group(keys_U: U64, group: int) -> U64:
    """(U,) signs of keys of one slot group."""
    sign_U = np.empty(len(keys_U), np.uint64)
    signs_of(keys_U, np.full(len(keys_U), group, np.uint16), sign_U)
    return sign_U


def _counts_of(group_U: NDArray[np.uint16]) -> dict[int, int]:
    groups, counts = np.unique(group_U, return_counts=True)
    return dict(zip(groups.tolist(), counts.tolist(), strict=True))
