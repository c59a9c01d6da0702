"""The dead letters of a job: the files in its store, and the newest rejected events with reasons and texts.

headrace.dataset.loader.dead_letters writes them.
"""

import base64
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass as described

from headrace.printable import printable

LETTERS_FILE = re.compile(r"pass-(\d{12})-rank-(\d+)\.jsonl")
MAX_TEXT = 4096
"""Most characters of an event that are shown."""
MAX_READ = 4 << 20
"""Most bytes that are read of one file, from its end."""
MAX_FILES = 50
"""Most files that are read, the newest."""


@dataclass(frozen=True, slots=True)
class LettersOfPass:
    """The dead letters of one pass and rank."""

    path: Path
    pass_number: int
    rank: int


@described(frozen=True, slots=True, config=ConfigDict(use_attribute_docstrings=True))
class RejectedEvent:
    """A rejected event."""

    pass_number: int
    rank: int
    partition: str
    position: int
    line: int | None
    """Its line among those that the pipe command printed for the segment; null where there is none."""
    reason: str
    detail: str
    """Its fault in words; empty where pipe.dead_letters.keep_bytes is false."""
    text: str | None
    """The event as text, its first 4,096 characters; null where its bytes are not kept."""
    bytes: int | None
    """Its whole size."""


class _Line(msgspec.Struct):
    """A line of a file of dead letters."""

    partition: str = ""
    offset: int = 0
    line: int | None = None
    reason: str = ""
    detail: str | None = None
    bytes: str | None = None


def letter_files(folder: Path) -> list[LettersOfPass]:
    """The files of dead letters in `folder`, by pass and rank."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    found = [(path, match) for path in paths if (match := LETTERS_FILE.fullmatch(path.name)) and is_plain(path)]
    return [LettersOfPass(path, int(match[1]), int(match[2])) for path, match in found]


def newest_letters(folder: Path, most: int, reason: str | None = None) -> list[RejectedEvent]:
    """At most `most` dead letters, all or those of one reason, the newest first."""
    found: list[RejectedEvent] = []
    for file in reversed(letter_files(folder)[-MAX_FILES:]):
        lines = list(_read(file, reason))[-(most - len(found)) :]
        found += [_letter(file, line) for line in reversed(lines)]
        if len(found) >= most:
            break
    return found


def is_plain(path: Path) -> bool:
    """Whether this is a file, and no symbolic link to one."""
    return path.is_file() and not path.is_symlink()


def _read(file: LettersOfPass, reason: str | None) -> Iterator[_Line]:
    """The letters of a file, all or those of one reason. What is no letter is passed over."""
    written = b"" if reason is None else json.dumps(reason).encode()
    try:
        with file.path.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(max(0, size - MAX_READ))
            content = stream.read(MAX_READ)
    except FileNotFoundError:  # removed meanwhile
        return
    lines = content.split(b"\n")
    for line in lines[1:] if size > MAX_READ else lines:  # the first one may be a part of a letter
        if written not in line:  # far sooner than decoding it
            continue
        try:
            found = msgspec.json.decode(line, type=_Line)
        except (msgspec.MsgspecError, RecursionError):
            continue
        if reason in (None, found.reason):
            yield found


def _letter(file: LettersOfPass, line: _Line) -> RejectedEvent:
    data = _event(line.bytes)
    return RejectedEvent(
        pass_number=file.pass_number,
        rank=file.rank,
        partition=printable(line.partition),
        position=line.offset,
        line=line.line,
        reason=printable(line.reason),
        detail=printable(line.detail or ""),
        text=None if data is None else printable(data.decode(errors="replace")[:MAX_TEXT]),
        bytes=None if data is None else len(data),
    )


def _event(encoded: str | None) -> bytes | None:
    try:
        return None if encoded is None else base64.b64decode(encoded)
    except ValueError:
        return None
