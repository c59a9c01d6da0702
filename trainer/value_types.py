"""The types of values in an export: float32, float16, or int8 vectors with a scale per row. One class each. Pure.

A class says all of its type: the columns, the conversion, the weights that it cannot hold, and the sentence of
model.json about it. The check of a job file imports this module, so it has no pyarrow; trainer.exports.row_values
converts rows.

Shapes: R rows, D numbers of a vector, W weights of a row: the first-order weight, if any, then the vector.
"""

import math
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from headrace.registry import Registry

F32 = NDArray[np.float32]

MAX_FLOAT16 = 65504.0
MAX_INT8 = 127


class ValueType:
    """A type of values. Its defaults leave them as they are; readers multiply the numbers of a vector by its scale."""

    weight: ClassVar[np.dtype[Any]] = np.dtype(np.float32)
    """Of first-order weights."""
    number: ClassVar[np.dtype[Any]] = np.dtype(np.float32)
    """Of the numbers of vectors."""
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

    @classmethod
    def vector_bytes(cls, dim: int) -> int:
        """Bytes of a vector of `dim` numbers, with its scale."""
        return cls.number.itemsize * dim + 4 * cls.has_scale


class Float32(ValueType):
    """Values as they are."""


class Float16(ValueType):
    """Half the bytes. Ends at 65,504."""

    weight = number = np.dtype(np.float16)

    @override
    def weights(self, weight_R: F32) -> NDArray[Any]:
        return as_float16(weight_R)

    @override
    def vectors(self, vector_RD: F32) -> tuple[NDArray[Any], F32 | None]:
        return as_float16(vector_RD), None

    @override
    def num_clamped(self, weights_RW: F32) -> int:
        return int(np.count_nonzero(np.abs(weights_RW) > MAX_FLOAT16))


class Int8(ValueType):
    """Vectors in a quarter of the bytes; first-order weights as they are."""

    number = np.dtype(np.int8)
    has_scale = True
    rule = "A vector of int8 is multiplied by its scale."

    @override
    def vectors(self, vector_RD: F32) -> tuple[NDArray[Any], F32 | None]:
        return as_int8(vector_RD)


VALUE_TYPES = Registry(
    kind="type of exported values",
    group="headrace.value_types",
    base=ValueType,
    own={
        "float32": "trainer.value_types:Float32",
        "float16": "trainer.value_types:Float16",
        "int8": "trainer.value_types:Int8",
    },
)

if TYPE_CHECKING:
    Dtype = str
else:
    Dtype = Literal[tuple(VALUE_TYPES.names())]


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
