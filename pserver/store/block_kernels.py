"""Hot loops on RocksDB's files of rows: find rows by key, decode blocks in order. Without the interpreter's lock.

Layout of RocksDB's block-based tables, format 6, uncompressed. A block has entries, then restart points, then their
number. An entry: shared bytes of the key, other bytes, bytes of the value, as varints; these key bytes; the value. A
key has 8 bytes, big-endian, then 1 byte of kind and 7 of the sequence number. After a block come a byte of compression
and a checksum.

Shapes: U unique keys, F files, C columns of a file, R runs, B blocks of a file, N entries, W words of a row.
"""

from typing import Any

import numba
import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from headrace.kernel_cache import njit
from headrace.pserver.store.xxh3 import key_hash, xxh3

U64 = np.uint64

TRAILER_BYTES = 5
MAX_RESTARTS = 1 << 28
DELETION, VALUE = 0, 1
"""Kinds of entries; there are no others in a store of rows."""
ABSENT, MALFORMED = -1, -2
"""In place of the position of a value."""
SOUND, DAMAGED, UNREADABLE, NOT_CACHED = 0, 1, 2, 3
"""How reading ended; the last one only if the disk must not be waited for."""
MISSING, FOUND, LATE = 0, 1, 2
"""States of a key: it has no row, or one; or it is not known without waiting for the disk."""
RWF_NOWAIT = 8
"""Flag of preadv2(2): fail instead of waiting for the disk."""
FD, FIRST_KEY, LAST_KEY, LIMITS, OFFSETS, SIZES, NUM_BLOCKS, FILTER, FILTER_LINES, PROBES, CONTEXT = range(11)
"""Columns of a file: descriptor; keys; addresses of the columns of blocks and their number; address, lines of 64 bytes
and probes of the filter (0 lines: none); the context of its checksums."""
NUM_COLUMNS = 11

_carray: Any = numba.carray  # type: ignore[attr-defined]
_pread: Any = types.ExternalFunction("pread", types.int64(types.int32, types.voidptr, types.uint64, types.int64))
_preadv2: Any = types.ExternalFunction(
    "preadv2", types.int64(types.int32, types.voidptr, types.int32, types.int64, types.int32)
)


def _as_pointer(typing: Any, address: Any) -> Any:
    """The address of an array, as a pointer."""
    del typing

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


_pointer: Any = intrinsic(_as_pointer)


@njit(nogil=True, cache=True)
def _restarts(bytes_N, size):  # type: ignore[no-untyped-def]
    """Number of restart points, and where they begin; 0 if the block is malformed."""
    number = np.int64(_number_at(bytes_N, size - 4))
    begin = size - 4 - 4 * number
    return (0, 0) if number > MAX_RESTARTS or begin < 0 else (number, begin)


@njit(nogil=True, cache=True)
def _number_at(bytes_N, at):  # type: ignore[no-untyped-def]
    low = np.uint32(bytes_N[at]) | np.uint32(bytes_N[at + 1]) << np.uint32(8)
    return low | np.uint32(bytes_N[at + 2]) << np.uint32(16) | np.uint32(bytes_N[at + 3]) << np.uint32(24)


@njit(nogil=True, cache=True)
def _varint(bytes_N, at, end):  # type: ignore[no-untyped-def]
    """A number, and the place after it; beyond `end` if there is no end to it."""
    value, shift = np.int64(0), 0
    while at < end and shift < 63:
        byte = np.int64(bytes_N[at])
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    return np.int64(0), end + 1


@njit(nogil=True, cache=True)
def checksum_of(bytes_N, words_M, size, offset, context):  # type: ignore[no-untyped-def]
    """Of a block and its byte of compression, at `offset` of a file."""
    found = xxh3(bytes_N, words_M, size) ^ U64(bytes_N[size]) * U64(0x6B9083D9)
    place = U64(offset) + (U64(offset) >> U64(32))
    return (found + (U64(context) ^ place if context else U64(0))) & U64(0xFFFFFFFF)


@njit(nogil=True, cache=True)
def _read_cached(fd, offset, wanted, bytes_N):  # type: ignore[no-untyped-def]
    """Read bytes that are in the system's page cache. -> whether all of them are."""
    vector = np.array([bytes_N.ctypes.data, wanted], np.uint64)
    return _preadv2(np.int32(fd), vector.ctypes, np.int32(1), np.int64(offset), np.int32(RWF_NOWAIT)) == wanted


