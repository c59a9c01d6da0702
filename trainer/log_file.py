"""The log's files as they lie on disk: their names, the bytes of a record, reading them all, judging what is damaged.

A record is one line, `<format> <crc32 of the JSON> <JSON>`. Every file begins with the claim it is written under, which
seals the file before it: of a sealed file only the sealed length counts, and every byte of that; what lies behind it
was written by a worker that woke too late. Only the newest file may end in a record that was never finished.
Nothing here writes; trainer.log does.
"""

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from millrace import documents
from millrace.errors import MillraceError

FORMAT = 2
"""The format of the records we write, and the newest we read. 2: partitions have a stream and a period."""
SEALED = "sealed"
"""In a claim: {name: bytes} of the file before, or {} where there is none."""
CLOSED = "closed"
"""In a claim: the number of the last closed pass of its timeline, which the files before it may have taken along."""
_NAME = re.compile(r"(\d{8,})-(\d{4,})\.log")
_HEAD = re.compile(rb"(\d+) ([0-9a-f]{8}) \{")


class LogDamaged(MillraceError):
    """A part of the log that must be whole is not."""

    def __init__(self, path: Path, byte: int, number: int | None, why: str) -> None:
        where = f"{path}: byte {byte}" + ("" if number is None else f", record {number}")
        super().__init__(
            f"{where}: {why}; restore the file from a copy, or `millrace rewind` to a commit made after this record"
        )
        self.path, self.byte, self.number = path, byte, number


class LogTooNew(MillraceError):
    """The log was written by a newer program."""

    def __init__(self, path: Path, byte: int, found: int) -> None:
        super().__init__(
            f"{path}: byte {byte}: a record of format {found}, and this program reads up to {FORMAT}; run the newer one"
        )


class Kind(StrEnum):
    """What a record says happened."""

    CLAIM = "claim"
    """A generation of workers took over the job, or goes on in a new file: the first record of each file."""
    PLAN = "plan"
    """A pass means these events from now on: {"number", ...}."""
    VOID = "void"
    """A plan is withdrawn: {"number", ...}."""
    OPERATION = "operation"
    """Something other than training changes the state, at the next close: {"op", ...}."""
    CLOSE = "close"
    """A pass is over: {"number", "day", "events", "samples", "rejected", "digests"}."""


@dataclass(frozen=True)
class Place:
    """Where a record lies, for messages."""

    path: Path
    byte: int

    def __str__(self) -> str:
        return f"{self.path}: byte {self.byte}"


@dataclass(frozen=True)
class Record:
    """One thing that happened."""

    number: int
    """Its place in the whole log, from 1."""
    kind: Kind
    body: Mapping[str, Any]
    place: Place


@dataclass(frozen=True)
class LogFile:
    """One file of the log, read and found good."""

    path: Path
    length: int
    """Its good bytes, from its start: all that counts, and all that a copy needs."""
    records: tuple[Record, ...]


def file_name(generation: int, part: int) -> str:
    """The name of a generation's n-th file."""
    return f"{generation:08d}-{part:04d}.log"


def file_numbers(path: Path) -> tuple[int, int] | None:
    """The generation and part in a file's name; None where it is no file of the log."""
    found = _NAME.fullmatch(path.name)
    return (int(found[1]), int(found[2])) if found else None


def listed(folder: Path) -> list[Path]:
    """The log's files by generation and part."""
    found = {numbers: path for path in folder.glob("*.log") if (numbers := file_numbers(path))}
    return [found[numbers] for numbers in sorted(found)]


def newest_generation(folder: Path) -> int:
    """The newest generation that has claimed the job whose log is in `folder`; 0 where none has."""
    return max((numbers[0] for path in listed(folder) if (numbers := file_numbers(path))), default=0)


def line_of(number: int, kind: Kind, body: Mapping[str, Any]) -> bytes:
    """The bytes of a record. ValueError or TypeError where the body is no JSON."""
    assert not {"n", "kind"} & body.keys(), f"{body}: n and kind are the record's own"
    said = {"n": number, "kind": kind, **body}
    content = json.dumps(said, separators=(",", ":"), allow_nan=False).encode("ascii")
    return b"%d %08x %s\n" % (FORMAT, zlib.crc32(content), content)


