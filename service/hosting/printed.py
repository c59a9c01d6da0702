"""What a launcher prints itself goes to one file that stays short, however much that is: its end is kept.

Anything may print there, C libraries and dying interpreters too, so it is the file that is looked after, not the text.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from millrace.repeating import repeating

MAX_BYTES = 1 << 20
"""A file longer than this is cut to its last half of it."""
LOOK_S = 1.0
"""How often it is looked at: more is printed meanwhile by few bugs."""


def begun(path: Path) -> FileIO:
    """The file, empty. What is written goes to its end, wherever that is by then. Raises OSError."""
    return FileIO(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600), "ab")


@contextmanager
def kept_short(path: Path, max_bytes: int = MAX_BYTES, look_s: float = LOOK_S) -> Iterator[None]:
    """The file is shortened as long as the context lasts, by a thread."""

    def look() -> None:
        with suppress(OSError):  # it went away, or the disk is full: it is looked at again
            shorten(path, max_bytes)

    with repeating(look, look_s, "printed"):
        yield


def shorten(path: Path, max_bytes: int) -> None:
    """Cut a longer file to the last `max_bytes` // 2, from the beginning of a line on. Raises OSError."""
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        if size <= max_bytes:
            return
        file.seek(size - max_bytes // 2)
        end = file.read()
        file.truncate(0)  # what is printed just now is lost, and printers go on behind what follows
    with path.open("ab") as file:
        file.write(end.partition(b"\n")[2])
