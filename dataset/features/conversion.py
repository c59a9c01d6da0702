"""The rules by which values of events become whole numbers, numbers or text.

`plain_value` defines them, value by value; `conform` applies them to a column. Both give the same values and errors.

| from / to | whole number | number | text |
|---|---|---|---|
| whole number | itself, if it fits | rounded to float64 | its decimal digits |
| number | itself, if it has no fraction and is at most 2**53 | itself | refused |
| text | its digits, with or without a sign | as JSON writes numbers | itself |
| true, false | 1, 0 | 1.0, 0.0 | "true", "false" |

Of a list whose length alone is needed, a single value counts as one.

Shapes: E events, N values.
"""

import re
from collections.abc import Mapping
from typing import assert_never

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headrace.dataset.spec.event_format import EventField, FieldKind
from headrace.kernel_cache import njit
from headrace.lists import offsets_of

EXACT = 1 << 53
"""Largest whole number up to which every one is a float64."""
MAX_DIGITS = 20
"""Digits of the largest number of 64 bits; a text with more, even zeros, is no whole number."""
MAX_SHOWN = 60
"""Longest part of a value in an error."""
_WHOLE = re.compile(rf"[+-]?[0-9]{{1,{MAX_DIGITS}}}")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
Bool = NDArray[np.bool_]


class BadValue(ValueError):
    """A value cannot become what its field is read as; the text says why."""


def plain_value(value: object, field: EventField) -> int | float | str:
    """One value of an event as its field is read. Raises BadValue."""
    match field.kind:
        case FieldKind.WHOLE:
            return _whole(value, field.signed)
        case FieldKind.NUMBER:
            return _number(value)
        case FieldKind.TEXT:
            return _text(value)
        case FieldKind.LENGTH:
            return 1
        case _:
            assert_never(field.kind)


def _shown(value: object) -> str:
    if isinstance(value, Mapping | list):
        return "a list" if isinstance(value, list) else "an object"
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


def _whole(value: object, signed: bool) -> int:
    found: int | None = None
    if isinstance(value, int):  # a bool is one
        found = int(value)
    elif isinstance(value, float) and value.is_integer() and abs(value) <= EXACT:
        found = int(value)
    elif isinstance(value, str) and _WHOLE.fullmatch(value):
        found = int(value)
    low, high = (-(1 << 63), 1 << 63) if signed else (0, 1 << 64)
    if found is None or not low <= found < high:
        limits = "-2**63 to 2**63 - 1" if signed else "0 to 2**64 - 1"
        hint = '; for text, set values = "string" in the slot' if isinstance(value, str) and not signed else ""
        raise BadValue(f"{_shown(value)} is not a whole number from {limits}{hint}")
    return found


def _number(value: object) -> float:
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return float("inf") if value > 0 else float("-inf")
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        return float(value)
    raise BadValue(f"{_shown(value)} is not a number")


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 64:
            raise BadValue(f"{_shown(value)} has more than 64 bits")
        return str(value)
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise BadValue(f"not UTF-8: {error}") from None
        return value
    raise BadValue(f"{_shown(value)} is not text or a whole number")


@njit(nogil=True, cache=True)
def parse_whole(data, begin_N, end_N, signed, out_N, wrong_N):  # type: ignore[no-untyped-def]
    """Parse decimal texts `data[begin_N[n]:end_N[n]]`, with or without a sign, to `out_N` (uint64: the bits of an int64
    if `signed`); set `wrong_N` for those that are none, or do not fit. Its twin is `plain_value`."""
    for n in range(len(begin_N)):
        i, end = begin_N[n], end_N[n]
        negative = i < end and data[i] == 45
        if i < end and (data[i] == 45 or data[i] == 43):
            i += 1
        wrong = not 1 <= end - i <= 20
        limit = np.uint64(18446744073709551615)
        if signed:
            limit = np.uint64(9223372036854775808) if negative else np.uint64(9223372036854775807)
        elif negative:
            limit = np.uint64(0)
        value = np.uint64(0)
        while i < end and not wrong:
            digit = data[i] - 48
            if data[i] < 48 or data[i] > 57:
                wrong = True
            elif np.uint64(digit) > limit or value > (limit - np.uint64(digit)) // np.uint64(10):
                wrong = True
            else:
                value = value * np.uint64(10) + np.uint64(digit)
            i += 1
        wrong_N[n] = wrong
        out_N[n] = np.uint64(0) - value if negative else value


def conform(column: pa.Array, field: EventField) -> tuple[pa.Array, list[tuple[int, str]]]:
    """(E,) A column as its field is read, of the field's type or a list of it; and the events with a wrong value.

    A wrong value is null in the answer.
    """
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if not is_list(column.type):
        return _conform_values(column, field, np.arange(len(column)))
    if field.kind is FieldKind.LENGTH:
        return pc.list_value_length(column).cast(pa.int64()), []
    offset_E1, values = list_parts(column)
    if values.type.equals(field.type):
        return column, []
    event_N = np.repeat(np.arange(len(column)), np.diff(offset_E1))
    found, errors = _conform_values(values, field, event_N)
    return lists_of(found, offset_E1, column.is_null().to_numpy(zero_copy_only=False)), errors


