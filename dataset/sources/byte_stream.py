"""Reads the bytes of a file forward, plain or gzip.

Offsets count the bytes that the reader gets (unpacked bytes of gzip), so both kinds look alike.
dataset.sources.line_file finds the lines.
"""

import zlib
from typing import Protocol

from headrace.dataset.sources.source_file import RawBytes, SourceFile
from headrace.dataset.spec.file_formats import MAGIC_BYTES, format_of_bytes
from headrace.errors import BadInput

GZIP_MAGIC = b"\x1f\x8b"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""Bytes that some programs write before text; those that read lines drop it at the start of a file."""
GZIP_READ_BYTES = 256 << 10


class ByteStream(Protocol):
    """A file opened for forward reading."""

    offset: int
    """Offset of the next byte that `read` returns."""

    def read(self, num_bytes: int) -> bytes:
        """At most `num_bytes`; fewer, or b"", only at the present end of the file."""
        ...

    def seek(self, offset: int) -> None:
        """Go to `offset`, at most the file's length. In gzip, going back unpacks from the start."""
        ...

    def finished(self) -> bool:
        """Whether a file read to its end is complete; False for gzip that ends inside a member."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


def open_bytes(file: SourceFile) -> ByteStream:
    """Open a file; gzip by its name (.gz) or its first bytes. Raises as SourceFile, or BadInput."""
    raw = file.open()
    head = raw.read_at(MAGIC_BYTES, 0)
    if (other := format_of_bytes(head)) is not None:
        raw.close()
        raise BadInput(f"{file.name} has no lines: it is {other}")
    packed = file.name.endswith(".gz") or head.startswith(GZIP_MAGIC)
    return GzipBytes(file.name, raw) if packed else PlainBytes(raw)


class PlainBytes:
    """A plain file."""

    def __init__(self, raw: RawBytes) -> None:
        self._raw = raw
        self.offset = 0

    def read(self, num_bytes: int) -> bytes:
        data = self._raw.read_at(num_bytes, self.offset)
        self.offset += len(data)
        return data

    def seek(self, offset: int) -> None:
        self.offset = offset

    def finished(self) -> bool:
        return True

    def close(self) -> None:
        self._raw.close()


class GzipBytes:
    """A gzip file of one or more members; a growing file can be read up to its present end."""

    def __init__(self, name: str, raw: RawBytes) -> None:
        self._name, self._raw = name, raw
        self._start()

    def _start(self) -> None:
        self.offset = 0
        self._raw_offset = 0
        self._unpacker = zlib.decompressobj(wbits=31)
        self._fresh = True  # between members: no byte of the next one was read
        self._input = b""

    def read(self, num_bytes: int) -> bytes:
        """Raises BadInput if the file is not gzip."""
        parts: list[bytes] = []
        wanted = num_bytes
        while wanted:
            data = self._read_some(wanted)
            if data is None:
                break
            parts.append(data)
            wanted -= len(data)
        self.offset += num_bytes - wanted
        return b"".join(parts)

    def _read_some(self, max_bytes: int) -> bytes | None:
        """Some bytes, perhaps none; None at the present end of the file."""
        at_end = False
        if not self._input:
            self._input = self._raw.read_at(GZIP_READ_BYTES, self._raw_offset)
            self._raw_offset += len(self._input)
            at_end = not self._input
        if self._fresh:
            self._input = self._input.lstrip(b"\0")  # gzip allows zero padding between members
        try:
            data = self._unpacker.decompress(self._input, max_bytes)
        except zlib.error as error:
            raise BadInput(f"{self._name}: invalid gzip at byte {self._raw_offset} or before: {error}") from error
        self._fresh = self._fresh and not self._input
        self._input = self._unpacker.unconsumed_tail
        if self._unpacker.eof:
            self._input = self._unpacker.unused_data
            self._unpacker = zlib.decompressobj(wbits=31)
            self._fresh = True
        return data if data or not at_end else None

    def seek(self, offset: int) -> None:
        if offset < self.offset:
            self._start()
        while self.offset < offset and self.read(min(1 << 20, offset - self.offset)):
            pass

    def finished(self) -> bool:
        return self._fresh

    def close(self) -> None:
        self._raw.close()
