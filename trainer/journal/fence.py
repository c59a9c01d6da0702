"""The fence: one sequence of small objects that decides which claims, commits and records of a job count.

Each record is one object of the store, `fence/<number>`, and is put only if its number is free. After a lost reply the
object is read back; its nonce tells whether it is ours. So of two heads that go for one number exactly one wins, and
the loser ends. Safety rests on this alone, not on clocks, leases or kills. Records are never removed while the job
lives: so no number is ever free again.
"""

import json
import re
import threading
import uuid
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Protocol, assert_never

from headrace import documents
from headrace.blob.blob_errors import BlobUnavailable
from headrace.blob.blob_store import BlobStore
from headrace.blob.signature import UNSIGNED, Signature, WrongSignature
from headrace.deadline import Deadline
from headrace.errors import HeadraceError, SpecError, Unavailable
from headrace.relative_names import SHA256, relative_name
from headrace.trainer.journal.log import Superseded
from headrace.trainer.journal.log_file import NAME as LOG_NAME

FORMAT = 1
"""Number of the records' layout; a newer one is refused."""
FOLDER = "fence"
MAX_RECORD_BYTES = 64 << 20
READERS = 8
"""Records that are read at the same time."""
TAIL_RECORDS = 64
"""Records that are read at once while the newest commit is looked for."""
MAX_ROUNDS = 16
"""Puts of one record that find the number taken, and then no record there; then the store is at fault."""
COMMIT_NAME = re.compile(r"t(\d{1,18})-(\d{10})-g(\d{1,18})", re.ASCII)
"""Names of commits: timeline, version, generation."""


class FenceDamaged(HeadraceError):
    """A record of the fence cannot be read."""


class FenceMoved(HeadraceError):
    """Records of an older generation came before our claim: read them, and decide again."""

    exit_code = 75


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


# The meaning of all records together, and the decision after a number is lost. Pure.


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


# The sequence in an object store, and one head's view of it.


class FenceObjects(Protocol):
    """The objects of a fence, by number. Errors: Unavailable; then it is unknown whether a put took place."""

    @property
    def name(self) -> str:
        """The address, for messages."""
        ...

    def put_new(self, number: int, data: bytes, deadline: Deadline) -> bool:
        """Put an object, unless there is one."""
        ...

    def get(self, number: int, deadline: Deadline) -> bytes | None:
        """An object; None if there is none."""
        ...


class BlobFence:
    """A sequence of records in a blob store."""

    def __init__(self, blobs: BlobStore, signature: Signature = UNSIGNED) -> None:
        self._blobs, self._signature = blobs, signature

    @property
    def name(self) -> str:
        return self._blobs.url(FOLDER)

    def put_new(self, number: int, data: bytes, deadline: Deadline) -> bool:
        return self._blobs.put_new(key_of(number), self._signature.signed(key_of(number), data), deadline)

    def get(self, number: int, deadline: Deadline) -> bytes | None:
        """Raises FenceDamaged for a record that is not signed as it must be."""
        data = self._blobs.get(key_of(number), MAX_RECORD_BYTES, deadline)
        try:
            return None if data is None else self._signature.opened(key_of(number), data)
        except WrongSignature as error:
            raise FenceDamaged(f"a record of {self.name}: {error}") from error


def key_of(number: int) -> str:
    """The key of a record."""
    return f"{FOLDER}/{number:012d}"


def check_conditional_puts(blobs: BlobStore, key_name: str, deadline: Deadline) -> None:
    """Raise SpecError where the store replaces an object that must be put only if absent."""
    probe = f"{FOLDER}-probe/{uuid.uuid4().hex}"
    refused = f"{blobs.url('')} does not know conditional puts (If-None-Match), on which safe commits rest"
    hint = f'use a store that does, or {key_name} = "shared"'
    try:
        first = blobs.put_new(probe, b"first", deadline)
        second = blobs.put_new(probe, b"second", deadline)
        found = blobs.get(probe, 16, deadline)
    except BlobUnavailable as error:
        if "NotImplemented" in str(error):
            raise SpecError(f"{refused}; {hint}", key_name) from error
        raise
    blobs.remove(probe, deadline)
    # The first put may find its own object, after a lost reply.
    if second or found != b"first":
        raise SpecError(f"{refused} (seen: {first}, {second}); {hint}", key_name)


