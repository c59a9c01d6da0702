"""Rows of a table as JSON text, a line each, column by column: no Python step per row.

A row is an object with the table's columns in their order. Whole numbers, floats, booleans and text are themselves;
lists and structs are lists and objects. Types that JSON lacks have rules: NaN and infinities are null; a timestamp is a
whole number of unix `timestamps` (rounded down), or ISO text; a date or a time is ISO text; binary is base64; a decimal
is text. Other types are refused, and so are two columns of one name. A text with a quote, a backslash or a control
character is escaped by Python's json. A time that its text cannot hold is null, and `unreadable_rows` names its row.

Shapes: N rows.
"""

import base64
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headrace.errors import BadInput
from headrace.lists import offsets_of

Timestamps = Literal["s", "ms", "us", "iso"]
TO_ESCAPE = r'["\\\x00-\x1f]'
TEXT = pa.large_string()
SECONDS = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
"""Units in a second."""
ISO_SECONDS = -62_135_596_800, 253_402_300_800
"""The first second of the year 1, and of the year 10000: ISO text has the years between."""
ISO_DAYS = -12_687_428, 11_248_737
"""The first day of the year -32767, and the last of the year 32767, which are those that Arrow writes."""
I64_MAX = (1 << 63) - 1
DAY_S = 86_400


def check_columns(schema: pa.Schema, where: str) -> None:
    """Raise BadInput for a column whose type has no JSON text, and for two fields of one name."""
    if (twice := _repeated(schema)) is not None:
        raise BadInput(
            f"{where}: two columns have the name {twice!r}; rename one of them, or name the other columns in "
            f"sources.*.columns"
        )
    for field in schema:
        if (bad := _unsupported(field.type)) is not None:
            raise BadInput(
                f"{where}: column {field.name!r} has type {bad}, which has no text in JSON; name the other columns in "
                f"sources.*.columns"
            )


def lines_of_rows(batch: pa.RecordBatch, timestamps: Timestamps) -> pa.Array:
    """(N,) each row as JSON text and a line feed, as large strings."""
    columns = [(field.name, batch.column(number)) for number, field in enumerate(batch.schema)]
    return _object(columns, timestamps, batch.num_rows, ending="}\n")


def line_of_row(row: Mapping[str, Any], timestamps: Timestamps) -> str:
    """The plain twin, for one row of `to_pylist`; numbers may be written in another way."""
    return json.dumps(_plain(row, timestamps), ensure_ascii=False, separators=(",", ":")) + "\n"


def unreadable_rows(batch: pa.RecordBatch, timestamps: Timestamps) -> dict[int, str]:
    """Rows with a time that its text cannot hold, and what is wrong with each."""
    found: dict[int, str] = {}
    for number, field in enumerate(batch.schema):
        bad_N = _beyond(batch.column(number), timestamps)
        for row in [] if bad_N is None else np.flatnonzero(bad_N).tolist():
            found.setdefault(row, f"column {field.name!r} has a time that cannot be written")
    return found


