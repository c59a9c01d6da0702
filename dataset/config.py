"""What a user writes about the stream: sources, pipe, slots, sample, dead letters."""

import re
from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from dataset.paths import PathPattern, Pattern
from millrace.config import Count, Duration, PositiveCount, PositiveDuration, PositiveSize, Section
from millrace.secrecy import Options

MAX_LEN = 1 << 20
"""The most signs of a sample that `max_len` may keep."""
MAX_DENSE = 1 << 24
"""The most floats of a dense slot: 64 MiB a sample."""
MAX_SIMULATED_EVENTS = 100_000_000_000
"""The most events of a simulated stream: their times in milliseconds fit 63 bits."""
MAX_ALIVE = 1 << 32
"""The most users or items that are alive at a time in a simulated stream."""
LAST_UNIX_TIME_S = 253_402_300_799
"""The last second of the year 9999."""


class EventTime(Section):
    """Where an event's time comes from."""

    field: str | None = None
    """Name of a field of a JSON event."""
    slot: str | None = None
    """Name of a meta slot."""
    kind: Literal["record", "none"] | None = None
    """"record": the source's own time stamp; "none": events have no time."""
    unit: Literal["s", "ms", "us"] = "s"
    """Unit of the field or slot."""

    @model_validator(mode="after")
    def _one_of(self) -> "EventTime":
        if sum(value is not None for value in (self.field, self.slot, self.kind)) != 1:
            raise ValueError('needs exactly one of field = "...", slot = "..." or kind = "record" | "none"')
        return self


class SourceSection(Section):
    """What all kinds of source share."""

    event_time: EventTime = EventTime(kind="none")
    """Event time; without one the day stands still."""
    max_event_bytes: PositiveSize = 1 << 20
    """A longer event is bad."""
    on_gap: Literal["fail", "earliest", "latest"] = "fail"
    """What happens when a position is no longer retained: stop, or go on at the first or last one; it is counted."""


class FilesSource(SourceSection):
    """Lines of files, plain or gzip. All files are one stream: read one after another, by the pattern's fields, then by
    name."""

    kind: Literal["files"]
    """Files."""
    paths: Annotated[tuple[PathPattern, ...], Field(min_length=1, max_length=10_000)]
    """Globs or templates such as "logs/{day}/{hour}/*.jsonl", relative to the spec's folder."""
    partition_by: str | None = Field(default=None, max_length=256)
    """Field of the paths that tells parallel partitions apart, for example "{shard}": the files of one value are one
    stream in order, and streams of different values advance together. Unset: all files are one stream."""
    follow: bool = False
    """Wait for more lines and new files."""
    ready: str | None = None
    """Marker file, for example "_SUCCESS": a folder's files are read, in order, once it is there."""
    poll: Duration = 1.0
    """How often followed files are looked at."""

    @model_validator(mode="after")
    def _has_field(self) -> "FilesSource":
        if self.partition_by is None:
            return self
        if [f"{{{field}}}" for field in Pattern(self.partition_by).fields] != [self.partition_by]:
            raise ValueError(
                f'partition_by = "{self.partition_by}" is no field; write it as in paths, like "{{shard}}"'
            )
        for number, path in enumerate(self.paths):
            if self.partition_by.strip("{}") not in Pattern(path).fields:
                raise ValueError(f'partition_by = "{self.partition_by}" does not stand in paths.{number}, "{path}"')
        return self


class KafkaSource(SourceSection):
    """Records of Kafka topics: one partition of ours a partition of theirs."""

    kind: Literal["kafka"]
    """Kafka."""
    topics: Annotated[tuple[str, ...], Field(min_length=1)]
    """Topics, all partitions of each."""
    options: Options = {}
    """Options of kafka-python's consumer by its own names: bootstrap_servers, security_protocol, sasl_*, ssl_*, ...

    Secrets may be references: sasl_plain_password = { env = "NAME" } or { file = "path" }."""
    group: str | None = None
    """Group id under which positions are shown to lag tools; the job's name unless set."""
    start: str = "earliest"
    """"earliest", "latest", "group" (the group's committed offsets) or an ISO time with offset."""
    end: str = "never"
    """"never", "latest" (the offsets at start, or for a finished job at its next start) or an ISO time with
    offset; all but never make the source bounded."""
    connect_deadline: PositiveDuration = 30.0
    """How long the broker may take to answer at start."""

    @field_validator("start", "end")
    @classmethod
    def _known(cls, value: str, info: Any) -> str:
        words = ("earliest", "latest", "group") if info.field_name == "start" else ("never", "latest")
        if value not in words:
            try:
                when = datetime.fromisoformat(value)
            except ValueError:
                raise ValueError(f"is none of {', '.join(words)}, nor a time like 2024-05-01T00:00:00+00:00") from None
            if when.tzinfo is None:
                raise ValueError("a time needs its offset, for example 2024-05-01T00:00:00+00:00")
        return value


