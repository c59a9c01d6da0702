"""The log's files on disk: their names, the bytes of a record, reading all of them, finding damage.

A record is one line, `<format> <crc32 of the JSON> <JSON>`. Every file begins with a claim, which seals the file before
it: only the sealed length of that file counts, and all of it must be whole. Bytes behind the seal come from a worker
that was already replaced. Only the newest file may end in an unfinished record.
This module writes nothing; trainer.journal.log does. The JSON's content is trainer.journal.records'.
"""

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from headrace import documents
from headrace.errors import HeadraceError
from headrace.trainer.journal.records import Claim, Content, RecordKind, UndecodableRecord, decode, encode, kind_of

FORMAT = 2
"""The format of new records, and the newest readable one. Since 2, partitions have a stream and a period."""
NAME = re.compile(r"(\d{8,18})-(\d{4,18})\.log", re.ASCII)
"""Names of the files: generation and part."""
_HEAD = re.compile(rb"(\d+) ([0-9a-f]{8}) \{")


class LogDamaged(HeadraceError):
    """A part of the log that must be whole is damaged."""

    def __init__(self, path: Path, byte: int, number: int | None, why: str) -> None:
        where = f"{path}: byte {byte}" + ("" if number is None else f", record {number}")
        super().__init__(
            f"{where}: {why}; restore the file from a copy, or `headrace rewind` to a commit made after this record"
        )
        self.path, self.byte, self.number = path, byte, number


class LogTooNew(HeadraceError):
    """The log was written by a newer program."""

    def __init__(self, path: Path, byte: int, found: int) -> None:
        super().__init__(
            f"{path}: byte {byte}: a record of format {found}, and this program reads up to {FORMAT}; run the newer one"
        )


class UnknownRecord(LogTooNew):
    """A whole record of a kind, or with an operation, that this program does not know."""

    def __init__(self, place: "RecordPlace", number: int, error: UndecodableRecord) -> None:
        HeadraceError.__init__(self, f"{place}, record {number}: {error}; run the program that wrote it")


@dataclass(frozen=True, slots=True)
class RecordPlace:
    """The place of a record on disk, for messages."""

    path: Path
    byte: int

    def __str__(self) -> str:
        return f"{self.path}: byte {self.byte}"


ContentT = TypeVar("ContentT", bound=Content, covariant=True)


@dataclass(frozen=True, slots=True)
class LogRecord(Generic[ContentT]):
    """One record of the log."""

    number: int
    """Its place in the whole log, from 1."""
    content: ContentT
    place: RecordPlace

    @property
    def kind(self) -> RecordKind:
        """The kind of the content."""
        return kind_of(self.content)

    @property
    def body(self) -> Mapping[str, Any]:
        """The content as JSON-able data, for people."""
        return encode(self.content)


AnyRecord = LogRecord[Content]


@dataclass(frozen=True)
class LogFile:
    """One file of the log, read and checked."""

    path: Path
    length: int
    """Good bytes from the start: a copy needs no more."""
    records: tuple[AnyRecord, ...]


def file_name(generation: int, part: int) -> str:
    """The name of a generation's n-th file."""
    return f"{generation:08d}-{part:04d}.log"


def file_numbers(path: Path) -> tuple[int, int] | None:
    """The generation and part in a file's name; None for other files."""
    found = NAME.fullmatch(path.name)
    return (int(found[1]), int(found[2])) if found else None


def listed(folder: Path) -> list[Path]:
    """The log's files by generation and part."""
    found = {numbers: path for path in folder.glob("*.log") if (numbers := file_numbers(path))}
    return [found[numbers] for numbers in sorted(found)]


def newest_generation(folder: Path) -> int:
    """The newest generation that has claimed the job whose log is in `folder`; 0 without a claim."""
    return max((numbers[0] for path in listed(folder) if (numbers := file_numbers(path))), default=0)


def line_of(number: int, content: Content) -> bytes:
    """The bytes of a record. Raises ValueError or TypeError where the content is no JSON."""
    body = encode(content)
    assert not {"n", "kind"} & body.keys(), f"{body}: n and kind are the record's own keys"
    whole = {"n": number, "kind": kind_of(content), **body}
    text = json.dumps(whole, separators=(",", ":"), allow_nan=False).encode("ascii")
    return b"%d %08x %s\n" % (FORMAT, zlib.crc32(text), text)


def record_of(line: bytes, place: RecordPlace) -> AnyRecord | None:
    """The record in a whole line; None for a damaged one. Raises LogTooNew, and UnknownRecord."""
    head = _HEAD.match(line)
    if head is None:
        return None
    if int(head[1]) > FORMAT:
        raise LogTooNew(place.path, place.byte, int(head[1]))
    text = line[head.end() - 1 : -1]
    if int(head[1]) < 1 or not line.endswith(b"\n") or zlib.crc32(text) != int(head[2], 16):
        return None
    try:
        body = documents.parse_object(text, place)
        number, kind = int(body.pop("n")), str(body.pop("kind"))
    except (KeyError, TypeError, ValueError):  # the checksum is right, but this is not a record of a log
        return None
    try:
        return LogRecord(number, decode(kind, body), place)
    except UndecodableRecord as error:
        raise UnknownRecord(place, number, error) from error


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
    except FileNotFoundError:  # perhaps pruned since it was listed: trainer.journal.log tries again
        raise
    except OSError as error:
        raise LogDamaged(path, 0, None, f"the file cannot be read: {error.strerror}") from error


def _sealed_length(path: Path, length: int, after: Path, content: bytes) -> int:
    """The sealed length of the file `path`, by the claim at the start of the file `after`."""
    sealed = _first(after, content).content.sealed
    if path.name not in sealed:
        missing = next(iter(sealed), "the file before it")
        raise LogDamaged(after, 0, None, f"this file continues after {missing}, which is not there")
    if length < sealed[path.name]:
        raise LogDamaged(path, length, None, f"the file ends here, and is sealed at {sealed[path.name]} bytes")
    return int(sealed[path.name])


def _first(path: Path, content: bytes) -> LogRecord[Claim]:
    """The claim at the start of a file. The file gets its name after the claim is whole, so the claim is never torn."""
    record = record_of(content[: content.find(b"\n") + 1], RecordPlace(path, 0))
    numbers = file_numbers(path)
    if record is None or not isinstance(record.content, Claim) or numbers is None:
        raise LogDamaged(path, 0, None, "the file does not begin with a good claim")
    if record.content.generation != numbers[0]:
        raise LogDamaged(path, 0, record.number, f"the claim is of generation {record.content.generation}")
    return LogRecord(record.number, record.content, record.place)


def _parsed(path: Path, content: bytes, *, may_end_torn: bool) -> LogFile:
    records, at = list[AnyRecord]([_first(path, content)]), content.find(b"\n") + 1
    while at < len(content):
        end = content.find(b"\n", at) + 1 or len(content)
        record = record_of(content[at:end], RecordPlace(path, at))
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
    """True if a bad last line contains a good record: then a line end is damaged, and no append was interrupted."""
    for head in _HEAD.finditer(tail, 1):
        if int(head[1]) <= FORMAT and record_of(tail[head.start() :], RecordPlace(Path(), 0)):
            return True
    return False


def _check_order(file: LogFile, before: LogFile | None) -> None:
    first = file.records[0]
    seals = isinstance(first.content, Claim) and first.content.sealed
    expected = before.records[-1].number + 1 if before else None if seals else 1
    if expected is not None and first.number != expected:
        raise LogDamaged(file.path, 0, first.number, f"record {expected} should be here")
