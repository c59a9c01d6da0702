"""Rows and gradients in fewer bits, between trainers and shards: `cluster.wire`, and `wire` of a prediction.

A shard encodes rows that are pulled, a trainer decodes them; gradients go the other way. A shard inside a trainer sends
nothing and rounds both alike, so the same bits come out wherever rows live. Shows and clicks stay float32, as do the
slices of the dense part; rows of histories and counters keep all bits. Stored rows, optimizers and sums over ranks stay
float32.

bfloat16 is the upper half of a float32, rounded to nearest, ties to even; finite numbers stay finite. int8 is for rows
that are only read: a vector has one scale, max |v| / 127; its first-order weight stays float32. The mark of an absent
row (pserver.protocol.shards.ABSENT_BITS) survives both: a bfloat16 NaN, or a scale, that no number becomes.

Shapes: U rows, D weights of a row, V of them in the vector.
"""

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, assert_never

import numpy as np
from numpy.typing import NDArray

from headrace.kernel_cache import njit
from headrace.pserver.config import DENSE_SLICES, TableSection, Wire
from headrace.pserver.protocol.histories import COUNTERS_PREFIX, PREFIX
from headrace.pserver.protocol.shards import ABSENT_BITS, F32, U16, Gradients

ABSENT_HALF = np.uint16(0x7FD5)
"""The mark of an absent row as bfloat16. Every other NaN becomes 0x7FC0, with its sign."""
MAX_INT8 = np.float32(127)


@dataclass(frozen=True, slots=True)
class TableWire:
    """How the rows of one table travel."""

    kind: Wire = Wire.FLOAT32
    first_order: int = 0
    """1 if a row begins with a first-order weight, else 0."""


FLOATS = TableWire()
NewArray = Callable[..., F32]
"""new(*shape): an array of floats to be written."""


def new_array(*shape: int) -> F32:
    """An array of this process."""
    return np.empty(shape, np.float32)


def wires_of(tables: Mapping[str, TableSection], wire: Wire) -> dict[str, TableWire]:
    """By table; slices of the dense part, histories and counters travel as they are."""
    return {
        name: TableWire(Wire.FLOAT32 if is_exact(name) else wire, int(section.first_order))
        for name, section in tables.items()
    }


def is_exact(table: str) -> bool:
    """Whether no bit of the table's rows may be rounded."""
    return table == DENSE_SLICES or table.startswith((PREFIX, COUNTERS_PREFIX))


def encode(values_UD: F32, wire: TableWire, new: NewArray = new_array) -> tuple[NDArray[Any], ...]:
    """The arrays that travel, made by `new`; float32 itself."""
    num_rows, num_weights = values_UD.shape
    match wire.kind:
        case Wire.FLOAT32:
            return (values_UD,)
        case Wire.BFLOAT16:
            half_UD: U16 = _as(np.uint16, new, num_rows, num_weights)
            to_half(_readonly(values_UD).view(np.uint32), half_UD)
            return (half_UD,)
        case Wire.INT8:
            scale_U, first_U = new(num_rows), new(num_rows * wire.first_order)
            vector_UV: NDArray[np.int8] = _as(np.int8, new, num_rows, num_weights - wire.first_order)
            to_int8(_readonly(values_UD), first_U, scale_U.view(np.uint32), vector_UV)
            return scale_U, first_U, vector_UV
        case _:
            assert_never(wire.kind)


def decode(arrays: Sequence[NDArray[Any]], wire: TableWire) -> F32:
    """(U, D) the values of encoded arrays."""
    match wire.kind:
        case Wire.FLOAT32:
            return arrays[0]
        case Wire.BFLOAT16:
            values_UD: F32 = np.empty(arrays[0].shape, np.float32)
            from_half(_readonly(arrays[0]), values_UD.view(np.uint32))
            return values_UD
        case Wire.INT8:
            scale_U, first_U, vector_UV = map(_readonly, arrays)
            values_UD = np.empty((len(vector_UV), vector_UV.shape[1] + wire.first_order), np.float32)
            from_int8(scale_U.view(np.uint32), first_U, vector_UV, values_UD.view(np.uint32))
            return values_UD
        case _:
            assert_never(wire.kind)


def rounded(values_UD: F32, wire: TableWire) -> F32:
    """The values as they are after a journey."""
    return values_UD if wire.kind is Wire.FLOAT32 else decode(encode(values_UD, wire), wire)


def rounded_rows(rows: Mapping[str, F32], wires: Mapping[str, TableWire]) -> dict[str, F32]:
    """Rows by table after a journey."""
    return {name: rounded(rows_UD, wires[name]) for name, rows_UD in rows.items()}


def rounded_gradients(pushes: Mapping[str, Gradients], wires: Mapping[str, TableWire]) -> dict[str, Gradients]:
    """Gradients by table after a journey."""
    return {name: replace(push, grads_UD=rounded(push.grads_UD, wires[name])) for name, push in pushes.items()}


def _readonly(array: NDArray[Any]) -> NDArray[Any]:
    """A contiguous view: arrays from the wire are read-only, so kernels need only this signature."""
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view


