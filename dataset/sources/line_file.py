"""Counts, finds and reads the lines of one file by number, in blocks, without a Python step per line.

A line ends with a line feed; a carriage return before it is dropped, and so is a byte order mark at the start, so
Windows files work too. A file that was replaced while it is known (another inode), or is shorter than at the last
look, raises SourceGap. A file that was truncated and has grown beyond its old length since, or was changed in place,
is not noticed. To another process, and to another machine, a file is known by its first 64 KiB.
dataset.spec.path_pattern and dataset.sources.files decide which files exist and when they may be read.

Shapes: L lines in a block, C chunks of the index.
"""

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from headrace.dataset.sources.byte_stream import BYTE_ORDER_MARK, ByteStream, open_bytes
from headrace.dataset.sources.source_file import LocalFile, SourceFile
from headrace.dataset.stream.errors import SourceGap
from headrace.dataset.stream.source import CONTENT, I64, Events, check_identity
from headrace.errors import BadInput
from headrace.shared_folder import HEAD_BYTES

CHUNK_BYTES = 1 << 20
"""Bytes between two entries of the index, and of one read; a seek discards at most this many."""
LINE_FEED, CARRIAGE_RETURN = 10, 13


class LineFile:
    """One file. It is opened when it is counted or read; `close` closes it until then."""

    def __init__(self, file: SourceFile | Path, *, growing: bool, max_line_bytes: int) -> None:
        self.file = LocalFile(file) if isinstance(file, Path) else file
        self.path = self.file.name
        self.growing = growing
        """Whether more may be written; then a last line without a line feed does not count yet."""
        self.max_line_bytes = max_line_bytes
        """Of a longer line that spans blocks, only a beginning of a little more than this is kept."""
        self._feeds_before_C = array("q", [0])  # the sparse index: line feeds before byte c * CHUNK_BYTES
        self._counted_bytes = self._num_feeds = 0
        self._ends_with_feed = True
        self.identity = ""
        """Of its first bytes, after the first look; see `identity_of`."""
        self._version = ""
        self._size = 0  # at the last look
        self._counted_size = -1
        self._counter: ByteStream | None = None
        self._stream: ByteStream | None = None
        self._line, self._rest = 0, b""  # the stream is after `_rest`, which begins line `_line`

    # Counting

    def num_events(self) -> int:
        """Complete lines at the last `count`; a last one without a line feed counts unless the file grows."""
        return self._num_feeds + (not self.growing and not self._ends_with_feed)

    def count(self) -> int:
        """Count the lines written since the last count, and return `num_events`.

        Raises SourceGap if the file is gone, was replaced or became shorter; BadInput if gzip ends too early.
        """
        self._look()
        if self._size == self._counted_size:
            return self.num_events()
        self._counted_size = self._size
        if self._counter is None:
            self._counter = open_bytes(self.file)
            self._counter.seek(self._counted_bytes)
        while data := self._counter.read(CHUNK_BYTES - self._counted_bytes % CHUNK_BYTES):
            self._num_feeds += int(np.count_nonzero(np.frombuffer(data, np.uint8) == LINE_FEED))
            self._counted_bytes += len(data)
            self._ends_with_feed = data[-1] == LINE_FEED
            if self._counted_bytes % CHUNK_BYTES == 0:
                self._feeds_before_C.append(self._num_feeds)
        if not self.growing:
            if not self._counter.finished():
                raise BadInput(
                    f"{self.path}: the gzip file ends too early, after {self.num_events()} lines; copy it again"
                )
            self._counter.close()
            self._counter = None
        return self.num_events()

    def _look(self) -> None:
        """Raise SourceGap if the file was deleted, replaced or truncated."""
        look = self.file.look()
        if not self.identity or self._size < min(HEAD_BYTES, look.num_bytes):
            self.identity = identity_of(self.file)
        if self._version not in ("", look.version) or look.num_bytes < self._size:
            raise SourceGap(
                f"{self.path}: the file was replaced or became shorter while it was read, so its line numbers have "
                f"changed; write to a new file instead"
            )
        self._version, self._size = look.version, look.num_bytes

    # Reading

    def read(self, begin: int, end: int, identity: str = "") -> Iterator[Events]:
        """Lines `begin` to `end` (exclusive) in blocks of about CHUNK_BYTES.

        Raises SourceGap if the file has fewer lines or another identity.
        """
        self._look()
        of_log = self.identity if identity.startswith(CONTENT) else self._version  # in logs of earlier programs
        check_identity(str(self.path), identity, of_log)
        line = begin
        while line < end:
            if self._stream is None or self._line != line:  # closed, or another reader moved it
                self._go_to(line)
            block = self._next_block(end - line)
            if block is None:
                raise SourceGap(
                    f"{self.path}: line {end - 1} was requested, but the file ends after {self._line} lines"
                )
            line += len(block)
            yield block

    def _go_to(self, line: int) -> None:
        if self._stream is None:
            self._stream = open_bytes(self.file)
            self._line, self._rest = 0, b""
        # The last indexed chunk that begins before the end of the previous line.
        chunk = max(0, bisect_left(self._feeds_before_C, line) - 1)
        if line < self._line or chunk * CHUNK_BYTES > self._stream.offset:
            self._stream.seek(chunk * CHUNK_BYTES)
            # The chunk begins inside this line. It is before `line`, so its missing head does not matter.
            self._line, self._rest = self._feeds_before_C[chunk], b""
        while self._line < line:
            block = self._next_block(line - self._line)
            if block is None:
                raise SourceGap(f"{self.path}: line {line} was requested, but the file ends after {self._line} lines")

    def _next_block(self, max_lines: int) -> Events | None:
        """The next lines, at least one; None at the present end."""
        assert self._stream is not None
        data = self._rest
        while True:
            feed_L = np.flatnonzero(np.frombuffer(data, np.uint8) == LINE_FEED)[:max_lines]
            if len(feed_L):
                break
            piece = self._stream.read(CHUNK_BYTES)
            if not piece:
                self._rest = data
                return self._unfinished_line()
            data = data[: self.max_line_bytes + 1] + piece
        used = int(feed_L[-1]) + 1
        block = _block(data, feed_L, self._line)
        self._rest = data[used:]
        self._line += len(feed_L)
        return block

    def _unfinished_line(self) -> Events | None:
        if self.growing or not self._rest:
            return None
        block = _block(self._rest, np.array([len(self._rest)], np.int64), self._line)
        self._line, self._rest = self._line + 1, b""
        return block

    def close(self) -> None:
        """Close what is open. May be called twice."""
        for stream in (self._counter, self._stream):
            if stream is not None:
                stream.close()
        self._counter = self._stream = None