class SimulatedSource(SourceSection):
    """A made-up click stream: users with tastes that drift, items that are born and die; seeded."""

    kind: Literal["simulated"]
    """Simulated."""
    events: int | None = Field(default=None, ge=1, le=MAX_SIMULATED_EVENTS)
    """How many events; without it the stream never ends."""
    rate: float = Field(default=0.0, ge=0, le=1e9)
    """Events a second of wall time; 0 = as fast as they are read (bounded sources only)."""
    since: float | None = Field(default=None, ge=0, le=LAST_UNIX_TIME_S)
    """Unix time at which the first event arrived, so that several jobs see one stream; unless set, at the opening."""
    partitions: int = Field(default=4, ge=1, le=256)
    """Partitions."""
    users: int = Field(default=10_000, ge=1, le=MAX_ALIVE)
    """Users alive at any time."""
    items: int = Field(default=2_000, ge=10, le=MAX_ALIVE)
    """Items alive at any time."""
    item_life: int = Field(default=200_000, ge=1, le=MAX_SIMULATED_EVENTS)
    """Events from an item's birth to its death, on average."""
    shown: int = Field(default=5, ge=1, le=100)
    """Items an event shows: one sample each."""
    drift: float = Field(default=1.0, ge=0, le=1e6)
    """How fast tastes change; 0 = never."""

    @model_validator(mode="after")
    def _arrives(self) -> "SimulatedSource":
        if self.events is None and not self.rate:
            raise ValueError("a stream without an end arrives at a rate: set rate = 10000, or events = 100000")
        return self

    @model_validator(mode="after")
    def _numbers_fit(self) -> "SimulatedSource":
        """A place's next user or item gets the next number: the greatest must fit 63 bits."""
        lives = 2 * (self.events or MAX_SIMULATED_EVENTS) // self.item_life + 2
        if max(self.users, self.items) * lives >= 1 << 62:
            raise ValueError("numbers of users or items exceed 63 bits: raise item_life, or lower users and items")
        return self


AnySource = Annotated[FilesSource | KafkaSource | SimulatedSource, Field(discriminator="kind")]


class Protocol(StrEnum):
    """How the pipe command is spoken to."""

    MULTISLOT = "multislot"
    ARROW = "arrow"


class OnBadEvent(StrEnum):
    """What happens to an event that yields no valid sample."""

    FAIL = "fail"
    SKIP = "skip"
    DEAD_LETTER = "dead_letter"


class DeadLettersSection(Section):
    """What is kept of rejected events."""

    keep_bytes: bool = True
    """Keep the event itself (base64); false for private data."""
    max_per_pass: Count = 10_000
    """Dead letters written per pass and rank; more are only counted."""
    keep_passes: PositiveCount = 1_000
    """Files kept; older ones are deleted at a close."""


class PipeSection(Section):
    """The program that turns events into samples."""

    command: Annotated[tuple[str, ...], Field(min_length=1)]
    """Program and arguments, run in the spec's folder; `python` is Millrace's own interpreter. No shell."""
    protocol: Protocol = Protocol.MULTISLOT
    """"multislot" text or "arrow" IPC."""
    processes: int = Field(default=1, ge=1, le=64)
    """How many run side by side in each trainer."""
    tries: int = Field(default=3, ge=1, le=10)
    """How often a failing segment is tried before the job stops."""
    deadline: PositiveDuration = 60.0
    """A command that reads and writes nothing for so long is killed."""
    batch_events: int = Field(default=1024, ge=1, le=65536)
    """Events a request of the arrow protocol."""
    on_bad_event: OnBadEvent = OnBadEvent.DEAD_LETTER
    """"fail", "skip" or "dead_letter"."""
    extra: Literal["fail", "drop"] = "fail"
    """What happens to columns that are no slots: "fail", or "drop", so that one generator serves several specs."""
    max_bad_fraction: float = Field(default=0.01, ge=0, le=1)
    """The job stops above it, measured over the last 10,000 events, never before 1,000."""
    dead_letters: DeadLettersSection = DeadLettersSection()
    """What is kept of rejected events."""


