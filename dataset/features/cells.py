"""Values of one slot or field by row, as arrays, and what is done to them.

Shapes: R rows, N values of all rows, B samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, assert_never

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headrace.dataset.features.conversion import is_list, list_parts
from headrace.dataset.features.feature_kernels import cross_lists, cross_signs, take_lists
from headrace.dataset.formats.arrow_columns import signs_of_texts
from headrace.dataset.spec.feature_keys import TimePart, TimeUnit
from headrace.lists import offsets_of

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
PER_SECOND = {TimeUnit.SECONDS: 1, TimeUnit.MILLISECONDS: 1_000, TimeUnit.MICROSECONDS: 1_000_000}
FIRST_S, END_S = -62_135_596_800, 253_402_300_800
"""The times of the years 1 to 9999, in unix seconds."""
DAY_S = 86_400
MONDAY = 3
"""1970-01-01 was a Thursday."""


@dataclass(frozen=True, slots=True)
class Cells:
    """The values of rows: row r has `value_N[offset_R1[r]:offset_R1[r + 1]]`; without offsets, each row has one."""

    value_N: NDArray[Any] | pa.Array
    """Numbers, or an Arrow array of texts."""
    offset_R1: I64 | None = None

    def __len__(self) -> int:
        return len(self.value_N) if self.offset_R1 is None else len(self.offset_R1) - 1

    @property
    def offsets(self) -> I64:
        """(R + 1,)"""
        return np.arange(len(self.value_N) + 1, dtype=np.int64) if self.offset_R1 is None else self.offset_R1

    def with_values(self, value_N: NDArray[Any]) -> "Cells":
        """Other values in the same rows."""
        return Cells(value_N, self.offset_R1)

    def row_of(self) -> I64:
        """(N,) the row of each value."""
        rows = np.arange(len(self), dtype=np.int64)
        return rows if self.offset_R1 is None else np.repeat(rows, np.diff(self.offset_R1))

    def sizes(self) -> I64:
        """(R,) the number of values in each row; of texts, their bytes."""
        if not isinstance(self.value_N, pa.Array):
            return np.diff(self.offsets)
        end_N1 = offsets_of(pc.binary_length(self.value_N).fill_null(0).to_numpy(zero_copy_only=False))
        return np.diff(end_N1[self.offsets])

    def take(self, index_B: I64) -> "Cells":
        """The cells of some rows."""
        if isinstance(self.value_N, pa.Array):
            assert self.offset_R1 is None or bool((np.diff(self.offset_R1) <= 1).all()), "texts are single"
        if self.offset_R1 is None:
            return Cells(_taken(self.value_N, index_B))
        length_R = np.diff(self.offset_R1)
        offset_B1 = np.zeros(len(index_B) + 1, np.int64)
        np.cumsum(length_R[index_B], out=offset_B1[1:])
        if isinstance(self.value_N, pa.Array):
            return Cells(_taken(self.value_N, self.offset_R1[:-1][index_B][length_R[index_B] > 0]), offset_B1)
        out_K = np.empty(int(offset_B1[-1]), self.value_N.dtype)
        take_lists(self.value_N, self.offset_R1, index_B, out_K, offset_B1)
        return Cells(out_K, offset_B1)

    def filled(self, default: Any) -> "Cells":
        """With one value, `default`, in each row that has none."""
        if self.offset_R1 is None or not (empty_R := np.diff(self.offset_R1) == 0).any():
            return self
        offset_R1 = self.offset_R1 + offsets_of(empty_R)
        if isinstance(self.value_N, pa.Array):
            full_N = pc.if_else(pa.array(empty_R), pa.scalar(default, pa.utf8()), self.nullable())
            return Cells(full_N)
        full_N = np.insert(self.value_N, self.offset_R1[:-1][empty_R], default)
        return Cells(full_N, None if len(full_N) == len(self) and (np.diff(offset_R1) == 1).all() else offset_R1)

    def without(self, wrong_R: NDArray[np.bool_]) -> "Cells":
        """Without the values of some rows."""
        length_R = np.diff(self.offsets)
        kept_N = np.repeat(~wrong_R, length_R)
        offset_R1 = offsets_of(np.where(wrong_R, 0, length_R))
        values = self.value_N
        return Cells(values.filter(pa.array(kept_N)) if isinstance(values, pa.Array) else values[kept_N], offset_R1)

    def nullable(self) -> pa.Array:
        """(R,) the only value of each row as an Arrow array, null where there is none. Rows have at most one."""
        values = self.value_N if isinstance(self.value_N, pa.Array) else pa.array(self.value_N)
        if self.offset_R1 is None:
            return values
        has_R = np.diff(self.offset_R1) > 0
        return values.take(pa.array(self.offset_R1[:-1], mask=~has_R))

    def signs(self) -> "Cells":
        """Texts as their signs."""
        if not isinstance(self.value_N, pa.Array):
            return self.with_values(self.value_N.astype(np.uint64, copy=False))
        return self.with_values(signs_of_texts(self.value_N))


def _taken(values: NDArray[Any] | pa.Array, index_B: I64) -> Any:
    return values.take(pa.array(index_B)) if isinstance(values, pa.Array) else values[index_B]


def cells_of(column: pa.Array) -> Cells:
    """The cells of a column of values or lists; nulls have no value, in lists too."""
    if is_list(column.type):
        offset_R1, values = list_parts(column)
        if values.null_count:
            valid_N = values.is_valid().to_numpy(zero_copy_only=False)
            num_N1 = offsets_of(valid_N)
            offset_R1, values = num_N1[offset_R1], values.drop_null()
        return Cells(_values(values), offset_R1)
    if not column.null_count:
        return Cells(_values(column))
    valid_R = column.is_valid().to_numpy(zero_copy_only=False)
    return Cells(_values(column.drop_null()), offsets_of(valid_R))


def _values(values: pa.Array) -> NDArray[Any] | pa.Array:
    return values if pa.types.is_string(values.type) else values.to_numpy(zero_copy_only=False)


def split_texts(cells: Cells, separator: str) -> Cells:
    """The values of texts with a separator; empty values are left out."""
    texts = cells.value_N
    pieces = pc.split_pattern(texts, separator)
    offset_N1, values = list_parts(pieces)
    kept_M = pc.not_equal(values, "").to_numpy(zero_copy_only=False)
    num_M1 = offsets_of(kept_M)
    return Cells(values.filter(pa.array(kept_M)), num_M1[offset_N1[cells.offsets]])


def cross(parts: Sequence[Cells]) -> Cells:
    """(R,) the crosses of the signs of all parts, each with each; a row without one part has none."""
    crossed = Cells(np.zeros(len(parts[0]), np.uint64))
    for part in parts:
        if crossed.offset_R1 is None and part.offset_R1 is None:
            out_N = np.empty(len(crossed), np.uint64)
            cross_signs(crossed.value_N, part.value_N, out_N)
            crossed = Cells(out_N)
            continue
        offset_R1, part_offset_R1 = crossed.offsets, part.offsets
        out_offset_R1 = np.zeros(len(offset_R1), np.int64)
        np.cumsum(np.diff(offset_R1) * np.diff(part_offset_R1), out=out_offset_R1[1:])
        out_K = np.empty(int(out_offset_R1[-1]), np.uint64)
        cross_lists(crossed.value_N, offset_R1, part.value_N, part_offset_R1, out_K, out_offset_R1)
        crossed = Cells(out_K, out_offset_R1)
    return crossed


def seconds_of(cells: Cells, unit: TimeUnit) -> tuple[I64, NDArray[np.bool_]]:
    """(N,) unix seconds, rounded down, and which values are no time of the years 1 to 9999."""
    if unit is TimeUnit.ISO:
        assert isinstance(cells.value_N, pa.Array), "the field is read as text"
        found = [_iso_seconds(text) for text in cells.value_N.to_pylist()]
        wrong_N = np.array([each is None for each in found], np.bool_)
        return np.array([each or 0 for each in found], np.int64), wrong_N
    second_N = np.asarray(cells.value_N, np.float64) / PER_SECOND[unit]
    wrong_N = ~((second_N >= FIRST_S) & (second_N < END_S))
    return np.floor(np.where(wrong_N, 0.0, second_N)).astype(np.int64), wrong_N


def _iso_seconds(text: str) -> int | None:
    try:
        when = datetime.fromisoformat(text)
        since = (when if when.tzinfo is not None else when.replace(tzinfo=UTC)) - datetime.fromtimestamp(0, UTC)
    except (ValueError, OverflowError):
        return None
    return since.days * DAY_S + since.seconds


def part_of_time(second_N: I64, part: TimePart) -> I64:
    """(N,) a part of unix seconds, in UTC."""
    day_N = second_N // DAY_S
    weekday_N = (day_N + MONDAY) % 7
    hour_N = second_N % DAY_S // 3600
    match part:
        case TimePart.MINUTE:
            return second_N // 60 % 60
        case TimePart.HOUR:
            return hour_N
        case TimePart.WEEKDAY:
            return weekday_N
        case TimePart.WEEK_HOUR:
            return 24 * weekday_N + hour_N
        case TimePart.DAY:
            return day_N
        case TimePart.DAY_OF_MONTH:
            days = day_N.astype("datetime64[D]")
            of_month: I64 = (days - days.astype("datetime64[M]")).astype(np.int64)
            return of_month + 1
        case TimePart.MONTH:
            return day_N.astype("datetime64[D]").astype("datetime64[M]").astype(np.int64) % 12 + 1
        case TimePart.YEAR:
            return day_N.astype("datetime64[D]").astype("datetime64[Y]").astype(np.int64) + 1970
        case _:
            assert_never(part)
