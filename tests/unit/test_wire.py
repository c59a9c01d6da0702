"""Rows and gradients in fewer bits: the kernels and their twins, the mark of absent rows, and what stays as it is."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.pserver.config import DENSE_SLICES, TableSection, Wire
from headrace.pserver.protocol import wire
from headrace.pserver.protocol.shards import ABSENT_BITS, Gradients, absent
from headrace.pserver.protocol.wire import TableWire, decode, encode, rounded, rounded_gradients, wires_of

HALF, INT8 = TableWire(Wire.BFLOAT16), TableWire(Wire.INT8, 1)
ODD_BITS = [0, 1, 0x8000_0000, 0x7F7F_FFFF, 0xFF7F_FFFF, 0x7F80_0000, 0xFF80_0000, 0x7FC0_0000, 0xFFC0_0000]
ODD_BITS += [0x7F80_0001, 0x7FFF_FFFF, 0xFFFF_FFFF, 0x3F80_8000, 0x3F81_8000, 0x7FD5_0000, int(ABSENT_BITS)]
some_bits = st.one_of(st.integers(0, 2**32 - 1), st.sampled_from(ODD_BITS))
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def floats_of(bits, width=1):
    return np.array(bits, np.uint32).view(np.float32).reshape(-1, width)


@given(st.lists(some_bits, max_size=40))
def test_bfloat16_is_as_the_plain_twin_says(bits):
    (half_UD,) = encode(floats_of(bits), HALF)
    assert half_UD.reshape(-1).tolist() == [wire.to_half_reference(each) for each in bits]
    back = decode([half_UD], HALF).view(np.uint32).reshape(-1).tolist()
    assert back == [wire.from_half_reference(each) for each in half_UD.reshape(-1).tolist()]


@given(st.lists(finite, min_size=1, max_size=40))
def test_bfloat16_is_as_torch_rounds_but_a_finite_number_stays_finite(values):
    array = np.array(values, np.float32).reshape(-1, 1)
    theirs = torch.from_numpy(array.copy()).to(torch.bfloat16).to(torch.float32).numpy()
    largest = np.float32(3.3895313892515355e38)
    assert rounded(array, HALF).tobytes() == np.clip(theirs, -largest, largest).tobytes()


@given(st.lists(some_bits, max_size=40))
def test_what_was_rounded_once_is_rounded_to_itself(bits):
    once = rounded(floats_of(bits), HALF)
    assert rounded(once, HALF).tobytes() == once.tobytes()


@given(st.integers(0, 5), st.integers(0, 1), st.data())
def test_int8_is_as_the_plain_twin_says(num_rows, first_order, data):
    width = first_order + data.draw(st.integers(0, 6))
    rows = data.draw(st.lists(st.lists(finite, min_size=width, max_size=width), min_size=num_rows, max_size=num_rows))
    array = np.array(rows, np.float32).reshape(num_rows, width)
    found = rounded(array, TableWire(Wire.INT8, first_order))
    assert found.shape == array.shape and found.dtype == np.float32
    for row, before in zip(found.tolist(), array.tolist(), strict=True):
        assert row == wire.int8_reference(before, first_order)


@given(st.lists(st.floats(-2, 2, width=32), min_size=3, max_size=30))
def test_int8_is_within_half_a_step_of_the_vector_and_keeps_the_first_order_weight(values):
    array = np.array([values], np.float32)
    found = rounded(array, INT8)
    step = np.abs(array[:, 1:]).max() / 127
    assert found[0, 0] == array[0, 0] and np.abs(found - array).max() <= 0.5001 * step + 1e-37


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_vector_that_is_not_finite_stays_so(bad):
    assert np.isnan(rounded(np.array([[1.0, bad, 0.5]], np.float32), INT8)[0, 1:]).all()


@pytest.mark.parametrize("kind", [HALF, INT8, TableWire(Wire.INT8, 0)])
def test_absent_rows_are_still_absent(kind):
    rows_UD = np.ones((4, 3), np.float32)
    rows_UD[1:3] = ABSENT_BITS.view(np.float32)
    found = rounded(rows_UD, kind)
    assert absent(found).tolist() == [False, True, True, False]
    assert (found[1:3].view(np.uint32) == ABSENT_BITS).all() and (found[[0, 3]] == 1).all()


@given(st.integers(0, 2**32 - 1).filter(lambda bits: bits != ABSENT_BITS))
def test_no_other_number_becomes_the_mark(bits):
    for kind in (HALF, INT8, TableWire(Wire.INT8, 0)):
        assert not absent(rounded(floats_of([bits, 0], 2), kind)).any()


def test_float32_travels_as_it_is():
    rows_UD = np.ones((2, 3), np.float32)
    assert encode(rows_UD, TableWire())[0] is rows_UD and rounded(rows_UD, TableWire()) is rows_UD


@pytest.mark.parametrize(("kind", "num_bytes"), [(TableWire(), 680), (HALF, 340), (INT8, 240)])
def test_the_bytes_of_ten_rows_of_a_weight_and_sixteen_numbers(kind, num_bytes):
    assert sum(array.nbytes for array in encode(np.ones((10, 17), np.float32), kind)) == num_bytes


def test_encoded_arrays_lie_where_the_caller_wants_them():
    pool, made = np.zeros(1000, np.float32), []

    def empty(*shape):
        made.append(shape)
        begin, count = sum(int(np.prod(each)) for each in made[:-1]), int(np.prod(shape))
        return pool[begin : begin + count].reshape(shape)

    for kind in (HALF, INT8):
        for array in encode(np.ones((3, 3), np.float32), kind, empty):
            assert np.shares_memory(array, pool) or not array.size


def test_slices_of_the_dense_part_and_counts_are_not_rounded():
    wires = wires_of({"default": TableSection(), DENSE_SLICES: TableSection(first_order=False)}, Wire.BFLOAT16)
    assert wires == {"default": TableWire(Wire.BFLOAT16, 1), DENSE_SLICES: TableWire(Wire.FLOAT32, 0)}
    value = np.float32(1.001)
    push = Gradients(np.full((1, 2), value), np.full(1, value), np.full(1, value))
    found = rounded_gradients({"default": push, DENSE_SLICES: push}, wires)
    assert found["default"].grads_UD.tolist() == [[1.0, 1.0]] and found["default"].show_U[0] == value
    assert found[DENSE_SLICES].grads_UD is push.grads_UD
