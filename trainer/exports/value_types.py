"""The types of values in an export: float32, float16, or int8 vectors with a scale per row. One class each. Pure.

A class says all of its type: the columns in Parquet, the conversion, the weights that it cannot hold, and the sentence
of model.json about it. The names are `Dtype` of trainer.config.

Shapes: R rows, D numbers of a vector, W weights of a row: the first-order weight, if any, then the vector.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headrace.trainer.config import Dtype

F32 = NDArray[np.float32]

MAX_FLOAT16 = 65504.0
MAX_INT8 = 127


class Float32:
    """Values as they are; the base of the other types."""

    name: ClassVar[Dtype] = "float32"
    weight: ClassVar[pa.DataType] = pa.float32()
    """First-order weights."""
    number: ClassVar[pa.DataType] = pa.float32()
    """Numbers of vectors."""
    has_scale: ClassVar[bool] = False
    """Whether the numbers of a row are multiplied by its scale."""
    rule: ClassVar[str] = ""
    """The sentence of model.json about vectors."""

    def weights(self, weight_R: F32) -> NDArray[Any]:
        """First-order weights, converted."""
        return weight_R

    def vectors(self, vector_RD: F32) -> tuple[NDArray[Any], F32 | None]:
        """Vectors, converted, and their scales."""
        return vector_RD, None

    def num_clamped(self, weights_RW: F32) -> int:
        """How many weights are too large for the type, and cut to its largest value."""
        return 0


class Float16(Float32):
    """Half the bytes. Ends at 65,504."""

    name = "float16"
    weight = number = pa.float16()

    def weights(self, weight_R: F32) -> NDArray[Any]:
        return as_float16(weight_R)

    def vectors(self, vector_RD: F32) -> tuple[NDArray[Any], F32 | None]:
        return as_float16(vector_RD), None

    def num_clamped(self, weights_RW: F32) -> int:
        return int(np.count_nonzero(np.abs(weights_RW) > MAX_FLOAT16))


class Int8(Float32):
    """Vectors in a quarter of the bytes; first-order weights as they are."""

    name = "int8"
    number = pa.int8()
    has_scale = True
    rule = "A vector of int8 is multiplied by its scale."

    def vectors(self, vector_RD: F32) -> tuple[NDArray[Any], F32 | None]:
        return as_int8(vector_RD)


VALUE_TYPES: Mapping[str, Float32] = {each.name: each for each in (Float32(), Float16(), Int8())}


class Values(Protocol):
    """Some rows, as files have them."""

    @property
    def weight_R(self) -> NDArray[Any] | None:
        """None without first-order weights."""
        ...

    @property
    def vector_RD(self) -> NDArray[Any] | None:
        """None where D is 0."""
        ...

    @property
    def scale_R(self) -> F32 | None:
        """None for types without scales."""
        ...


@dataclass(frozen=True, slots=True)
class EncodedValues:
    """Some rows, converted."""

    weight_R: NDArray[Any] | None
    vector_RD: NDArray[Any] | None
    scale_R: F32 | None
    clamped: int
    """Weights too large for the type, cut to its largest value."""
    not_finite: int
    """Weights that are NaN or infinite."""
    squares: float
    """Sum of the squares of all weights."""


def encode(weights_RW: F32, first_order: bool, dtype: Dtype) -> EncodedValues:
    """Rows converted to `dtype`."""
    kind, weight_R, vector_RD, scale_R = VALUE_TYPES[dtype], None, None, None
    if first_order:
        weight_R = kind.weights(np.ascontiguousarray(weights_RW[:, 0]))
    if weights_RW.shape[1] > first_order:
        vector_RD, scale_R = kind.vectors(np.ascontiguousarray(weights_RW[:, int(first_order) :]))
    return EncodedValues(
        weight_R,
        vector_RD,
        scale_R,
        clamped=kind.num_clamped(weights_RW),
        not_finite=weights_RW.size - int(np.count_nonzero(np.isfinite(weights_RW))),
        squares=float(np.square(weights_RW, dtype=np.float64).sum()),
    )


def decode(values: Values) -> tuple[F32 | None, F32 | None]:
    """First-order weights and vectors in float32: the inverse of `encode`, as far as the type allows."""
    weight_R = None if values.weight_R is None else values.weight_R.astype(np.float32, copy=False)
    if values.vector_RD is None:
        return weight_R, None
    vector_RD: F32 = values.vector_RD.astype(np.float32, copy=False)
    return weight_R, vector_RD if values.scale_R is None else vector_RD * values.scale_R[:, None]


def decoded_rows(values: Values, num_rows: int) -> F32:
    """(R, W) first-order weight, if any, then vector, in float32."""
    weight_R, vector_RD = decode(values)
    parts = [] if weight_R is None else [weight_R[:, None]]
    parts += [] if vector_RD is None else [vector_RD]
    return np.concatenate(parts, axis=1) if parts else np.empty((num_rows, 0), np.float32)


def as_exported(weights_RW: F32, first_order: bool, dtype: Dtype) -> F32:
    """Rows as a reader of an export of type `dtype` gets them."""
    return decoded_rows(encode(weights_RW, first_order, dtype), len(weights_RW))


def value_fields(first_order: bool, dim: int, dtype: str) -> list[pa.Field]:
    """The columns of the values in Parquet. Raises KeyError for an unknown type."""
    kind, found = VALUE_TYPES[dtype], []
    if first_order:
        found.append(pa.field("weight", kind.weight, nullable=False))
    if dim:
        numbers = pa.list_(pa.field("element", kind.number, nullable=False), dim)
        found.append(pa.field("vector", numbers, nullable=False))
        found += [pa.field("scale", pa.float32(), nullable=False)] * kind.has_scale
    return found


def value_columns(values: Values) -> list[pa.Array]:
    """The columns of rows, as `value_fields` has them."""
    found = [] if values.weight_R is None else [pa.array(values.weight_R)]
    if values.vector_RD is not None:
        numbers, dim = pa.array(values.vector_RD.reshape(-1)), values.vector_RD.shape[1]
        kind = pa.list_(pa.field("element", numbers.type, nullable=False), dim)
        found.append(pa.FixedSizeListArray.from_arrays(numbers, type=kind))
    return found if values.scale_R is None else [*found, pa.array(values.scale_R)]


def as_float16(values: F32) -> NDArray[np.float16]:
    """Round to nearest, ties to even; cut to the largest float16."""
    return np.clip(values, np.float32(-MAX_FLOAT16), np.float32(MAX_FLOAT16)).astype(np.float16)


def as_float16_reference(value: float) -> bytes:
    """Reference for `as_float16` on one value: its two bytes."""
    if math.isnan(value):
        return b"nan"
    return struct.pack("<e", max(-MAX_FLOAT16, min(MAX_FLOAT16, value)))


def as_int8(vector_RD: F32) -> tuple[NDArray[np.int8], F32]:
    """int8 and scales: scale = max |v| / 127, int8 = v / scale rounded to nearest, ties to even.

    A row of zeros, or of numbers too small for a scale, becomes zeros with scale 0. A row with a NaN or infinite number
    becomes zeros with scale NaN.
    """
    with np.errstate(all="ignore"):
        scale_R = np.abs(vector_RD).max(axis=1, initial=np.float32(0)) / np.float32(MAX_INT8)
        scale_R[~np.isfinite(scale_R)] = np.nan
        divisor_R = np.where(scale_R > 0, scale_R, np.float32(np.inf))  # gives zeros
        rounded_RD = np.rint(vector_RD / divisor_R[:, None])
        rounded_RD[np.isnan(scale_R)] = 0
        return np.clip(rounded_RD, -MAX_INT8, MAX_INT8).astype(np.int8), scale_R


def as_int8_reference(vector: Sequence[float]) -> tuple[list[int], float]:
    """Reference for `as_int8` on one row of float32 values."""
    if not all(math.isfinite(value) for value in vector):
        return [0] * len(vector), math.nan
    scale = _float32(max((abs(value) for value in vector), default=0.0) / MAX_INT8)
    if scale == 0:
        return [0] * len(vector), 0.0
    return [max(-MAX_INT8, min(MAX_INT8, round(_float32(value / scale)))) for value in vector], scale


def _float32(value: float) -> float:
    """The nearest float32. A division of float32 values in double, rounded once more, equals one in float32."""
    return float(np.float32(value))