def _beyond(column: pa.Array, timestamps: Timestamps) -> NDArray[np.bool_] | None:
    """(N,) whether a time in the value is beyond what its text can hold; None: no time is in this type."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _beyond(column.dictionary_decode(), timestamps)
    if pa.types.is_struct(kind):
        each = [found for field in column.flatten() if (found := _beyond(field, timestamps)) is not None]
        return np.logical_or.reduce(each) if each else None
    if _is_list(kind):
        inner_M = _beyond(column.flatten(), timestamps)
        if inner_M is None:
            return None
        parent_M = np.repeat(np.arange(len(column)), _lengths(column))
        return np.bincount(parent_M[inner_M], minlength=len(column)) > 0
    if pa.types.is_timestamp(kind):
        unit = SECONDS[kind.unit]
        if timestamps == "iso":
            low, high = ISO_SECONDS[0] * unit, ISO_SECONDS[1] * unit - 1
        else:
            high = I64_MAX // max(1, SECONDS[timestamps] // unit)
            low = -high
    elif pa.types.is_date32(kind):
        low, high = ISO_DAYS
    elif pa.types.is_time(kind):
        low, high = 0, DAY_S * SECONDS[kind.unit] - 1
    else:
        return None
    value_N = column.cast(pa.int32() if kind.bit_width == 32 else pa.int64()).fill_null(0).to_numpy()
    return np.asarray((value_N < max(low, -I64_MAX)) | (value_N > min(high, I64_MAX)))


def _repeated(fields: Sequence[pa.Field] | pa.Schema | pa.StructType) -> str | None:
    """A name that two of the fields, or two fields of a struct in them, have."""
    counts = Counter(field.name for field in fields)
    for field in fields:
        if counts[field.name] > 1:
            return str(field.name)
        inner = field.type
        while _is_list(inner):
            inner = inner.value_type
        if pa.types.is_struct(inner) and (found := _repeated(inner)) is not None:
            return found
    return None


def _unsupported(kind: pa.DataType) -> pa.DataType | None:
    """The type, or the type inside it, that has no text; None if all have."""
    if isinstance(kind, pa.BaseExtensionType):
        return kind
    if pa.types.is_dictionary(kind):
        return _unsupported(kind.value_type)
    if _is_list(kind):
        return _unsupported(kind.value_type)
    if pa.types.is_struct(kind):
        return next((bad for field in kind if (bad := _unsupported(field.type)) is not None), None)
    types = pa.types
    known = (types.is_null, types.is_boolean, types.is_integer, types.is_floating, types.is_decimal, _is_text)
    if any(is_kind(kind) for is_kind in (*known, _is_binary, types.is_timestamp, types.is_date, types.is_time)):
        return None
    return kind


def _is_list(kind: pa.DataType) -> bool:
    is_view = pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind)
    return bool(is_view or pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_binary(kind: pa.DataType) -> bool:
    is_any_size = pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)
    return bool(is_any_size or pa.types.is_fixed_size_binary(kind))


def _object(columns: Sequence[tuple[str, pa.Array]], timestamps: Timestamps, num: int, ending: str = "}") -> pa.Array:
    """(N,) objects with these columns."""
    parts: list[Any] = []
    for number, (name, column) in enumerate(columns):
        before = "," if number else "{"
        parts += [pa.scalar(f"{before}{json.dumps(name, ensure_ascii=False)}:", TEXT), _texts(column, timestamps)]
    if not columns:
        return pa.array(["{" + ending] * num, TEXT)
    return pc.binary_join_element_wise(*parts, pa.scalar(ending, TEXT), pa.scalar("", TEXT))


def _texts(column: pa.Array, timestamps: Timestamps) -> pa.Array:
    """(N,) the JSON text of each value, "null" for none."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _texts(column.dictionary_decode(), timestamps)
    if pa.types.is_timestamp(kind) or pa.types.is_date32(kind) or pa.types.is_time(kind):
        bad_N = _beyond(column, timestamps)
        if bad_N is not None and bad_N.any():
            column = pc.if_else(pa.array(bad_N), pa.scalar(None, kind), column)
    if pa.types.is_struct(kind):
        inner = [(kind.field(number).name, each) for number, each in enumerate(column.flatten())]
        texts = _object(inner, timestamps, len(column))
    elif _is_list(kind):
        texts = _list(column, timestamps)
    elif pa.types.is_null(kind):
        return pa.array(["null"] * len(column), TEXT)
    else:
        texts = _scalars(column, timestamps)
    if column.null_count:
        texts = pc.if_else(column.is_valid(), texts, pa.scalar("null", TEXT))
    return texts


def _lengths(column: pa.Array) -> NDArray[np.int64]:
    """(N,) the number of values in each list; 0 in none."""
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    return np.asarray(lengths, np.int64)


def _list(column: pa.Array, timestamps: Timestamps) -> pa.Array:
    offset_N1 = offsets_of(_lengths(column))
    inner = pa.LargeListArray.from_arrays(pa.array(offset_N1), _texts(column.flatten(), timestamps))
    joined = pc.binary_join(inner, pa.scalar(",", TEXT))
    return pc.binary_join_element_wise(pa.scalar("[", TEXT), joined, pa.scalar("]", TEXT), pa.scalar("", TEXT))