def _as(dtype: type[Any], new: NewArray, *shape: int) -> NDArray[Any]:
    """An array of narrower numbers in memory for floats."""
    count, size = math.prod(shape), np.dtype(dtype).itemsize
    found: NDArray[Any] = new(-(-count * size // 4)).view(dtype)[:count].reshape(shape)
    return found


# --- kernels on the bits of float32 numbers, and their twins


@njit(nogil=True, cache=True)
def to_half(bits_UD, half_UD):  # type: ignore[no-untyped-def]
    """Write the bfloat16 of float32 numbers, both as bits."""
    for u in range(bits_UD.shape[0]):
        for d in range(bits_UD.shape[1]):
            bits = bits_UD[u, d]
            magnitude, sign = bits & np.uint32(0x7FFFFFFF), (bits >> np.uint32(16)) & np.uint32(0x8000)
            half = (magnitude + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
            if magnitude < np.uint32(0x7F800000):  # finite, and stays so
                half = min(half, np.uint32(0x7F7F))
            elif magnitude > np.uint32(0x7F800000):
                half = np.uint32(0x7FC0)
            half_UD[u, d] = ABSENT_HALF if bits == ABSENT_BITS else np.uint16(half | sign)


@njit(nogil=True, cache=True)
def from_half(half_UD, bits_UD):  # type: ignore[no-untyped-def]
    """The inverse of `to_half` for numbers that bfloat16 has, and for the mark."""
    for u in range(half_UD.shape[0]):
        for d in range(half_UD.shape[1]):
            half = half_UD[u, d]
            bits_UD[u, d] = ABSENT_BITS if half == ABSENT_HALF else np.uint32(half) << np.uint32(16)


@njit(nogil=True, cache=True)
def to_int8(rows_UD, first_U, scale_bits_U, vector_UV):  # type: ignore[no-untyped-def]
    """Write first-order weights, if there are any, and the vectors of rows as int8 with the bits of their scales.

    A vector of zeros, or of numbers too small for a scale, has scale 0; one that is not finite has scale NaN.
    """
    bits_UD, scale_U = rows_UD.view(np.uint32), scale_bits_U.view(np.float32)
    first = rows_UD.shape[1] - vector_UV.shape[1]
    for u in range(rows_UD.shape[0]):
        largest, is_finite = np.float32(0), True
        for d in range(first, rows_UD.shape[1]):
            largest = max(largest, abs(rows_UD[u, d]))
            is_finite &= np.isfinite(rows_UD[u, d])
        for d in range(first):
            first_U[u] = rows_UD[u, d]
        scale_U[u] = largest / MAX_INT8 if is_finite else np.float32(np.nan)
        if rows_UD.shape[1] and bits_UD[u, 0] == ABSENT_BITS:
            scale_bits_U[u] = ABSENT_BITS
        divides = is_finite and scale_U[u] > 0
        for v in range(vector_UV.shape[1]):
            vector_UV[u, v] = np.int8(np.rint(rows_UD[u, first + v] / scale_U[u])) if divides else np.int8(0)


@njit(nogil=True, cache=True)
def from_int8(scale_bits_U, first_U, vector_UV, bits_UD):  # type: ignore[no-untyped-def]
    """Write rows of what `to_int8` wrote, as bits."""
    scale_U, rows_UD = scale_bits_U.view(np.float32), bits_UD.view(np.float32)
    first = rows_UD.shape[1] - vector_UV.shape[1]
    for u in range(rows_UD.shape[0]):
        if scale_bits_U[u] == ABSENT_BITS:
            bits_UD[u, :] = ABSENT_BITS
            continue
        for d in range(first):
            rows_UD[u, d] = first_U[u]
        for v in range(vector_UV.shape[1]):
            rows_UD[u, first + v] = np.float32(vector_UV[u, v]) * scale_U[u]


def to_half_reference(bits: int) -> int:
    """The twin of `to_half` on the bits of one number: of the two bfloat16 around it, the nearer one, or the even."""
    if bits == int(ABSENT_BITS):
        return int(ABSENT_HALF)
    value, below = _number(bits), bits >> 16
    if math.isnan(value):
        return 0x7FC0 | bits >> 16 & 0x8000
    above = below + 1  # away from 0: the sign is the highest bit
    if math.isinf(value) or math.isinf(_number(above << 16)):
        return below
    under, over = (abs(abs(value) - abs(_number(half << 16))) for half in (below, above))
    return below if under < over or (under == over and below % 2 == 0) else above


def from_half_reference(half: int) -> int:
    """The twin of `from_half`."""
    return int(ABSENT_BITS) if half == int(ABSENT_HALF) else half << 16


def int8_reference(row: Sequence[float], first_order: int) -> list[float]:
    """The twin of `to_int8` and `from_int8` together, on a row of finite float32 numbers."""
    first, vector = [*row[:first_order]], row[first_order:]
    scale = _float32(max(map(abs, vector), default=0.0) / 127)
    return [*first, *(_float32(round(_float32(value / scale)) * scale) if scale else 0.0 for value in vector)]


def _number(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def _float32(value: float) -> float:
    """The nearest float32: an operation on float32 in double, rounded once more, equals one in float32."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))