def identity_of(file: SourceFile | Path) -> str:
    """Digests of the first 1, 4, 16 .. 65536 bytes of a file, as far as it has them: a file that grows has more."""
    head = (LocalFile(file) if isinstance(file, Path) else file).head(HEAD_BYTES)
    sizes = (1 << bits for bits in range(0, HEAD_BYTES.bit_length(), 2) if 1 << bits <= len(head))
    return CONTENT + "".join(hashlib.sha256(head[:size]).hexdigest()[:8] for size in sizes)


def _block(data: bytes, feed_L: I64, first_line: int) -> Events:
    """The lines that end at `feed_L`, as events. The first line of a file begins after its byte order mark."""
    begin_L = np.empty(len(feed_L), np.int64)
    begin_L[0] = len(BYTE_ORDER_MARK) if first_line == 0 and data.startswith(BYTE_ORDER_MARK) else 0
    np.add(feed_L[:-1], 1, out=begin_L[1:])
    last_L = np.frombuffer(data, np.uint8)[np.maximum(feed_L - 1, 0)]
    end_L = feed_L - ((last_L == CARRIAGE_RETURN) & (feed_L > begin_L))
    position_L = np.arange(first_line, first_line + len(feed_L), dtype=np.int64)
    return Events(data, begin_L, end_L, position_L, np.full(len(feed_L), -1, np.int64))
