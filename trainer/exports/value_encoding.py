"""Converts weights for files: float32, float16, or int8 vectors with a scale per row. Pure.

Weights that a type cannot hold are counted: float16 ends at 65,504, and larger weights are cut to it.

Shapes: R rows, D numbers of a vector, W weights of a row: the first-order weight, if any, then the vector.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, assert_never

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]

Dtype = Literal["float32", "float16", "int8"]

MAX_FLOAT16 = 65504.0
MAX_INT8 = 127


@dataclass(frozen=True, slots=True)
class EncodedValues:
    """Some rows, converted."""

    weight_R: NDArray[Any] | None
    """float32, or float16; None without first-order weights."""
    vector_RD: NDArray[Any] | None
    """float32, float16 or int8; None where D is 0."""
    scale_R: F32 | None
    """Scales of int8 vectors: a value is int8 * scale."""
    clamped: int
    """Weights too large for the type, cut to its largest value."""
    not_finite: int
    """Weights that are NaN or infinite."""
    squares: float
    """Sum of the squares of all weights."""


def encode(weights_RW: F32, first_order: bool, dtype: Dtype) -> EncodedValues:
    """Rows converted to `dtype`."""
    weight_R = np.ascontiguousarray(weights_RW[:, 0]) if first_order else None
    vector_RD = np.ascontiguousarray(weights_RW[:, int(first_order) :])
    vector: NDArray[Any] | None = vector_RD if vector_RD.shape[1] else None
    scale_R, clamped = None, 0
    match dtype:
        case "float32":
            weight: NDArray[Any] | None = weight_R
        case "float16":
            clamped = int(np.count_nonzero(np.abs(weights_RW) > MAX_FLOAT16))
            weight = None if weight_R is None else as_float16(weight_R)
            vector = None if vector is None else as_float16(vector_RD)
        case "int8":
            weight = weight_R
            if vector is not None:
                vector, scale_R = as_int8(vector_RD)
        case _:
            assert_never(dtype)
    not_finite = weights_RW.size - int(np.count_nonzero(np.isfinite(weights_RW)))
    return EncodedValues(
        weight, vector, scale_R, clamped, not_finite, float(np.square(weights_RW, dtype=np.float64).sum())
    )


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