def _scalars(column: pa.Array, timestamps: Timestamps) -> pa.Array:
    """(N,) texts; what they are for nulls does not matter."""
    kind = column.type
    if _is_text(kind):
        return _quoted(_escaped(column.cast(TEXT)))
    if pa.types.is_floating(kind):
        if pa.types.is_float16(kind):
            column = column.cast(pa.float32())
        return pc.if_else(pc.is_finite(column), column.cast(TEXT), pa.scalar("null", TEXT))
    if pa.types.is_timestamp(kind):
        return _timestamps(column, timestamps)
    if _is_binary(kind):
        values = [None if value is None else base64.b64encode(value).decode() for value in column.to_pylist()]
        return _quoted(pa.array(values, TEXT))
    if pa.types.is_date(kind):
        return _quoted(column.cast(pa.date32()).cast(TEXT))
    if pa.types.is_time(kind):
        return _quoted(pa.array([None if v is None else v.isoformat() for v in _microseconds(column)], TEXT))
    if pa.types.is_decimal(kind):
        return _quoted(pa.array([None if v is None else str(v) for v in column.to_pylist()], TEXT))
    return column.cast(TEXT)  # whole numbers and booleans


def _microseconds(column: pa.Array) -> list[time | None]:
    """Times of day; Python's have microseconds."""
    found: list[time | None] = column.cast(pa.time64("us"), safe=False).to_pylist()
    return found


def _timestamps(column: pa.Array, timestamps: Timestamps) -> pa.Array:
    kind = column.type
    if timestamps == "iso":
        zone = kind.tz or "UTC"
        values = column.cast(pa.timestamp("us", zone), safe=False).cast(pa.timestamp("us", "UTC")).to_pylist()
        return _quoted(pa.array([None if v is None else v.isoformat() for v in values], TEXT))
    numbers = column.cast(pa.int64())
    ours, theirs = SECONDS[timestamps], SECONDS[kind.unit]
    if ours >= theirs:
        return pc.multiply_checked(numbers, ours // theirs).cast(TEXT)
    values_N = numbers.fill_null(0).to_numpy(zero_copy_only=False) // (theirs // ours)  # rounded down, also before 1970
    return pa.array(values_N).cast(TEXT)


def _quoted(texts: pa.Array) -> pa.Array:
    quote = pa.scalar('"', TEXT)
    return pc.binary_join_element_wise(quote, texts, quote, pa.scalar("", TEXT))


def _escaped(texts: pa.Array) -> pa.Array:
    """Texts with JSON's escapes; most columns need none."""
    found = pc.fill_null(pc.match_substring_regex(texts, TO_ESCAPE), False)
    if not pc.any(found).as_py():
        return texts
    escaped = []
    for text in texts.filter(found).cast(pa.large_binary()).to_pylist():  # bytes that are not UTF-8 stay as they are
        plain = json.dumps(text.decode(errors="surrogateescape"), ensure_ascii=False)[1:-1]
        escaped.append(plain.encode(errors="surrogateescape"))
    return pc.replace_with_mask(texts, found, pa.array(escaped, pa.large_binary()).view(TEXT))


def _plain(value: Any, timestamps: Timestamps) -> Any:
    """A value of `to_pylist` as JSON has it."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case datetime():
            aware = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
            if timestamps == "iso":
                return aware.astimezone(UTC).isoformat()
            since_epoch = aware - datetime(1970, 1, 1, tzinfo=UTC)
            micros = (since_epoch.days * 86_400 + since_epoch.seconds) * 1_000_000 + since_epoch.microseconds
            return micros * SECONDS[timestamps] // 1_000_000
        case date() | time():
            return value.isoformat()
        case Decimal():
            return str(value)
        case bytes():
            return base64.b64encode(value).decode()
        case list():
            return [_plain(each, timestamps) for each in value]
        case Mapping():
            return {name: _plain(each, timestamps) for name, each in value.items()}
        case _:
            return value
