"""XXH3 with 64 bits and seed 0, by which RocksDB checks its blocks, and the earlier XXH3 of a key in its filters.

The definition: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md. RocksDB hashes the keys of filters by a
preview of it (util/xxph3.h), here for keys of 8 bytes only.
"""

import numpy as np

from headrace.kernel_cache import njit

U64 = np.uint64

PRIME32_1, PRIME32_2, PRIME32_3 = U64(0x9E3779B1), U64(0x85EBCA77), U64(0xC2B2AE3D)
PRIME64_1, PRIME64_2, PRIME64_3 = U64(0x9E3779B185EBCA87), U64(0xC2B2AE3D27D4EB4F), U64(0x165667B19E3779F9)
PRIME64_4, PRIME64_5 = U64(0x85EBCA77C2B2AE63), U64(0x27D4EB2F165667C5)
AVALANCHE = U64(0x165667919E3779F9)
LOW = U64(0xFFFFFFFF)
SECRET = np.frombuffer(
    bytes.fromhex(
        "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743"
        "248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7"
        "c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16"
        "be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
    ),
    np.uint8,
)
assert len(SECRET) == 192
SECRET_WORDS = SECRET.view("<u8").astype(np.uint64)
MIN_LONG, BLOCK_BYTES, STRIPE_BYTES, STRIPES = 241, 1024, 64, 16
"""Fewest bytes of a long input; it is hashed in blocks of 16 stripes."""


@njit(nogil=True, cache=True)
def word_at(bytes_N, at):  # type: ignore[no-untyped-def]
    """The little-endian number of 8 bytes, at any place."""
    found = U64(0)
    for b in range(8):
        found |= U64(bytes_N[at + b]) << U64(8 * b)
    return found


@njit(nogil=True, cache=True)
def _folded(a, b):  # type: ignore[no-untyped-def]
    """The halves of a product of 128 bits, by exclusive or."""
    low, high = (a & LOW) * (b & LOW), (a >> U64(32)) * (b >> U64(32))
    left, right = (a >> U64(32)) * (b & LOW), (a & LOW) * (b >> U64(32))
    middle = (low >> U64(32)) + (left & LOW) + right
    return ((left >> U64(32)) + (middle >> U64(32)) + high) ^ ((middle << U64(32)) | (low & LOW))


@njit(nogil=True, cache=True)
def _avalanche(value):  # type: ignore[no-untyped-def]
    value ^= value >> U64(37)
    value *= AVALANCHE
    return value ^ (value >> U64(32))


@njit(nogil=True, cache=True)
def _mixed(bytes_N, at, secret_at):  # type: ignore[no-untyped-def]
    left = word_at(bytes_N, at) ^ word_at(SECRET, secret_at)
    return _folded(left, word_at(bytes_N, at + 8) ^ word_at(SECRET, secret_at + 8))


@njit(nogil=True, cache=True)
def _of_middle(bytes_N, size):  # type: ignore[no-untyped-def]
    """Of 17 to 240 bytes."""
    found = U64(size) * PRIME64_1
    if size > 128:
        for part in range(8):
            found += _mixed(bytes_N, 16 * part, 16 * part)
        found = _avalanche(found)
        for part in range(8, size // 16):
            found += _mixed(bytes_N, 16 * part, 16 * (part - 8) + 3)
        return _avalanche(found + _mixed(bytes_N, size - 16, 119))
    for part in range((size - 1) // 32, -1, -1):
        found += _mixed(bytes_N, 16 * part, 32 * part)
        found += _mixed(bytes_N, size - 16 * (part + 1), 32 * part + 16)
    return _avalanche(found)


@njit(nogil=True, cache=True)
def _of_long(bytes_N, words_M, size):  # type: ignore[no-untyped-def]
    """Of 241 bytes and more; `words_M` are the same bytes as numbers, as far as they go."""
    sums = np.array([PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1])
    for stripe in range((size - 1) // STRIPE_BYTES):
        first = stripe % STRIPES
        for lane in range(8):
            word = words_M[8 * stripe + lane]
            keyed = word ^ SECRET_WORDS[first + lane]
            sums[lane ^ 1] += word
            sums[lane] += (keyed & LOW) * (keyed >> U64(32))
        if first == STRIPES - 1 and (stripe + 1) * STRIPE_BYTES <= (size - 1) // BLOCK_BYTES * BLOCK_BYTES:
            for lane in range(8):
                sums[lane] = ((sums[lane] ^ (sums[lane] >> U64(47))) ^ SECRET_WORDS[16 + lane]) * PRIME32_1
    for lane in range(8):
        word = word_at(bytes_N, size - STRIPE_BYTES + 8 * lane)
        keyed = word ^ word_at(SECRET, 121 + 8 * lane)
        sums[lane ^ 1] += word
        sums[lane] += (keyed & LOW) * (keyed >> U64(32))
    found = U64(size) * PRIME64_1
    for pair in range(4):
        left = sums[2 * pair] ^ word_at(SECRET, 11 + 16 * pair)
        found += _folded(left, sums[2 * pair + 1] ^ word_at(SECRET, 19 + 16 * pair))
    return _avalanche(found)


@njit(nogil=True, cache=True)
def xxh3(bytes_N, words_M, size):  # type: ignore[no-untyped-def]
    """Of the first `size` bytes, at least 17."""
    return _of_middle(bytes_N, size) if size < MIN_LONG else _of_long(bytes_N, words_M, size)


@njit(nogil=True, cache=True)
def key_hash(key):  # type: ignore[no-untyped-def]
    """The hash of a key of 8 bytes in RocksDB's filters; `key` is the number of its bytes, big-endian."""
    swapped = U64(0)
    for b in range(8):
        swapped |= ((key >> U64(8 * b)) & U64(255)) << U64(56 - 8 * b)
    keyed = swapped ^ SECRET_WORDS[0]
    mixed = U64(8) + (keyed ^ (keyed >> U64(51))) * PRIME32_1
    mixed = (mixed ^ (mixed >> U64(47))) * PRIME64_2
    mixed ^= mixed >> U64(37)
    mixed *= PRIME64_3
    return mixed ^ (mixed >> U64(32))
