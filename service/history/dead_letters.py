"""The dead letters of a job: the files in its store, and the newest rejected events with reasons and texts.

headrace.dataset.loader.dead_letters writes them.
"""

import base64
import binascii
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A rejected event; its texts are safe to show."""

    pass_number: int
    rank: int
    partition: str
    position: int
    line: int | None
    reason: str
    detail: str
    text: str | None
    """At most MAX_TEXT characters of the event; None where its bytes are not kept."""
    bytes: int | None
    """Its whole size."""


def letter_files(folder: Path) -> list[LettersOfPass]:
    """The files of dead letters in `folder`, by pass and rank."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    found = [(path, match) for path in paths if (match := LETTERS_FILE.fullmatch(path.name)) and is_plain(path)]
    return [LettersOfPass(path, int(match[1]), int(match[2])) for path, match in found]


def newest_letters(folder: Path, most: int, reason: str | None = None) -> list[DeadLetter]:
    """At most `most` dead letters, all or those of one reason, the newest first."""
    found: list[DeadLetter] = []
    for file in reversed(letter_files(folder)[-MAX_FILES:]):
        letters = [each for each in _read(file) if reason in (None, each.reason)]
        found += reversed(letters[-(most - len(found)) :])
        if len(found) >= most:
            break
    return found


def is_plain(path: Path) -> bool:
    """Whether this is a file, and no symbolic link to one."""
    return path.is_file() and not path.is_symlink()


def _read(file: LettersOfPass) -> Iterator[DeadLetter]:
    try:
        with file.path.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(max(0, size - MAX_READ))
            content = stream.read(MAX_READ)
    except FileNotFoundError:  # removed meanwhile
        return
    lines = content.split(b"\n")
    for line in lines[1:] if size > MAX_READ else lines:  # the first one may be a part of a letter
        try:
            fields = json.loads(line)
        except ValueError:
            continue
        if isinstance(fields, dict):
            yield _letter(file, fields)


def _letter(file: LettersOfPass, fields: dict[str, Any]) -> DeadLetter:
    data = _event(fields.get("bytes"))
    return DeadLetter(
        pass_number=file.pass_number,
        rank=file.rank,
        partition=printable(str(fields.get("partition", ""))),
        position=int(fields.get("offset", 0)),
        line=fields.get("line"),
        reason=printable(str(fields.get("reason", ""))),
        detail=printable(str(fields.get("detail") or "")),
        text=None if data is None else printable(data.decode(errors="replace")[:MAX_TEXT]),
        bytes=None if data is None else len(data),
    )


def _event(encoded: object) -> bytes | None:
    try:
        return base64.b64decode(encoded) if isinstance(encoded, str) else None
    except binascii.Error:
        return None