def record_of(line: bytes, place: Place) -> Record | None:
    """The record that a whole line holds; None where it is no good one. Raises LogTooNew."""
    head = _HEAD.match(line)
    if head is None:
        return None
    if int(head[1]) > FORMAT:
        raise LogTooNew(place.path, place.byte, int(head[1]))
    content = line[head.end() - 1 : -1]
    if int(head[1]) < 1 or not line.endswith(b"\n") or zlib.crc32(content) != int(head[2], 16):
        return None
    try:
        said = documents.parse_object(content, place)
        return Record(int(said.pop("n")), Kind(said.pop("kind")), said, place)
    except (KeyError, TypeError, ValueError):  # its bytes are the ones written, and no record of ours
        return None


def read_files(folder: Path) -> list[LogFile]:
    """Every file of the log in order, each checked against its seal, and their records against each other.

    Raises LogDamaged and LogTooNew.
    """
    paths, files = listed(folder), list[LogFile]()
    contents = [_content(path) for path in paths]
    for index, (path, content) in enumerate(zip(paths, contents, strict=True)):
        if index + 1 < len(paths):
            sealed = _sealed_length(path, len(content), paths[index + 1], contents[index + 1])
            file = _parsed(path, content[:sealed], may_end_torn=False)
        else:
            file = _parsed(path, content, may_end_torn=True)
        _check_order(file, files[-1] if files else None)
        files.append(file)
    return files


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:  # pruned since it was listed, perhaps: trainer.log looks again
        raise
    except OSError as error:
        raise LogDamaged(path, 0, None, f"the file cannot be read: {error.strerror}") from error


def _sealed_length(path: Path, length: int, after: Path, content: bytes) -> int:
    """How much of the file `path` counts, by the claim that begins the file after it."""
    sealed = _first(after, content).body[SEALED]
    if path.name not in sealed:
        missing = next(iter(sealed), "the file before it")
        raise LogDamaged(after, 0, None, f"this file goes on after {missing}, which is not there")
    if length < sealed[path.name]:
        raise LogDamaged(path, length, None, f"the file ends here, and is sealed at {sealed[path.name]} bytes")
    return int(sealed[path.name])


def _first(path: Path, content: bytes) -> Record:
    """The claim that a file begins with. It was whole before the file had its name, so it is never a tail."""
    record = record_of(content[: content.find(b"\n") + 1], Place(path, 0))
    numbers = file_numbers(path)
    if record is None or record.kind is not Kind.CLAIM or numbers is None:
        raise LogDamaged(path, 0, None, "the file does not begin with a good claim")
    if record.body["generation"] != numbers[0]:
        raise LogDamaged(path, 0, record.number, f"the claim is of generation {record.body['generation']}")
    return record


def _parsed(path: Path, content: bytes, *, may_end_torn: bool) -> LogFile:
    records, at = [_first(path, content)], content.find(b"\n") + 1
    while at < len(content):
        end = content.find(b"\n", at) + 1 or len(content)
        record = record_of(content[at:end], Place(path, at))
        if record is None:
            if not may_end_torn or end < len(content) or _holds_good(content[at:]):
                raise LogDamaged(path, at, records[-1].number + 1, "the record's bytes are not the ones written")
            break
        if record.number != records[-1].number + 1:
            raise LogDamaged(path, at, record.number, f"it comes after record {records[-1].number}")
        records.append(record)
        at = end
    return LogFile(path, at, tuple(records))


def _holds_good(tail: bytes) -> bool:
    """Whether a good record hides in a bad last line: then a line end was lost, not an append."""
    for head in _HEAD.finditer(tail, 1):
        if int(head[1]) <= FORMAT and record_of(tail[head.start() :], Place(Path(), 0)):
            return True
    return False


def _check_order(file: LogFile, before: LogFile | None) -> None:
    first = file.records[0]
    expected = before.records[-1].number + 1 if before else None if first.body[SEALED] else 1
    if expected is not None and first.number != expected:
        raise LogDamaged(file.path, 0, first.number, f"record {expected} should be here")
