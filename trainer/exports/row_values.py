"""The values of rows in an export: conversion to the type of the export and back, and their columns in Parquet. Pure.

trainer.value_types has the types.

Shapes: R rows, D numbers of a vector, W weights of a row: the first-order weight, if any, then the vector.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headrace.trainer.value_types import VALUE_TYPES, Dtype

F32 = NDArray[np.float32]


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
    kind, weight_R, vector_RD, scale_R = VALUE_TYPES.load(dtype)(), None, None, None
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
    """The columns of the values in Parquet. Raises SpecError for an unknown type."""
    kind, found = VALUE_TYPES.load(dtype), []
    if first_order:
        found.append(pa.field("weight", pa.from_numpy_dtype(kind.weight), nullable=False))
    if dim:
        numbers = pa.list_(pa.field("element", pa.from_numpy_dtype(kind.number), nullable=False), dim)
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
