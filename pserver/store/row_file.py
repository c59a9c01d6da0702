"""One file of rows that RocksDB has written, open for reading: its footer, index and filter, checked.

RocksDB writes and merges these files; it does not read rows for us, as its Python binding holds the interpreter's lock
and makes an object of each key and row. pserver.store.block_kernels has the layout of blocks, and the hot loops.
"""

import os
import struct
import weakref
from pathlib import Path

import numpy as np

from headrace.pserver.errors import StoreDamaged, StoreFailed
from headrace.pserver.store import block_kernels as kernels
from headrace.pserver.store.block_kernels import SOUND, TRAILER_BYTES, UNREADABLE
from headrace.pserver.store.row_store import U64

FOOTER_BYTES, MAGIC, VERSION = 53, 0x88E241B785F4CFF7, 6
EXTENDED_MAGIC = bytes([0x3E, 0x00, 0x7A, 0x00])
XXH3 = 4
"""RocksDB's number of the checksum."""
FILTER, INDEX, PROPERTIES = b"fullfilter.rocksdb.BuiltinBloomFilter", b"rocksdb.index", b"rocksdb.properties"
INDEX_KIND, INDEX_KEY, INDEX_VALUE = (
    b"rocksdb.block.based.table.index.type",
    b"rocksdb.index.key.is.user.key",
    b"rocksdb.index.value.is.delta.encoded",
)
FILTER_TAIL = 5
"""Bytes of a filter after its lines: -1, 0 for the only kind, number of probes, reserved."""


class RowFile:
    """Raises StoreDamaged, StoreFailed, and FileNotFoundError if RocksDB has deleted it."""

    def __init__(self, path: Path, first: bytes, last: bytes) -> None:
        """`first` and `last`: the keys of its first and last entry."""
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)
        handles = self._handles(os.fstat(self._fd).st_size)
        properties = _entries(self._block(*handles[PROPERTIES]))
        if properties.get(INDEX_KIND) != bytes(4) or properties.get(INDEX_VALUE) != b"\1":
            raise self._damaged("an index of another kind")
        strip = 0 if properties.get(INDEX_KEY) == b"\1" else 8
        self.limits_B, self._offset_B, self._size_B = self._index(*handles[INDEX], strip)
        self._filter_N = self._filter(*handles[FILTER]) if FILTER in handles else np.empty(0, np.uint8)
        """(num_lines * 64 + FILTER_TAIL,) bytes; empty without a filter that is whole."""
        self.max_block = int(self._size_B.max(initial=0)) + TRAILER_BYTES
        """The most bytes to read for a block."""
        self.columns_C = self._columns(first, last)

    @property
    def num_bytes(self) -> int:
        """Memory of index and filter."""
        return self.limits_B.nbytes + self._offset_B.nbytes + self._size_B.nbytes + self._filter_N.nbytes

    def failure(self, how: int) -> StoreDamaged | StoreFailed:
        """The error of a kernel that could not read."""
        return StoreFailed(f"{self.path} cannot be read") if how == UNREADABLE else self._damaged("a damaged block")

    def _columns(self, first: bytes, last: bytes) -> U64:
        if len(first) != 8 or len(last) != 8:
            raise self._damaged("keys of other than 8 bytes")
        found = np.zeros(kernels.NUM_COLUMNS, np.uint64)
        found[kernels.FD] = self._fd
        found[kernels.FIRST_KEY], found[kernels.LAST_KEY] = (int.from_bytes(key, "big") for key in (first, last))
        found[kernels.LIMITS], found[kernels.OFFSETS] = self.limits_B.ctypes.data, self._offset_B.ctypes.data
        found[kernels.SIZES], found[kernels.NUM_BLOCKS] = self._size_B.ctypes.data, len(self.limits_B)
        if len(self._filter_N):
            found[kernels.FILTER], found[kernels.FILTER_LINES] = self._filter_N.ctypes.data, len(self._filter_N) // 64
            found[kernels.PROBES] = int(self._filter_N[-3])
        found[kernels.CONTEXT] = self._context
        return found

    def _handles(self, num_bytes: int) -> dict[bytes, tuple[int, int]]:
        """Place and size of the blocks beside those of rows."""
        footer = self._read(max(num_bytes - FOOTER_BYTES, 0), FOOTER_BYTES)
        version, magic = struct.unpack("<IQ", footer[-12:])
        if magic != MAGIC or footer[0] != XXH3 or footer[1:5] != EXTENDED_MAGIC or version != VERSION:
            raise self._damaged(f"no footer of format {VERSION}")
        self._context, size = struct.unpack("<II", footer[9:17])
        found = _entries(self._block(num_bytes - FOOTER_BYTES - size - TRAILER_BYTES, size))
        if INDEX not in found or PROPERTIES not in found:
            raise self._damaged("no index")
        return {name: _handle(value) for name, value in found.items()}

    def _index(self, offset: int, size: int, strip: int) -> tuple[U64, np.ndarray, np.ndarray]:
        block = self._block(offset, size)
        number = struct.unpack("<I", block[-4:])[0]
        if 4 * number > size:
            raise self._damaged("a damaged index")
        columns = np.empty(number, np.uint64), np.empty(number, np.int64), np.empty(number, np.int32)
        if kernels.decode_index(np.frombuffer(block, np.uint8), size, strip, *columns) != number:
            raise self._damaged("a damaged index")
        return columns

    def _filter(self, offset: int, size: int) -> np.ndarray:
        """A filter that is damaged or of another kind hides no row: the file is read without it."""
        try:
            content = np.frombuffer(self._block(offset, size), np.uint8)
        except StoreDamaged:
            return np.empty(0, np.uint8)
        known = size > FILTER_TAIL and size % 64 == FILTER_TAIL and content[-5] == 0xFF and not content[-4]
        return content if known and content[-3] < 32 else np.empty(0, np.uint8)

    def _block(self, offset: int, size: int) -> bytes:
        if size < 17 or offset < 0:
            raise self._damaged("a damaged list of blocks")
        words_M = np.zeros((size + TRAILER_BYTES) // 8 + 1, np.uint64)
        how = kernels.read_block(self._fd, offset, size, self._context, words_M.view(np.uint8), words_M, True)
        if how != SOUND:
            raise self.failure(how)
        return words_M.view(np.uint8)[:size].tobytes()

    def _read(self, offset: int, size: int) -> bytes:
        try:
            content = os.pread(self._fd, size, offset)
        except OSError as error:
            raise StoreFailed(f"{self.path}: {error}") from error
        if len(content) != size:
            raise self._damaged("a truncated file")
        return content

    def _damaged(self, why: str) -> StoreDamaged:
        return StoreDamaged(f"{self.path}: {why}")


def _entries(block: bytes) -> dict[bytes, bytes]:
    """The entries of a small block, whose keys are names. Its checksum was right."""
    found, name, at = dict[bytes, bytes](), b"", 0
    end = len(block) - 4 - 4 * struct.unpack("<I", block[-4:])[0]
    while at < end:
        shared, at = _varint(block, at)
        own, at = _varint(block, at)
        size, at = _varint(block, at)
        name = name[:shared] + block[at : at + own]
        found[name] = block[at + own : at + own + size]
        at += own + size
    return found


def _handle(value: bytes) -> tuple[int, int]:
    offset, at = _varint(value, 0)
    return offset, _varint(value, at)[0]


def _varint(content: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
