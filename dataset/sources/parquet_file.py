"""Reads the rows of one Parquet file by number, as JSON text, a line each.

Rows are read forward, in batches; a read that begins elsewhere starts at its row group. A file is known by its first
64 KiB and its number of rows; one that was replaced while it is known raises SourceGap. dataset.sources.row_text makes
the text.
"""

import io
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from headrace.dataset.sources.line_file import identity_of
from headrace.dataset.sources.parquet_footer import TAIL_BYTES, BadFooter, RowGroup, row_groups
from headrace.dataset.sources.row_text import Timestamps, check_columns, lines_of_rows, unreadable_rows
from headrace.dataset.sources.source_file import RawBytes, SourceFile
from headrace.dataset.stream.errors import SourceGap, SourceUnavailable
from headrace.dataset.stream.source import CONTENT, Events, check_identity
from headrace.errors import BadInput

BATCH_ROWS = 4_096
"""Rows made into text at once."""
BATCH_BYTES = 16 << 20
"""A batch of longer rows is made into text in parts of this."""
WIDE_BYTES = 64 << 10
"""Bytes of a column of texts in a row group from which on repeated ones may make a batch large."""
MAX_ROW_BYTES, TEXT_OF_VALUE = 1 << 20, 2
"""Longest row as text, if the source does not say; fewest bytes of a value of a list and its comma."""
MAX_LISTED = 1 << 27
"""Most values of a column of lists in a row group."""
BUFFER_BYTES = 4 << 20
"""Read of one column at once. A reader holds this for each column, not a whole row group."""
READING: Mapping[str, Any] = {
    "buffer_size": BUFFER_BYTES,
    "pre_buffer": False,
    "coerce_int96_timestamp_unit": "us",  # nanoseconds hold 1677 to 2262 alone, and others would wrap
}
"""Options for every file."""

BROKEN = (pa.ArrowException, OSError, UnicodeDecodeError, BadFooter)
"""Errors of pyarrow for a file that is not Parquet, or is damaged; the last one for names of columns."""