class FenceSequence:
    """One head's view of the fence: it reads the sequence, and appends until another head claims. Any thread."""

    def __init__(self, objects: FenceObjects, generation: int) -> None:
        """`generation`: the number under which this head writes; 0 for a reader."""
        self._objects, self.generation = objects, generation
        self.history = FenceHistory()
        """The state as of the last call; read it under no lock only while no other thread appends."""
        self._turn = threading.RLock()
        self._pending: FenceRecord | None = None
        """A record that may be in the store: its number is decided before any other is put."""
        self._newest = 0

    def catch_up(self, deadline: Deadline) -> FenceHistory:
        """Read the records that this head does not know yet."""
        with self._turn:
            if not self.history.number:
                self._begin(deadline)
            while (data := self._objects.get(self.history.number + 1, deadline)) is not None:
                self._take(decode(self.history.number + 1, data))
            return self.history

    def claim(self, content: FenceClaim, deadline: Deadline) -> int:
        """Take over the job -> the record's number. From then on no older generation can append.

        Raises Superseded where a generation as new has the job; FenceMoved where an older one wrote meanwhile: what was
        read before is out of date, so read and decide again.
        """
        return self.append(content, deadline)

    def append(self, content: FenceContent, deadline: Deadline) -> int:
        """Append a record -> its number. Raises Superseded, for good; and Unavailable, after which the record may be
        there or not: the next call finds out first."""
        with self._turn:
            self._propose(content, deadline)
            return self._settle_pending(deadline)

    def propose(self, content: FenceContent, deadline: Deadline) -> None:
        """The first half of `append`: make this the record to put next. `settle` puts it.

        Raises as `append` does; then the record is not in the store, and the call may be repeated.
        """
        with self._turn:
            self._propose(content, deadline)

    def settle(self, deadline: Deadline) -> None:
        """The second half of `append`. After Unavailable it may be repeated: the record counts once.

        Any other call may have put the record meanwhile.
        """
        with self._turn:
            self._settle_pending(deadline)

    def append_commit(self, name: str, manifest: str, kept_files: Sequence[str], deadline: Deadline) -> int:
        """Make the commit count: append a FenceCommit after the present state."""
        with self._turn:
            self._settle_pending(deadline)
            self.history.forget_files(kept_files)
            return self.append(self.history.commit_of(name, manifest, kept_files), deadline)

    @property
    def number(self) -> int:
        """Number of the last record that is known here."""
        return self.history.number

    @property
    def undecided(self) -> bool:
        """Whether a record may be in the store or not; the next append finds out."""
        return self._pending is not None

    def check_newest(self, deadline: Deadline) -> None:
        """Raise Superseded where another head has claimed the job; and Unavailable, also where another thread's call
        waits for the store until the deadline."""
        if not self._turn.acquire(timeout=deadline.left_s()):
            raise Unavailable(f"{self._objects.name}: another record waits for an answer")
        try:
            self._settle_pending(deadline)
            if self.catch_up(deadline).generation > self.generation:
                self._newest = self.history.generation
                self._settle_pending(deadline)
        finally:
            self._turn.release()

    def drop_retired(self, names: Sequence[str]) -> None:
        """Forget retired commits whose parts are gone; the next commit's record leaves them out."""
        with self._turn:
            for name in names:
                self.history.retired.pop(name, None)

    def _propose(self, content: FenceContent, deadline: Deadline) -> None:
        if isinstance(content, FenceClaim) and self.history.generation >= self.generation:
            self._newest = self.history.generation
        self._settle_pending(deadline)
        self._pending = FenceRecord(self.generation, uuid.uuid4().hex, content)

    def _settle_pending(self, deadline: Deadline) -> int:
        """Put the pending record until it is known which record has its number."""
        if self._newest:
            raise Superseded(self._objects.name, self.generation, self._newest)
        if (record := self._pending) is None:
            return self.history.number
        number = self.history.number + 1
        found = self._placed(number, record, deadline)
        self._pending = None
        match judge(record, found):
            case Verdict.WON:
                self._take(found)
                return number
            case Verdict.BEHIND:
                self._take(found)
                raise FenceMoved(f"{self._objects.name}: record {number} of generation {found.generation} came first")
            case Verdict.SUPERSEDED:
                self._newest = found.generation
                raise Superseded(self._objects.name, self.generation, self._newest)

    def _placed(self, number: int, record: FenceRecord, deadline: Deadline) -> FenceRecord:
        """The record that has the number after our put."""
        data = encode(record)
        for _ in range(MAX_ROUNDS):
            if self._objects.put_new(number, data, deadline):
                return record
            if (found := self._objects.get(number, deadline)) is not None:
                return decode(number, found)
        raise Unavailable(f"{self._objects.name}: record {number} is neither free nor there")

    def _take(self, record: FenceRecord) -> None:
        self.history.take(self.history.number + 1, record)

    def _begin(self, deadline: Deadline) -> None:
        """Read from the newest commit on: first its state, then the lines of the log before it."""
        tail = self._tail(self._last_number(deadline), deadline)
        if not tail:
            return
        self.history, since = start_of(tail)
        for number, record in self._read_all(range(since, tail[0][0]), deadline):
            self.history.take_lines(number, record.content)
        for _, record in tail:
            self._take(record)

    def _tail(self, last: int, deadline: Deadline) -> list[tuple[int, FenceRecord]]:
        """The records from the newest commit on, or all of them, with their numbers."""
        tail: list[tuple[int, FenceRecord]] = []
        while last > 0:
            first = max(1, last - TAIL_RECORDS + 1)
            tail = [*self._read_all(range(first, last + 1), deadline), *tail]
            commits = [index for index, (_, record) in enumerate(tail) if isinstance(record.content, FenceCommit)]
            if commits:
                return tail[commits[-1] :]
            last = first - 1
        return tail

    def _last_number(self, deadline: Deadline) -> int:
        """The last number in use: doubled until it is free, then halved. Numbers have no gaps."""
        high = 1
        while self._objects.get(high, deadline) is not None:
            high *= 2
        low = high // 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._objects.get(middle, deadline) is not None else (low, middle)
        return low

    def _read_all(self, numbers: range, deadline: Deadline) -> list[tuple[int, FenceRecord]]:
        with ThreadPoolExecutor(READERS, thread_name_prefix="fence") as pool:
            return list(zip(numbers, pool.map(lambda number: self._read(number, deadline), numbers), strict=True))

    def _read(self, number: int, deadline: Deadline) -> FenceRecord:
        data = self._objects.get(number, deadline)
        if data is None:
            raise Unavailable(f"{self._objects.name}: record {number} is gone, and the ones after it are there")
        return decode(number, data)