class SlotKind(StrEnum):
    """What a slot holds."""

    SPARSE = "sparse"
    DENSE = "dense"
    META = "meta"


class SlotEntry(Section):
    """What all kinds of slot share: names; `C{1..26}` is a range."""

    name: str | None = None
    """One name."""
    names: tuple[str, ...] = ()
    """Several."""

    @model_validator(mode="after")
    def _named(self) -> "SlotEntry":
        if (self.name is None) == (not self.names):
            raise ValueError('needs either name = "..." or names = ["...", ...]')
        self.expanded()
        return self

    def expanded(self) -> list[str]:
        """All names, ranges written out."""
        return [name for pattern in ((self.name,) if self.name else self.names) for name in expand(pattern)]


class SparseSlot(SlotEntry):
    """Signs: 0..n a sample."""

    kind: Literal["sparse"] = "sparse"
    """Sparse."""
    table: str = "default"
    """The table that holds its rows."""
    pooling: Literal["sum", "mean", "sqrtn", "none"] = "sum"
    """How several rows become one vector; "none" gives the model the padded sequence and its mask."""
    values: Literal["uint64", "string"] = "uint64"
    """Decimal signs, or text that is hashed."""
    share: str | None = None
    """Slots of one share group share rows."""
    padding: int | None = Field(default=None, ge=0, lt=1 << 64)
    """A sign that means "no feature"; dropped and counted."""
    max_len: int | None = Field(default=None, ge=1, le=MAX_LEN)
    """Signs kept of a sample; what is cut is counted. Needed by pooling = "none"."""
    keep: Literal["head", "tail"] = "head"
    """Which signs are kept."""
    weighted: bool = False
    """Whether signs carry weights (arrow protocol: column "<slot>.weight")."""

    @model_validator(mode="after")
    def _sequence(self) -> "SparseSlot":
        if self.pooling == "none" and self.max_len is None:
            raise ValueError('pooling = "none" needs max_len')
        return self


class DenseSlot(SlotEntry):
    """A fixed number of floats a sample."""

    kind: Literal["dense"]
    """Dense."""
    size: int = Field(default=1, ge=1, le=MAX_DENSE)
    """How many."""


class MetaSlot(SlotEntry):
    """Carried, not fed to the model: labels, groups, weights, masks, times. One value a sample."""

    kind: Literal["meta"]
    """Meta."""
    type: Literal["float", "uint64", "string", "int64"] = "float"
    """Type of the value."""


def _slot_kind(value: Any) -> str:
    kind = value.get("kind", "sparse") if isinstance(value, dict) else getattr(value, "kind", None)
    return f"tag:{kind}"


AnySlot = Annotated[
    Annotated[SparseSlot, Tag("tag:sparse")]
    | Annotated[DenseSlot, Tag("tag:dense")]
    | Annotated[MetaSlot, Tag("tag:meta")],
    Discriminator(
        _slot_kind, custom_error_type="slot_kind", custom_error_message='kind is one of "sparse", "dense", "meta"'
    ),
]


class SampleSection(Section):
    """Which slots say something about the sample itself."""

    group: str | None = None
    """Slot that names a sample's group, for example its impression."""
    weight: str | None = None
    """Meta slot with the sample's weight; 1 without it."""


def expand(pattern: str) -> list[str]:
    """Names of a pattern: "C{1..3}" is C1, C2, C3; a name without braces is itself."""
    match = re.fullmatch(r"([^{}]*)\{(\d+)\.\.(\d+)\}([^{}]*)", pattern)
    if match is None:
        if not re.fullmatch(r"[A-Za-z_][\w.-]*", pattern):
            raise ValueError(f"{pattern!r} is no name of a slot; a range is written C{{1..26}}")
        return [pattern]
    first, last = int(match[2]), int(match[3])
    if last < first or last - first > 10_000:
        raise ValueError(f"{pattern!r} is not a rising range of at most 10,000")
    return [f"{match[1]}{number}{match[4]}" for number in range(first, last + 1)]


def check_names(entries: Sequence[SlotEntry]) -> None:
    """Raise ValueError where a slot is declared twice."""
    seen: set[str] = set()
    for entry in entries:
        for name in entry.expanded():
            if name in seen:
                raise ValueError(f"slot {name!r} is declared twice")
            seen.add(name)