class ParquetRows:
    """The rows of one Parquet file; see dataset.sources.event_file."""

    def __init__(
        self,
        file: SourceFile,
        *,
        growing: bool,
        columns: Sequence[str] = (),
        timestamps: Timestamps = "ms",
        only: str | None = None,
        max_row_bytes: int = MAX_ROW_BYTES,
    ) -> None:
        """`only`: the one column to read, or the field of one, if the file has it. `max_row_bytes`: of a row as text; a
        file whose rows cannot be so short is refused before it is read."""
        self._max_row_bytes = max_row_bytes
        self.file, self._only = file, only
        self.growing = growing
        """Whether it may not be complete yet: then it has no rows until it has its footer."""
        self.identity = ""
        self._columns, self._timestamps = list(columns), timestamps
        self._begins_G = [0]  # the first row of each row group, and the end of the last one
        self._version = ""
        self._num_bytes = self._counted_bytes = -1  # at the last look, at the last count
        self._raw: RawBytes | None = None
        self._open: pq.ParquetFile | None = None
        self._batches: Iterator[pa.RecordBatch] | None = None
        self._row = 0
        self._rest: pa.RecordBatch | None = None  # begins at `_row`; None: the next batch does

    def num_events(self) -> int:
        return self._begins_G[-1]

    def count(self) -> int:
        """The footer knows."""
        num_bytes = self._look()
        if num_bytes != self._counted_bytes:
            self._counted_bytes = num_bytes
            try:
                self._start()
            except BadInput:
                if not self.growing:
                    raise
        return self.num_events()

    def _look(self) -> int:
        """The file's size. Raises SourceGap if it is gone or was replaced."""
        look = self.file.look()
        replaced = self._version not in ("", look.version) or (self.num_events() and look.num_bytes != self._num_bytes)
        if replaced:
            raise SourceGap(
                f"{self.file.name}: the file was replaced while it was read, so its row numbers have changed; write to "
                f"a new file instead"
            )
        if not self.identity or look.num_bytes != self._num_bytes:
            self.identity = identity_of(self.file)
        self._version, self._num_bytes = look.version, look.num_bytes
        return look.num_bytes

    def read(self, begin: int, end: int, identity: str = "") -> Iterator[Events]:
        self._look()
        check_identity(self.file.name, identity, self.identity if identity.startswith(CONTENT) else self._version)
        try:
            if self._open is None:
                self._start()
            if end > self.num_events():
                raise SourceGap(
                    f"{self.file.name}: row {end - 1} was requested, but the file ends after {self.num_events()} rows"
                )
            self._go_to(begin)
            while self._row < end:
                batch = self._next(end - self._row)
                first = self._row
                self._row += batch.num_rows
                yield _events(batch, self._timestamps, first)
        except (SourceGap, SourceUnavailable):
            self.close()  # the next read starts at its row group
            raise
        except BROKEN as error:
            self.close()
            raise BadInput(f"{self.file.name}: not a Parquet file that can be read: {error}") from error

    def close(self) -> None:
        self._batches = self._rest = None
        self._open = None
        if self._raw is not None:
            self._raw.close()
            self._raw = None

    def _start(self) -> None:
        """Open the file and read its footer. Raises BadInput for a broken file or an impossible column."""
        self.close()
        self._raw = self.file.open(ahead=False)
        try:
            raw = _Seekable(self._raw, self.file.look().num_bytes)
            whole = pa.PythonFile(raw, mode="r")
            self._open = pq.ParquetFile(whole, **READING)
            groups = row_groups(_footer(raw))
            if wide := _wide_texts(self._open.schema, groups):
                self._open = pq.ParquetFile(whole, metadata=self._open.metadata, read_dictionary=wide, **READING)
            schema = self._open.schema_arrow
            names = schema.names
        except BROKEN as error:
            self.close()
            raise BadInput(f"{self.file.name}: not a whole Parquet file: {error}") from error
        if missing := [name for name in self._columns if name not in names]:
            raise BadInput(
                f"{self.file.name} has no column {missing[0]!r} (sources.*.columns); it has {', '.join(names)}"
            )
        if self._only is not None and (
            alone := [each for each in (self._only, self._only.split(".")[0]) if each in names]
        ):
            self._columns = alone[:1]
        chosen = [field for field in schema if not self._columns or field.name in self._columns]
        check_columns(pa.schema(chosen), self.file.name)
        self._check_sizes(self._open.schema, groups)
        self._begins_G = [0, *accumulate(group.num_rows for group in groups)]
        num_rows = self._open.metadata.num_rows
        if self._begins_G[-1] != num_rows:
            raise self._damaged(num_rows, self._begins_G.pop())

    def _go_to(self, row: int) -> None:
        """Let the next batch begin at `row`."""
        group = bisect_right(self._begins_G, row) - 1
        if self._batches is None or row < self._row or self._begins_G[group] > self._row:
            assert self._open is not None
            groups = range(group, len(self._begins_G) - 1)
            columns = self._columns or None
            self._batches = self._open.iter_batches(BATCH_ROWS, groups, columns, use_threads=False)
            self._row, self._rest = self._begins_G[group], None
        while self._row < row:
            self._row += self._next(row - self._row).num_rows

    def _next(self, max_rows: int) -> pa.RecordBatch:
        """The next rows, at most `max_rows`."""
        assert self._batches is not None
        batch = self._rest if self._rest is not None else next(self._batches, None)
        if batch is None:
            raise self._damaged(self.num_events(), self._row)
        num_rows = min(max_rows, _num_rows_within(batch, BATCH_BYTES))
        self._rest = batch.slice(num_rows) if batch.num_rows > num_rows else None
        return batch.slice(0, num_rows)

    def _check_sizes(self, schema: pq.ParquetSchema, groups: Sequence[RowGroup]) -> None:
        """Raise BadInput where rows must be too long, however short their values are: lists may be packed so well that
        a file of a kilobyte has gigabytes of them."""
        for number, group in enumerate(groups):
            most = max(group.num_rows, min(group.num_rows * self._max_row_bytes // TEXT_OF_VALUE, MAX_LISTED))
            for index, column in enumerate(group.columns):
                if column is None or column.num_values <= most:
                    continue
                path = schema.column(index).path
                if not self._columns or any(f"{path}.".startswith(f"{name}.") for name in self._columns):
                    raise BadInput(
                        f"{self.file.name}: row group {number} has {column.num_values:,} values of column {path!r} in "
                        f"{group.num_rows:,} rows: more than max_event_bytes allows. Name the columns to read in "
                        f"sources.*.columns, or write shorter lists"
                    )

    def _damaged(self, said: int, found: int) -> BadInput:
        problem = f"its footer says that it has {said} rows, but there are {found}"
        return BadInput(f"{self.file.name} is damaged: {problem}; write it again")


def _footer(raw: "_Seekable") -> bytes:
    """The metadata at the end of a file, which pyarrow has read before."""
    raw.seek(-TAIL_BYTES, io.SEEK_END)
    num_bytes = int.from_bytes(raw.read(4), "little")
    raw.seek(-TAIL_BYTES - num_bytes, io.SEEK_END)
    return raw.read(num_bytes)


def _wide_texts(schema: pq.ParquetSchema, groups: Sequence[RowGroup]) -> list[str]:
    """The columns of texts that are kept as numbers of a dictionary until they are written, since a long text may be
    repeated for a few bytes."""
    found = {
        index
        for group in groups
        for index, column in enumerate(group.columns)
        if column is not None and column.has_dictionary and column.num_bytes > WIDE_BYTES
    }
    leaves = [schema.column(index) for index in sorted(found)]
    return [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]


def _num_rows_within(batch: pa.RecordBatch, max_bytes: int) -> int:
    """How many of the first rows have about `max_bytes`, one at least."""
    bytes_N = np.full(batch.num_rows, batch.nbytes / max(1, batch.num_rows))
    for column in batch.columns:
        bytes_N += _repeated_bytes(column)
    return max(1, int(np.searchsorted(np.cumsum(bytes_N), max_bytes)))


def _repeated_bytes(column: pa.Array) -> NDArray[np.float64] | float:
    """(N,) bytes of the texts of each row that are kept as numbers of a dictionary."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        length_D = pc.binary_length(column.dictionary).fill_null(0)
        at_N = column.indices.fill_null(0)
        return np.asarray(length_D.take(at_N).to_numpy(), np.float64) if len(length_D) else 0.0
    if pa.types.is_struct(kind):
        return sum((_repeated_bytes(field) for field in column.flatten()), 0.0)
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return 0.0
    inner_M = _repeated_bytes(column.flatten())
    if isinstance(inner_M, float):
        return inner_M
    parent_M = np.repeat(np.arange(len(column)), pc.list_value_length(column).fill_null(0).to_numpy())
    return np.bincount(parent_M, inner_M, minlength=len(column)).astype(np.float64)


def _events(batch: pa.RecordBatch, timestamps: Timestamps, first_row: int) -> Events:
    """Rows as events, on their own buffer."""
    lines, wrong = lines_of_rows(batch, timestamps), unreadable_rows(batch, timestamps)
    faults = [wrong.get(row) for row in range(len(lines))] if wrong else None
    _, offsets, data = lines.buffers()
    offset_N1 = np.frombuffer(offsets, np.int64)[lines.offset : lines.offset + len(lines) + 1]
    rows = np.arange(first_row, first_row + len(lines), dtype=np.int64)
    times = np.full(len(lines), -1, np.int64)
    return Events(memoryview(data), offset_N1[:-1].copy(), offset_N1[1:] - 1, rows, times, faults=faults)


class _Seekable(io.RawIOBase):
    """A file at any offset as a file with a position."""

    def __init__(self, raw: RawBytes, num_bytes: int) -> None:
        self._raw, self._num_bytes, self._at = raw, num_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._num_bytes)[whence]
        return self._at

    def read(self, num_bytes: int = -1) -> bytes:
        left = max(0, self._num_bytes - self._at)
        data = self._raw.read_at(left if num_bytes < 0 else min(num_bytes, left), self._at)
        self._at += len(data)
        return data
