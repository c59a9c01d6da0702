"""The records of the fence: their content, and their form as JSON.

Each record is one object of the store, `fence/<number>`, which is put only if absent. trainer.fence.fence_history is
the meaning of all records together, trainer.fence.fence_sequence puts and reads them.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, assert_never

from headrace import documents
from headrace.errors import HeadraceError
from headrace.relative_names import SHA256, relative_name
from headrace.trainer.journal.log_file import NAME as LOG_NAME

FORMAT = 1
"""Number of the records' layout; a newer one is refused."""
COMMIT_NAME = re.compile(r"t(\d{1,18})-(\d{10})-g(\d{1,18})", re.ASCII)
"""Names of commits: timeline, version, generation."""


class FenceDamaged(HeadraceError):
    """A record of the fence cannot be read."""


class LogMode(StrEnum):
    """How much of the log the fence holds: `store.log_mirror`."""

    ASYNC = "async"
    """None of it: the log lives and dies with the disk of rank 0."""
    SYNC = "sync"
    """Every record, before it acts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceClaim:
    """A generation of workers takes over the job."""

    kind: ClassVar[str] = "claim"
    log_id: str
    """Names the log on disk that this generation writes to. A log with another id is not the job's any more."""
    timeline: str
    mode: LogMode
    log: Mapping[str, str] = field(default_factory=dict)
    """With `sync`: by name of a log file, the lines that the fence lacks; the claim's own line is the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceLine:
    """A record of the log."""

    kind: ClassVar[str] = "line"
    file: str
    """Name of the log file that the line belongs to."""
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceCommit:
    """A commit exists. The record also holds all that a reader needs of earlier records but lines of the log."""

    kind: ClassVar[str] = "commit"
    name: str
    since: int
    """The first record with a line of the log that is still needed; 0: none is."""
    live: Mapping[str, str]
    """The SHA-256 of each commit's manifest, by name, with this one."""
    retired: Mapping[str, float]
    """Retired commits whose parts may still be in the store, and when each was retired, in unix seconds."""
    claimed: int
    """Newest generation; it made this commit."""
    log_id: str
    timeline: str
    highest: int
    """Highest number of any timeline so far."""
    mode: LogMode


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceRetirement:
    """These commits exist no more. Their parts are removed after a grace."""

    kind: ClassVar[str] = "retirement"
    retired: Mapping[str, float]
    """When each commit was retired, in unix seconds, by name."""


FenceContent = FenceClaim | FenceLine | FenceCommit | FenceRetirement
_KINDS: dict[str, type[FenceContent]] = {
    each.kind: each for each in (FenceClaim, FenceLine, FenceCommit, FenceRetirement)
}


@dataclass(frozen=True, slots=True)
class FenceRecord:
    """One record, before it has a number."""

    generation: int
    """The generation of workers that wrote it."""
    nonce: str
    """Tells our record from another's when a reply is lost."""
    content: FenceContent


def encode(record: FenceRecord) -> bytes:
    """The bytes of a record."""
    head = {"format": FORMAT, "kind": record.content.kind, "generation": record.generation, "nonce": record.nonce}
    return json.dumps({**head, **asdict(record.content)}, separators=(",", ":"), allow_nan=False).encode()


def decode(number: int, data: bytes) -> FenceRecord:
    """The record whose bytes are `data`. Raises FenceDamaged, also for a record of a newer program."""
    try:
        body: dict[str, Any] = dict(documents.parse_object(data, f"fence/{number}"))
        if int(body.pop("format")) > FORMAT:
            raise FenceDamaged(f"fence/{number}: a record of a newer Headrace; run that one")
        kind, generation, nonce = _KINDS[body.pop("kind")], int(body.pop("generation")), str(body.pop("nonce"))
        if "mode" in body:
            body["mode"] = LogMode(body["mode"])
        content = kind(**body)
        _check_names(content)
        return FenceRecord(generation, nonce, content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FenceDamaged(f"fence/{number}: not a record of a fence ({error!r})") from error


def _check_names(content: FenceContent) -> None:
    """Raise InvalidName where a name in a record is not that of a log file, a commit or a manifest's content."""
    match content:
        case FenceClaim(log=log):
            for name in log:
                relative_name(name, LOG_NAME)
        case FenceLine(file=file):
            relative_name(file, LOG_NAME)
        case FenceCommit(name=name, live=live, retired=retired):
            for each in (name, *live, *retired):
                relative_name(each, COMMIT_NAME)
            for sha256 in live.values():
                relative_name(sha256, SHA256)
        case FenceRetirement(retired=retired):
            for each in retired:
                relative_name(each, COMMIT_NAME)
        case _:
            assert_never(content)
