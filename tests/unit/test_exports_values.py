"""How weights are written: each type as its plain twin says, and what it cannot hold is counted."""

import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from headrace.trainer.exports.row_values import encode
from headrace.trainer.value_types import (
    MAX_FLOAT16,
    VALUE_TYPES,
    as_float16,
    as_float16_reference,
    as_int8,
    as_int8_reference,
)

ANY = st.floats(width=32)
ROWS = arrays(np.float32, array_shapes(min_dims=2, max_dims=2, max_side=6), elements=ANY)


@given(arrays(np.float32, st.integers(0, 20), elements=ANY))
def test_float16_is_its_twin(values):
    found = as_float16(values)
    for value, half in zip(values.tolist(), found, strict=True):
        assert math.isnan(half) if math.isnan(value) else half.tobytes() == as_float16_reference(value)


@given(ROWS)
def test_int8_is_its_twin(vector_RD):
    found_RD, scale_R = as_int8(vector_RD)
    for vector, found, scale in zip(vector_RD.tolist(), found_RD.tolist(), scale_R.tolist(), strict=True):
        wanted, wanted_scale = as_int8_reference(vector)
        assert found == wanted
        assert math.isnan(scale) if math.isnan(wanted_scale) else scale == wanted_scale


@given(arrays(np.float32, (3, 4), elements=st.floats(-10, 10, width=32)))
def test_int8_is_within_half_a_scale(vector_RD):
    found_RD, scale_R = as_int8(vector_RD)
    half = scale_R[:, None] * 0.5 + 1e-6
    assert (np.abs(found_RD.astype(np.float32) * scale_R[:, None] - vector_RD) <= half).all()


def test_a_row_of_zeros_has_scale_zero_and_one_that_is_no_number_has_none():
    found, scale = as_int8(np.array([[0, 0], [np.nan, 1], [np.inf, 1], [1e-45, 0]], np.float32))
    assert found.tolist() == [[0, 0]] * 4
    assert scale[0] == scale[3] == 0 and np.isnan(scale[1]) and np.isnan(scale[2])


@pytest.mark.parametrize("first_order", [True, False])
@pytest.mark.parametrize("dtype", VALUE_TYPES.names())
@pytest.mark.parametrize("dim", [0, 2])
def test_what_is_not_there_has_no_column(first_order, dtype, dim):
    found = encode(np.ones((3, first_order + dim), np.float32), first_order, dtype)
    assert (found.weight_R is not None) == first_order and (found.vector_RD is not None) == (dim > 0)
    assert (found.scale_R is not None) == (dtype == "int8" and dim > 0)
    if first_order:
        assert found.weight_R.dtype == ("float32" if dtype == "int8" else dtype)


def test_what_is_too_large_for_float16_is_cut_and_counted_and_what_is_no_number_too():
    found = encode(np.array([[70_000, -1e9], [1, np.nan], [MAX_FLOAT16, np.inf]], np.float32), True, "float16")
    assert found.weight_R.tolist() == [MAX_FLOAT16, 1, MAX_FLOAT16]
    assert found.vector_RD[0, 0] == -MAX_FLOAT16 and math.isnan(found.vector_RD[1, 0])
    assert (found.clamped, found.not_finite) == (3, 2)


def test_squares_are_summed_before_rounding():
    assert encode(np.array([[3.0, 4.0]], np.float32), True, "int8").squares == 25.0


def test_halves_are_those_of_the_format():
    assert as_float16(np.float32([1 / 3])).tobytes() == struct.pack("<e", 1 / 3)