@njit(nogil=True, cache=True)
def read_block(fd, offset, size, context, bytes_N, words_M, wait):  # type: ignore[no-untyped-def]
    """Read a block into `bytes_N` and check it; `wait` for the disk, or not. -> how it ended."""
    wanted, done = size + TRAILER_BYTES, np.int64(0)
    if size < 17 or wanted > len(bytes_N):
        return DAMAGED
    if not wait and not _read_cached(fd, offset, wanted, bytes_N):
        return NOT_CACHED
    while wait and done < wanted:
        got = _pread(np.int32(fd), bytes_N[done:].ctypes, np.uint64(wanted - done), np.int64(offset + done))
        if got <= 0:
            return DAMAGED if got == 0 else UNREADABLE
        done += got
    sound = checksum_of(bytes_N, words_M, size, offset, context) == _number_at(bytes_N, size + 1)
    return SOUND if sound and bytes_N[size] == 0 else DAMAGED


@njit(nogil=True, cache=True)
def _entry(bytes_N, at, end, key_16):  # type: ignore[no-untyped-def]
    """Read an entry, on top of the key before. -> (place of the value, its size), or (MALFORMED, 0)."""
    shared, at = _varint(bytes_N, at, end)
    own, at = _varint(bytes_N, at, end)
    size, at = _varint(bytes_N, at, end)
    if at > end or shared + own != 16 or at + own + size > end:
        return MALFORMED, 0
    for b in range(own):
        key_16[shared + b] = bytes_N[at + b]
    return at + own, size


@njit(nogil=True, cache=True)
def _key_of(key_16):  # type: ignore[no-untyped-def]
    key = U64(0)
    for b in range(8):
        key = key << U64(8) | U64(key_16[b])
    return key


@njit(nogil=True, cache=True)
def _find_in_block(bytes_N, size, key, key_16):  # type: ignore[no-untyped-def]
    """-> (place, size) of a key's value; size 0 if the key is deleted; (ABSENT, 0) or (MALFORMED, 0)."""
    number, end = _restarts(bytes_N, size)
    low, high = 0, number - 1
    while low < high:  # the last restart point below the key
        middle = (low + high + 1) // 2
        at, _ = _entry(bytes_N, np.int64(_number_at(bytes_N, end + 4 * middle)), end, key_16)
        if at < 0:
            return MALFORMED, 0
        if _key_of(key_16) < key:
            low = middle
        else:
            high = middle - 1
    at = np.int64(_number_at(bytes_N, end + 4 * low)) if number else MALFORMED
    while 0 <= at < end:
        at, length = _entry(bytes_N, at, end, key_16)
        if at < 0:
            break
        found = _key_of(key_16)
        if found >= key:
            return _judged(key_16[8], length, at) if found == key else (ABSENT, 0)
        at += length
    return (ABSENT, 0) if at == end else (MALFORMED, 0)


@njit(nogil=True, cache=True)
def _judged(kind, length, at):  # type: ignore[no-untyped-def]
    """The entry as `_find_in_block` returns it."""
    sound = (kind == VALUE and length > 0) or (kind == DELETION and length == 0)
    return (at, length) if sound else (MALFORMED, 0)


@njit(nogil=True, cache=True)
def may_have(filter_N, num_lines, probes, key):  # type: ignore[no-untyped-def]
    """Whether a filter has the key, or is wrong."""
    hashed = key_hash(key)
    line = np.int64(((hashed & U64(0xFFFFFFFF)) * U64(num_lines)) >> U64(32)) * 64
    bits = np.uint32(hashed >> U64(32))
    for _ in range(probes):
        bit = bits >> np.uint32(23)
        if not filter_N[line + (bit >> 3)] & (1 << (bit & 7)):
            return False
        bits = np.uint32(bits * np.uint32(0x9E3779B9))
    return True


@njit(nogil=True, cache=True)
def _block_of(limits_B, number, key):  # type: ignore[no-untyped-def]
    """The first block whose limit is not below the key; `number` if there is none."""
    low, high = 0, number
    while low < high:
        middle = (low + high) // 2
        if limits_B[middle] < key:
            low = middle + 1
        else:
            high = middle
    return low


@njit(nogil=True, cache=True)
def _file_of(files_FC, begin, end, key):  # type: ignore[no-untyped-def]
    """The first file of a run whose last key is not below the key; `end` if there is none."""
    low, high = begin, end
    while low < high:
        middle = (low + high) // 2
        if U64(files_FC[middle, LAST_KEY]) < key:
            low = middle + 1
        else:
            high = middle
    return low