def is_list(kind: pa.DataType) -> bool:
    """Whether a type is one of lists."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def list_parts(column: pa.Array) -> tuple[NDArray[np.int64], pa.Array]:
    """(E + 1,) offsets from 0, and the values, of a list column; a null is an empty list."""
    lengths = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
    offset_E1 = np.zeros(len(column) + 1, np.int64)
    np.cumsum(lengths, out=offset_E1[1:])
    return offset_E1, column.flatten()


def lists_of(values: pa.Array, offset_E1: NDArray[np.int64], null_E: Bool) -> pa.Array:
    """Lists of `values`; those with `null_E` are null."""
    mask = pa.array(null_E) if null_E.any() else None
    return pa.ListArray.from_arrays(pa.array(offset_E1.astype(np.int32)), values, mask=mask)


def as_lists(column: pa.Array) -> pa.Array:
    """A column with each value as a list of one; a list column as it is."""
    if is_list(column.type):
        return column
    null_E = column.is_null().to_numpy(zero_copy_only=False)
    offset_E1 = offsets_of(~null_E)
    return lists_of(column.drop_null(), offset_E1, null_E)


def _conform_values(
    values: pa.Array, field: EventField, event_N: NDArray[np.int64]
) -> tuple[pa.Array, list[tuple[int, str]]]:
    if field.kind is FieldKind.LENGTH:
        return pc.if_else(values.is_valid(), pa.scalar(1, pa.int64()), pa.scalar(None, pa.int64())), []
    if values.type.equals(field.type):
        return values, []
    if pa.types.is_null(values.type):
        return pa.nulls(len(values), field.type), []
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    found, wrong_N = _converted(values, field)
    wrong_N = wrong_N & values.is_valid().to_numpy(zero_copy_only=False)
    if not wrong_N.any():
        return found, []
    errors: dict[int, str] = {}
    for n in np.flatnonzero(wrong_N).tolist():
        if int(event_N[n]) not in errors:
            errors[int(event_N[n])] = f"field {field.path!r}: {_reason(values[n].as_py(), field)}"
    return pc.if_else(pa.array(wrong_N), pa.scalar(None, field.type), found), list(errors.items())


def _reason(value: object, field: EventField) -> str:
    try:
        plain_value(value, field)
    except BadValue as error:
        return str(error)
    return f"{_shown(value)} is not a value of kind {field.kind.value}"


def _converted(values: pa.Array, field: EventField) -> tuple[pa.Array, Bool]:
    """(N,) converted values, null where `values` is; and which are wrong, with any value."""
    none_N, all_N = np.zeros(len(values), np.bool_), np.ones(len(values), np.bool_)
    kind, wanted = values.type, field.type
    if pa.types.is_boolean(kind):
        if field.kind is FieldKind.TEXT:
            return values.cast(wanted), none_N
        return values.cast(pa.uint8()).cast(wanted), none_N
    if pa.types.is_large_string(kind):
        values, kind = values.cast(pa.utf8()), pa.utf8()
    match field.kind:
        case FieldKind.TEXT:
            if pa.types.is_integer(kind) or pa.types.is_string(kind):
                return values.cast(wanted), none_N
        case FieldKind.NUMBER:
            if pa.types.is_integer(kind) or pa.types.is_floating(kind):
                return values.cast(wanted, safe=False), none_N
            if pa.types.is_string(kind):
                return _plainly(values, field)
        case FieldKind.WHOLE:
            if pa.types.is_string(kind):
                return _whole_texts(values, field)
            if pa.types.is_integer(kind) or pa.types.is_floating(kind):
                return _whole_numbers(values, field)
        case FieldKind.LENGTH:
            pass
    return pa.nulls(len(values), wanted), all_N


def _plainly(values: pa.Array, field: EventField) -> tuple[pa.Array, Bool]:
    """One by one: texts of numbers, which are rare."""
    found: list[int | float | str | None] = []
    wrong_N = np.zeros(len(values), np.bool_)
    for n, value in enumerate(values.to_pylist()):
        try:
            found.append(None if value is None else plain_value(value, field))
        except BadValue:
            found.append(None)
            wrong_N[n] = True
    return pa.array(found, field.type), wrong_N


def _whole_texts(values: pa.Array, field: EventField) -> tuple[pa.Array, Bool]:
    _, offsets, data = values.buffers()
    offset_N1 = np.frombuffer(offsets, np.int32)[values.offset : values.offset + len(values) + 1]
    text = np.frombuffer(data, np.uint8) if data is not None and data.size else np.empty(0, np.uint8)
    text.setflags(write=False)
    out_N, wrong_N = np.empty(len(values), np.uint64), np.empty(len(values), np.bool_)
    parse_whole(text, offset_N1[:-1], offset_N1[1:], field.signed, out_N, wrong_N)
    null_N = values.is_null().to_numpy(zero_copy_only=False)
    return pa.array(out_N.view(np.int64) if field.signed else out_N, mask=null_N), wrong_N


def _whole_numbers(values: pa.Array, field: EventField) -> tuple[pa.Array, Bool]:
    """From numbers of another type: those with a fraction, or out of range, are wrong."""
    null_N = values.is_null().to_numpy(zero_copy_only=False)
    plain = values.fill_null(0)
    if pa.types.is_floating(values.type):
        value_N = plain.cast(pa.float64()).to_numpy(zero_copy_only=False)
        wrong_N = ~(np.abs(value_N) <= EXACT) | (np.floor(value_N) != value_N)
        found_N = np.where(wrong_N, 0.0, value_N).astype(np.int64)
    elif pa.types.is_unsigned_integer(values.type):
        unsigned_N = plain.cast(pa.uint64()).to_numpy()
        wrong_N = unsigned_N > np.uint64((1 << 63) - 1) if field.signed else np.zeros(len(plain), np.bool_)
        return pa.array(unsigned_N.astype(np.int64) if field.signed else unsigned_N, mask=null_N), wrong_N
    else:
        found_N = plain.cast(pa.int64()).to_numpy()
        wrong_N = np.zeros(len(plain), np.bool_)
    if field.signed:
        return pa.array(found_N, mask=null_N), wrong_N
    return pa.array(found_N.astype(np.uint64), mask=null_N), wrong_N | (found_N < 0)
