"""The sizes of the columns in the footer of a Parquet file.

pyarrow's own reading of one column's metadata ends the process where they are damaged, or encrypted. So they are read
here: the footer is a struct of Thrift's compact protocol (github.com/apache/parquet-format, parquet.thrift).
"""

from typing import Any, NamedTuple

DICTIONARIES = frozenset({2, 8})
"""PLAIN_DICTIONARY and RLE_DICTIONARY of Encoding."""
TAIL_BYTES = 8
"""The footer's length and the magic number, at the end of the file."""
MAX_DEPTH, MAX_SHIFT = 64, 63
TRUE, FALSE, BYTE, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = 1, 2, 3, 7, 8, 9, 10, 11, 12
"""Types of the compact protocol; those between BYTE and DOUBLE are whole numbers."""
ROW_GROUPS, COLUMNS, NUM_ROWS, META_DATA, ENCODINGS, NUM_VALUES, NUM_BYTES = 4, 1, 3, 3, 2, 5, 6
"""Numbers of fields: of FileMetaData, RowGroup (two), ColumnChunk, ColumnMetaData (three)."""


class BadFooter(ValueError):
    """A footer is not as Parquet has it."""


class ColumnSize(NamedTuple):
    """One column of a row group."""

    num_values: int
    num_bytes: int
    """Without compression."""
    has_dictionary: bool


class RowGroup(NamedTuple):
    """One row group."""

    num_rows: int
    columns: list[ColumnSize | None]
    """In the order of the schema's leaves; None: what the file says of it is elsewhere, or encrypted."""


def row_groups(footer: bytes) -> list[RowGroup]:
    """The row groups of a footer. Raises BadFooter."""
    try:
        found = _Thrift(footer).struct(0)
        return [RowGroup(_whole(each, NUM_ROWS), [_size(c) for c in each[COLUMNS]]) for each in found[ROW_GROUPS]]
    except (IndexError, KeyError, TypeError, AttributeError) as error:
        raise BadFooter(f"its footer is damaged: {type(error).__name__}") from None


def _size(chunk: dict[int, Any]) -> ColumnSize | None:
    column = chunk.get(META_DATA)
    if column is None:
        return None
    packed = not DICTIONARIES.isdisjoint(column[ENCODINGS])
    return ColumnSize(_whole(column, NUM_VALUES), _whole(column, NUM_BYTES), packed)


def _whole(struct: dict[int, Any], field: int) -> int:
    found = struct[field]
    if not isinstance(found, int) or found < 0:
        raise BadFooter("its footer is damaged: it has sizes below 0")
    return found


class _Thrift:
    """Reads values one after another. Texts are passed over, and so are maps; raises IndexError at the end."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def struct(self, depth: int) -> dict[int, Any]:
        """Values by the number of their field."""
        found: dict[int, Any] = {}
        field = 0
        while head := self._byte():
            field = field + (head >> 4) if head >> 4 else self._number()
            kind = head & 15
            found[field] = kind == TRUE if kind in (TRUE, FALSE) else self._value(kind, depth + 1)
        return found

    def _value(self, kind: int, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise BadFooter(f"its footer is nested deeper than {MAX_DEPTH}")
        if kind == STRUCT:
            return self.struct(depth)
        if kind in (LIST, SET):
            head = self._byte()
            size = head >> 4 if head >> 4 < 15 else self._varint()
            return [self._value(head & 15, depth + 1) for _ in range(size)]
        if kind == MAP:
            kinds = self._byte() if (size := self._varint()) else 0
            for _ in range(size):
                self._value(kinds >> 4, depth + 1)
                self._value(kinds & 15, depth + 1)
            return None
        if kind in (TRUE, FALSE, BYTE):
            return self._byte()
        if kind in (BINARY, DOUBLE):
            num_bytes = self._varint() if kind == BINARY else 8
            self._at += num_bytes
            return None
        if BYTE < kind < DOUBLE:
            return self._number()
        raise BadFooter(f"its footer is damaged: it has a type {kind}")

    def _byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def _varint(self) -> int:
        value = 0
        for shift in range(0, MAX_SHIFT + 1, 7):
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise BadFooter("its footer is damaged: it has a number beyond 64 bits")

    def _number(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
