"""One file of events, of any format: what dataset.sources.files asks of it."""

from collections.abc import Iterator
from typing import Protocol

from headrace.dataset.sources.source_file import SourceFile
from headrace.dataset.stream.source import Events


class EventFile(Protocol):
    """Events of one file by number, from 0. `close` closes it until it is used again."""

    file: SourceFile
    identity: str
    """Of its first bytes, after the first look."""

    def num_events(self) -> int:
        """Events at the last `count`."""
        ...

    def count(self) -> int:
        """Count what was written since the last count, and return `num_events`.

        Raises SourceGap if the file is gone, was replaced or became shorter; BadInput if it is broken.
        """
        ...

    def read(self, begin: int, end: int, identity: str = "") -> Iterator[Events]:
        """Events `begin` to `end` (exclusive) in blocks.

        Raises SourceGap if there are fewer, or for another identity.
        """
        ...

    def close(self) -> None:
        """Close what is open. May be called twice."""
        ...
