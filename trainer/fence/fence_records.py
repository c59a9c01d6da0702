"""The records of the fence: their content, and their form as JSON.

Each record is one object of the store, `fence/<number>`, which is put only if absent. trainer.fence.fence_sequence
puts and reads them.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
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


# The meaning of the fence's records together, and the decision after a number is lost. Pure.


class Verdict(StrEnum):
    """The outcome of a put, by the record that has the number."""

    WON = "won"
    """It is ours."""
    BEHIND = "behind"
    """A record of an older generation came before our claim: take it in, and decide again."""
    SUPERSEDED = "superseded"
    """Another head has the job."""


def judge(ours: FenceRecord, found: FenceRecord) -> Verdict:
    """Decide by the record that is found under the number where we put `ours`."""
    if found.nonce == ours.nonce:
        return Verdict.WON
    if isinstance(ours.content, FenceClaim) and found.generation < ours.generation:
        return Verdict.BEHIND
    return Verdict.SUPERSEDED


@dataclass(slots=True)
class FencedFile:
    """A file of the log, as far as the fence has it."""

    first: int
    """Number of the first record with a line of it."""
    lines: list[str]

    def content(self) -> bytes:
        """The file's bytes."""
        return "".join(self.lines).encode()


@dataclass(slots=True)
class FenceHistory:
    """The state after a number of records."""

    number: int = 0
    """Number of the last record."""
    generation: int = 0
    """The newest generation that has claimed the job; 0: none."""
    log_id: str = ""
    timeline: str = ""
    highest: int = 0
    """Highest number of a timeline."""
    mode: LogMode = LogMode.ASYNC
    commits: dict[str, str] = field(default_factory=dict)
    """The SHA-256 of each commit's manifest, by name. Only these count."""
    retired: dict[str, float] = field(default_factory=dict)
    """When commits were retired whose parts may still be in the store."""
    files: dict[str, FencedFile] = field(default_factory=dict)
    """Files of the log, by name."""

    def take(self, number: int, record: FenceRecord) -> None:
        """Take in the next record."""
        assert number == self.number + 1, f"record {number} after {self.number}"
        self.number = number
        content = record.content
        match content:
            case FenceClaim():
                self.generation, self.mode = record.generation, content.mode
                self._at(content.log_id, content.timeline)
                self.take_lines(number, content)
            case FenceLine():
                self.take_lines(number, content)
            case FenceCommit():
                self.generation, self.mode = content.claimed, content.mode
                self._at(content.log_id, content.timeline)
                self.highest = max(self.highest, content.highest)
                self.commits, self.retired = dict(content.live), dict(content.retired)
            case FenceRetirement():
                self.retired |= content.retired
                self.commits = {name: each for name, each in self.commits.items() if name not in content.retired}
            case _:
                assert_never(content)

    def take_lines(self, number: int, content: FenceContent) -> None:
        """Take in the lines of the log alone, of a record before the last commit."""
        match content:
            case FenceClaim(log=log):
                for name, text in log.items():
                    self._add_line(number, name, text)
            case FenceLine(file=name, line=line):
                self._add_line(number, name, line)
            case FenceCommit() | FenceRetirement():
                pass
            case _:
                assert_never(content)

    def commit_of(self, name: str, manifest: str, kept_files: Collection[str]) -> FenceCommit:
        """The record of a new commit. `kept_files`: the files of the log that are still needed."""
        return FenceCommit(
            name=name,
            since=min((file.first for each, file in self.files.items() if each in kept_files), default=0),
            live={**self.commits, name: manifest},
            retired=dict(self.retired),
            claimed=self.generation,
            log_id=self.log_id,
            timeline=self.timeline,
            highest=self.highest,
            mode=self.mode,
        )

    def forget_files(self, kept_files: Collection[str]) -> None:
        """Drop the lines of files that were pruned."""
        self.files = {name: file for name, file in self.files.items() if name in kept_files}

    def _at(self, log_id: str, timeline: str) -> None:
        self.log_id, self.timeline = log_id, timeline
        self.highest = max(self.highest, timeline_number(timeline))

    def _add_line(self, number: int, name: str, text: str) -> None:
        self.files.setdefault(name, FencedFile(number, [])).lines.append(text)


def timeline_number(timeline: str) -> int:
    """The number in the name of a timeline, "t3"."""
    digits = timeline.removeprefix("t")
    return int(digits) if digits.isdigit() else 0


def start_of(records: Sequence[tuple[int, FenceRecord]]) -> tuple[FenceHistory, int]:
    """An empty history placed before the newest commit among `records`, and the first number whose lines it needs.

    `records` are the newest ones, in order, from a commit or the very first record on.
    """
    number, first = records[0]
    since = first.content.since if isinstance(first.content, FenceCommit) else 0
    return FenceHistory(number=number - 1), since or number
