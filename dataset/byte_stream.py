"""The bytes of a file, plain or gzip, read forward in pieces.

Both kinds count positions in the bytes a reader sees (of gzip: unpacked), so whoever reads need not know the kind.
Finding lines in the bytes is line_file's work.
"""

import os
import zlib
from pathlib import Path
from typing import Protocol

from dataset.errors import SourceGap
from millrace.errors import BadInput

GZIP_MAGIC = b"\x1f\x8b"
GZIP_READ_BYTES = 256 << 10


class ByteStream(Protocol):
    """A file opened for reading forward."""

    offset: int
    """Bytes given so far, or the place sought."""

    def read(self, num_bytes: int) -> bytes:
        """At most `num_bytes`, fewer only where the file ends for now; b"" at its end for now."""
        ...

    def seek(self, offset: int) -> None:
        """Go to `offset`, at most the file's length. Of gzip, going back means unpacking from the start."""
        ...

    def finished(self) -> bool:
        """Whether what was read to its end is whole; False for gzip that stops in mid-stream."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


def open_bytes(path: Path) -> ByteStream:
    """The bytes of `path`; gzip by its name (.gz) or by its first bytes. Raises SourceGap where it is gone."""
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        raise SourceGap(f"{path}: the file is gone; put it back to read on from it") from None
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from error
    packed = path.suffix == ".gz" or os.pread(file, 2, 0) == GZIP_MAGIC
    return GzipBytes(path, file) if packed else PlainBytes(file)


class PlainBytes:
    """A file as it is."""

    def __init__(self, file: int) -> None:
        self.file = file
        self.offset = 0

    def read(self, num_bytes: int) -> bytes:
        """See ByteStream."""
        data = os.pread(self.file, num_bytes, self.offset)
        self.offset += len(data)
        return data

    def seek(self, offset: int) -> None:
        """See ByteStream."""
        self.offset = offset

    def finished(self) -> bool:
        """See ByteStream."""
        return True

    def close(self) -> None:
        """See ByteStream."""
        os.close(self.file)


class GzipBytes:
    """A gzip file of one or more members; one that still grows may be read as far as it goes."""

    def __init__(self, path: Path, file: int) -> None:
        self.path, self.file = path, file
        self._start()

    def _start(self) -> None:
        self.offset = 0
        self._raw_offset = 0
        self._unpacker = zlib.decompressobj(wbits=31)
        self._fresh = True  # between members: nothing of the next one was seen
        self._input = b""

    def read(self, num_bytes: int) -> bytes:
        """See ByteStream. Raises BadInput where the file is no gzip."""
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
        """Some bytes, perhaps none; None at the file's end for now."""
        at_end = False
        if not self._input:
            self._input = os.pread(self.file, GZIP_READ_BYTES, self._raw_offset)
            self._raw_offset += len(self._input)
            at_end = not self._input
        if self._fresh:
            self._input = self._input.lstrip(b"\0")  # padding between members, as gzip itself allows
        try:
            data = self._unpacker.decompress(self._input, max_bytes)
        except zlib.error as error:
            raise BadInput(f"{self.path}: no valid gzip at byte {self._raw_offset} or before: {error}") from error
        self._fresh = self._fresh and not self._input
        self._input = self._unpacker.unconsumed_tail
        if self._unpacker.eof:
            self._input = self._unpacker.unused_data
            self._unpacker = zlib.decompressobj(wbits=31)
            self._fresh = True
        return data if data or not at_end else None

    def seek(self, offset: int) -> None:
        """See ByteStream."""
        if offset < self.offset:
            self._start()
        while self.offset < offset and self.read(min(1 << 20, offset - self.offset)):
            pass

    def finished(self) -> bool:
        """See ByteStream."""
        return self._fresh

    def close(self) -> None:
        """See ByteStream."""
        os.close(self.file)