@njit(nogil=True, cache=True)
def find(order_U, begin, end, files_FC, runs_R, max_block, wait, state_U, rows_UB):  # type: ignore[no-untyped-def]
    """Find keys, given by their order, in the newest run that has them; write their states and rows.

    Without `wait`, keys that need the disk are LATE. -> (SOUND, 0), or how it failed and the file.
    """
    words_M, key_16 = np.empty(max_block // 8 + 2, np.uint64), np.empty(16, np.uint8)
    bytes_N = words_M.view(np.uint8)
    for u in range(begin, end):
        key = order_U[u]
        state_U[u] = MISSING
        for r in range(len(runs_R) - 1):
            f = _file_of(files_FC, runs_R[r], runs_R[r + 1], key)
            if f == runs_R[r + 1] or U64(files_FC[f, FIRST_KEY]) > key:
                continue
            lines = np.int64(files_FC[f, FILTER_LINES])
            if lines:
                filter_N = _carray(_pointer(files_FC[f, FILTER]), lines * 64, np.uint8)
                if not may_have(filter_N, lines, files_FC[f, PROBES], key):
                    continue
            number = np.int64(files_FC[f, NUM_BLOCKS])
            block = _block_of(_carray(_pointer(files_FC[f, LIMITS]), number, np.uint64), number, key)
            if block == number:
                continue
            offset = np.int64(_carray(_pointer(files_FC[f, OFFSETS]), number, np.int64)[block])
            size = np.int64(_carray(_pointer(files_FC[f, SIZES]), number, np.int32)[block])
            how = read_block(files_FC[f, FD], offset, size, files_FC[f, CONTEXT], bytes_N, words_M, wait)
            if how == NOT_CACHED:
                state_U[u] = LATE
                break
            if how != SOUND:
                return how, f
            at, length = _find_in_block(bytes_N, size, key, key_16)
            if at == ABSENT:
                continue
            if at < 0 or (length and length != rows_UB.shape[1]):
                return DAMAGED, f
            if length:
                state_U[u] = FOUND
                for b in range(length):
                    rows_UB[u, b] = bytes_N[at + b]
            break
    return SOUND, 0


@njit(nogil=True, cache=True)
def decode(file_C, begin_block, end_block, low, high, max_block, keys_N, value_N, rows_VB):  # type: ignore[no-untyped-def]
    """Write the entries of blocks with low <= key < high (0: no bound): keys; the number of each value, -1 for a
    deletion; rows. -> (how it ended, entries, rows)."""
    words_M, key_16 = np.empty(max_block // 8 + 2, np.uint64), np.empty(16, np.uint8)
    bytes_N = words_M.view(np.uint8)
    number = np.int64(file_C[NUM_BLOCKS])
    offset_B = _carray(_pointer(file_C[OFFSETS]), number, np.int64)
    size_B = _carray(_pointer(file_C[SIZES]), number, np.int32)
    count = rows = 0
    for block in range(begin_block, end_block):
        size = np.int64(size_B[block])
        how = read_block(file_C[FD], offset_B[block], size, file_C[CONTEXT], bytes_N, words_M, True)
        if how != SOUND:
            return how, 0, 0
        at, end = np.int64(0), _restarts(bytes_N, size)[1]
        if not end:
            return DAMAGED, 0, 0
        while at < end:
            at, length = _entry(bytes_N, at, end, key_16)
            if at >= 0:
                at, length = _judged(key_16[8], length, at)
            if at < 0 or (length and length != rows_VB.shape[1]):
                return DAMAGED, 0, 0
            key = _key_of(key_16)
            if low <= key and (key < high or not high):
                if count == len(keys_N) or (length and rows == len(rows_VB)):
                    return DAMAGED, 0, 0
                keys_N[count], value_N[count] = key, rows if length else -1
                for b in range(length):
                    rows_VB[rows, b] = bytes_N[at + b]
                rows += length != 0
                count += 1
            at += length
    return SOUND, count, rows


@njit(nogil=True, cache=True)
def decode_index(bytes_N, size, strip, limits_B, offset_B, size_B):  # type: ignore[no-untyped-def]
    """Write the blocks that an index block lists: the greatest key that a block may have, its place and size.

    `strip`: bytes after each key. -> the number of blocks, or MALFORMED.
    """
    number, end = _restarts(bytes_N, size)
    if number != len(limits_B):
        return MALFORMED
    at = np.int64(0)
    for block in range(number):
        shared, at = _varint(bytes_N, at, end)
        own, at = _varint(bytes_N, at, end)
        if shared or at + own > end:
            return MALFORMED
        length, limit = own - strip, U64(0)
        if length < 0 or length > 8:
            return MALFORMED
        for b in range(length):
            limit |= U64(bytes_N[at + b]) << U64(56 - 8 * b)
        limits_B[block] = limit if length == 8 else limit - U64(1)  # a shorter one comes before its longer ones
        offset_B[block], at = _varint(bytes_N, at + own, end)
        size_B[block], at = _varint(bytes_N, at, end)
    return number if at == end else MALFORMED
