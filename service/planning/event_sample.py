"""Reads a sample of events, JSON objects one a line, plain or gzip; counts lines that are none, and says why."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.dataset.sources.byte_stream import BYTE_ORDER_MARK, open_bytes
from headrace.dataset.sources.source_file import LocalFile
from headrace.documents import InvalidDocument, parse_object

MAX_LINE_BYTES = 1 << 20
"""A longer line is bad, as it is in a job with the default of `max_event_bytes`."""
MAX_SAMPLE_BYTES = 256 << 20
"""Most bytes that are read; the sample ends there."""
MAX_BAD_SHOWN = 5
"""Bad lines that are named one by one; the others are only counted."""
BLOCK_BYTES = 256 << 10


@dataclass(slots=True)
class EventSample:
    """The events of a file, once, in order; its counts are complete after that."""

    path: Path
    max_events: int
    """Good and bad lines together."""
    num_events: int = 0
    """Good events."""
    num_bad: int = 0
    bad_lines: list[str] = field(default_factory=list)
    """The first bad lines: their numbers, and why."""
    reached_end: bool = False
    """Whether the whole file was read."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The good events. Raises BadInput if the file cannot be read, or is broken gzip."""
        number = 0
        for number, line in enumerate(self._lines(), 1):
            if number > self.max_events:
                self.reached_end = False
                return
            if line == b"":  # a source of files leaves it out too
                continue
            try:
                if line is None:
                    raise InvalidDocument("the line", f"is longer than {MAX_LINE_BYTES:,} bytes")
                event = parse_object(line, "the line")
            except InvalidDocument as error:
                self._count_bad(number, error.why)
                continue
            self.num_events += 1
            yield event

    def _count_bad(self, number: int, why: str) -> None:
        self.num_bad += 1
        if len(self.bad_lines) < MAX_BAD_SHOWN:
            self.bad_lines.append(f"line {number} {why}")

    def _lines(self) -> Iterator[bytes | None]:
        """The lines without their ends; None for one that is too long. An empty last line is none."""
        stream = open_bytes(LocalFile(self.path))
        held, too_long = stream.read(len(BYTE_ORDER_MARK)).removeprefix(BYTE_ORDER_MARK), False
        try:
            while stream.offset < MAX_SAMPLE_BYTES and (block := stream.read(BLOCK_BYTES)):
                *lines, held = (held + block).split(b"\n")
                for line in lines:
                    yield None if too_long or len(line) > MAX_LINE_BYTES else line.removesuffix(b"\r")
                    too_long = False
                if len(held) > MAX_LINE_BYTES:
                    held, too_long = b"", True
            self.reached_end = stream.offset < MAX_SAMPLE_BYTES  # else the last line may be a part of one
            if too_long or (held and self.reached_end):
                yield None if too_long else held
        finally:
            stream.close()
