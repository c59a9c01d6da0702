"""The fixed hashes: golden vectors that never change, and kernels equal to their plain twins."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from headrace import key_kernels, keys

U64 = st.integers(0, keys.MASK)
GROUP = st.integers(0, 65535)


def test_mix_gives_the_numbers_of_splitmix64():
    # The first outputs of splitmix64 seeded with 1234567, as published with the generator.
    state, seen = 1234567, []
    for _ in range(5):
        state = (state + keys.GOLDEN) & keys.MASK
        seen.append(keys.mix_reference(state))
    assert seen == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_keys_never_change():
    assert [keys.key_of_reference(sign, group) for sign, group in [(0, 0), (1, 0), (0, 1), (keys.MASK, 65535)]] == [
        16294208416658607535,
        10451216379200822465,
        7960286522194355700,
        16742087403402095540,
    ]


def test_signs_of_text_are_fnv_1a():
    # Vectors of Fowler, Noll and Vo's own test suite.
    assert keys.sign_of_text(b"") == 0xCBF29CE484222325
    assert keys.sign_of_text(b"a") == 0xAF63DC4C8601EC8C
    assert keys.sign_of_text(b"foobar") == 0x85944171F73967E8


@given(U64, GROUP)
def test_a_key_gives_back_its_sign(sign, group):
    assert keys.sign_of(keys.key_of_reference(sign, group), group) == sign


@given(st.lists(U64, max_size=50), GROUP)
def test_the_kernel_of_keys_is_its_twin(signs, group):
    out = np.empty(len(signs), np.uint64)
    key_kernels.keys_of(np.array(signs, np.uint64), group, out)
    assert out.tolist() == [keys.key_of_reference(sign, group) for sign in signs]


@njit
def _fnv1a(data):
    return key_kernels.fnv1a(data, 0, len(data))


@given(st.binary(max_size=60))
def test_the_kernel_of_text_is_its_twin(text):
    assert int(_fnv1a(np.frombuffer(text, np.uint8))) == keys.sign_of_text(text)


@given(U64)
def test_buckets_are_within_their_number(key):
    assert 0 <= keys.bucket_of(key) < keys.NUM_BUCKETS
    assert keys.bucket_of(key) == key % 4096


def test_dense_signs_spread_evenly_over_buckets():
    count = np.zeros(keys.NUM_BUCKETS, int)
    for sign in range(40_960):
        count[keys.bucket_of(keys.key_of_reference(sign, 3))] += 1
    assert count.min() > 0
    assert count.max() < 30


@given(st.lists(st.tuples(U64, GROUP), max_size=50))
def test_the_kernel_of_signs_is_its_twin(keyed):
    signs = np.empty(len(keyed), np.uint64)
    own, groups = [key for key, _ in keyed], [group for _, group in keyed]
    key_kernels.signs_of(np.array(own, np.uint64), np.array(groups, np.uint16), signs)
    assert signs.tolist() == [keys.sign_of(key, group) for key, group in keyed]


@given(st.lists(st.one_of(st.integers(0, 3), st.integers(0, 2**64 - 1))))
def test_unique_keys_are_those_of_numpy(some):
    keys_N = np.array(some, np.uint64)
    keys_U = keys.unique_keys(keys_N)
    assert keys_U.dtype == np.uint64 and keys_U.tolist() == np.unique(keys_N).tolist()


@given(st.lists(st.integers(0, 20)), st.lists(st.integers(0, 20)))
def test_keys_among_others_are_those_that_numpy_finds(some, others):
    keys_N, sorted_U = np.array(some, np.uint64), np.unique(np.array(others, np.uint64))
    assert keys.are_among(keys_N, sorted_U).tolist() == np.isin(keys_N, sorted_U).tolist()
