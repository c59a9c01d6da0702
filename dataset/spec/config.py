"""The sections of a job file about the stream: sources, pipe, slots, sample, dead letters."""

import re
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from headrace.blob.store_address import StoreKind, parse
from headrace.config import Count, Duration, PositiveCount, PositiveDuration, PositiveSize, Section, SlotGroup
from headrace.dataset.spec.counters import CountersSection
from headrace.dataset.spec.event_format import EventFormat
from headrace.dataset.spec.feature_keys import FeatureKeys, FieldPath
from headrace.dataset.spec.file_formats import format_of_name
from headrace.dataset.spec.path_pattern import PathPattern, Pattern
from headrace.dataset.spec.row_statistics import StatisticsSection
from headrace.secrets import Options

MAX_LEN = 1 << 20
"""Upper limit of `max_len`, in signs per sample."""
MAX_HISTORY = 1_000
"""Upper limit of `history.last`, in signs of one key: 8 bytes each in memory, commits and messages."""
MAX_DENSE = 1 << 24
"""Upper limit of a dense slot's size, in floats: 64 MiB per sample."""
MAX_SIMULATED_EVENTS = 100_000_000_000
"""Upper limit of a simulated stream's events; their times in milliseconds fit 63 bits."""
MAX_ALIVE = 1 << 32
"""Upper limit of users or items alive at a time in a simulated stream."""
LAST_UNIX_TIME_S = 253_402_300_799
"""The last second of the year 9999."""


class EventTime(Section):
    """Where the time of an event comes from."""

    field: str | None = None
    """Name of a field of JSON events, or its path: "meta.ts" is field "ts" of field "meta". It holds a number, as text
    too, or an ISO time, in UTC if it names no offset."""
    slot: str | None = None
    """Name of a meta slot."""
    kind: Literal["record", "none"] | None = None
    """"record": the source's own time stamp; "none": events have no time."""
    unit: Literal["s", "ms", "us"] = "s"
    """Unit of a number in the field or slot."""

    @model_validator(mode="after")
    def _one_of(self) -> "EventTime":
        if sum(value is not None for value in (self.field, self.slot, self.kind)) != 1:
            raise ValueError('needs exactly one of field = "...", slot = "..." or kind = "record" | "none"')
        return self


OVERLAP_S = 3600.0
"""Default of a Kafka source's `overlap`."""
READ_AHEAD_BYTES = 512 << 20
"""Bytes of events and samples that a trainer reads ahead, if the job does not say."""
FIELD_SEPARATOR = "."
"""Between the names of a path: "user.id" is field "id" of field "user"."""
MAX_EPOCHS = 100
"""Upper limit of `epochs`: each epoch adds its own partitions to log and commits."""
MAX_SOURCES = 16
"""Most sources of a job."""


def unix_us(text: str) -> int:
    """An ISO time with offset in microseconds since 1970. Raises ValueError."""
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError("must be a time like 2024-05-01T00:00:00+00:00") from None
    if when.tzinfo is None:
        raise ValueError("a time needs its offset, for example 2024-05-01T00:00:00+00:00")
    since_epoch = when - datetime(1970, 1, 1, tzinfo=UTC)
    return since_epoch // timedelta(microseconds=1)


class SourceSection(Section):
    """Settings common to all kinds of source."""

    after: str | None = None
    """Name of another source of the job, which must have an end: this one begins when all events of that one are in
    passes. Unset: the sources of a job advance together."""

    event_time: EventTime = EventTime(kind="none")
    """Event time; without one, the day does not advance."""
    max_event_bytes: PositiveSize = 1 << 20
    """A longer event is rejected."""
    epochs: int = Field(default=1, ge=1, le=MAX_EPOCHS)
    """How many times the source is read, one epoch after another; more than one needs a source that ends. A source that
    comes `after` this one begins when the last epoch is in passes. Metrics are those of the first epoch, since later
    ones predict what was learnt already; see docs/warm-up.md."""
    on_gap: Literal["fail", "earliest", "latest"] = "fail"
    """If a position is no longer retained: stop, or continue at the first or last one; losses are counted."""


class RecordedSource(SourceSection):
    """Settings of sources whose events were written by others: files and Kafka."""

    since: str | None = None
    """Only events of this time or later, by their event time: an ISO time with offset. Others are left out and
    counted."""
    until: str | None = None
    """Only events before this time, by their event time: an ISO time with offset. Others are left out and counted."""

    @field_validator("since", "until")
    @classmethod
    def _is_time(cls, value: str | None) -> str | None:
        if value is not None:
            unix_us(value)
        return value

    @model_validator(mode="after")
    def _knows_times(self) -> "RecordedSource":
        if self.since is None and self.until is None:
            return self
        if self.event_time.slot is not None or self.event_time.kind == "none":
            raise ValueError(
                "since and until need the event's own time, before the pipe: set event_time to a field of the events, "
                'or to kind = "record" for Kafka'
            )
        if self.since is not None and self.until is not None and unix_us(self.since) >= unix_us(self.until):
            raise ValueError(f"no event is at or after since = {self.since} and before until = {self.until}")
        return self


class FileFormat(StrEnum):
    """Content of the files of a source."""

    LINES = "lines"
    PARQUET = "parquet"


class FilesSource(RecordedSource):
    """Lines of files, plain or gzip, or rows of Parquet files. All files are one stream, read one after another,
    ordered by the pattern's fields, then by name."""

    kind: Literal["files"]
    """Files."""
    paths: Annotated[tuple[PathPattern, ...], Field(min_length=1, max_length=10_000)]
    """Globs or templates such as "logs/{day}/{hour}/*.jsonl", relative to `root`. Wildcards skip names that begin with
    "." or "_", such as "_temporary": write these out. "_day=7" is a folder like others."""
    root: str | None = Field(default=None, max_length=4096)
    """Where `paths` begin, if the files are in an object store: "s3://bucket/prefix", with options and credentials as
    for `store.mirror`. Unset: the spec's folder."""
    format: FileFormat = FileFormat.LINES
    """"lines": each line is an event; "parquet": each row is one, as JSON text."""
    columns: Annotated[tuple[str, ...], Field(max_length=10_000)] = ()
    """Parquet: the columns that events have; others are not read. Unset: all."""
    timestamps: Literal["s", "ms", "us", "iso"] = "ms"
    """Parquet: what a timestamp becomes: a whole number of seconds, milliseconds or microseconds since 1970, rounded
    down, or ISO text."""
    partition_by: str | None = Field(default=None, max_length=256)
    """Field of the paths that separates parallel partitions, for example "{shard}": the files with one value are one
    stream in order, and the streams advance together. Unset: all files are one stream."""
    follow: bool = False
    """Wait for more lines and new files."""
    ready: str | None = None
    """Marker file, for example "_SUCCESS": a folder's files are read, in order, once the marker exists."""
    poll: Duration = 1.0
    """Pause between two looks at followed files."""
    blank_lines: Literal["skip", "read"] = "skip"
    """Lines without a byte: "skip" leaves them out and counts them; "read" makes each an event."""

    @field_validator("root")
    @classmethod
    def _is_address(cls, value: str | None) -> str | None:
        if value is not None and parse(value).kind is not StoreKind.S3:
            raise ValueError('is not the address of an object store, "s3://bucket/prefix"; write folders in paths')
        return value

    @model_validator(mode="after")
    def _fits_format(self) -> "FilesSource":
        if self.format is FileFormat.LINES and (self.columns or self.timestamps != "ms"):
            key = "columns" if self.columns else "timestamps"
            raise ValueError(f'{key} has no effect on lines; set format = "parquet", or leave it out')
        if self.root is not None and (bad := next((path for path in self.paths if path.startswith("/")), None)):
            raise ValueError(f'paths are relative to root; "{bad}" begins with a slash')
        return self

    @model_validator(mode="after")
    def _holds_lines(self) -> "FilesSource":
        for number, path in enumerate(self.paths if self.format is FileFormat.LINES else ()):
            if (other := format_of_name(path)) is not None:
                raise ValueError(f'paths.{number}, "{path}", has no lines: it is {other}')
        return self

    @model_validator(mode="after")
    def _has_field(self) -> "FilesSource":
        if self.partition_by is None:
            return self
        if [f"{{{field}}}" for field in Pattern(self.partition_by).fields] != [self.partition_by]:
            raise ValueError(
                f'partition_by = "{self.partition_by}" is not a field; write it as in paths, like "{{shard}}"'
            )
        for number, path in enumerate(self.paths):
            if self.partition_by.strip("{}") not in Pattern(path).fields:
                raise ValueError(f'partition_by = "{self.partition_by}" is not in paths.{number}, "{path}"')
        return self


class KafkaLibrary(StrEnum):
    """The library that reads Kafka's records."""

    LIBRDKAFKA = "librdkafka"
    KAFKA_PYTHON = "kafka-python"


class KafkaSource(RecordedSource):
    """Records of Kafka topics; each Kafka partition is a partition of the source."""

    kind: Literal["kafka"]
    """Kafka."""
    topics: Annotated[tuple[str, ...], Field(min_length=1)]
    """Topics; all partitions of each are read."""
    options: Options = {}
    """Options of the consumer by kafka-python's names: bootstrap_servers, security_protocol, sasl_*, ssl_*, ...

    Secrets may be references: sasl_plain_password = { env = "NAME" } or { file = "path" }."""
    library: KafkaLibrary | None = None
    """"librdkafka" or "kafka-python"; both read the same events. Unset: librdkafka, several times as fast, where it is
    installed and knows all `options`."""
    group: str | None = None
    """Group id under which lag tools see the positions; default: the job's name."""
    start: str = "earliest"
    """"earliest", "latest", "group" (the group's committed offsets) or an ISO time with offset. With `since`, it is
    left out: reading starts `overlap` before that time."""
    overlap: Duration = OVERLAP_S
    """With `since`: how much earlier, by the time stamps of records, reading starts. No event is lost whose record is
    stamped at most this much before the event's time."""
    end: str = "never"
    """"never", "latest" (the offsets at start, or for a finished job at its next start) or an ISO time with
    offset. All except "never" make the source bounded."""
    connect_deadline: PositiveDuration = 30.0
    """Longest time for the broker to answer at start."""
    null_values: Literal["skip", "reject"] = "skip"
    """Records with a null value, the tombstones of a compacted topic: "skip" leaves them out and counts them; "reject"
    treats each as a bad event."""

    @field_validator("start", "end")
    @classmethod
    def _known(cls, value: str, info: Any) -> str:
        words = ("earliest", "latest", "group") if info.field_name == "start" else ("never", "latest")
        if value not in words:
            try:
                unix_us(value)
            except ValueError as error:
                raise ValueError(f"is not one of {', '.join(words)}, and otherwise {error}") from None
        return value

    @model_validator(mode="after")
    def _starts_once(self) -> "KafkaSource":
        if self.since is not None and self.start != "earliest":
            raise ValueError("start and since both say where reading starts; leave start out")
        if self.since is None and self.overlap != OVERLAP_S:
            raise ValueError("overlap has an effect with since only; set since, or leave it out")
        return self


class SimulatedSource(SourceSection):
    """A synthetic click stream: users whose tastes drift, items that appear and disappear; seeded."""

    kind: Literal["simulated"]
    """Simulated."""
    events: int | None = Field(default=None, ge=1, le=MAX_SIMULATED_EVENTS)
    """Number of events; unset: the stream never ends."""
    rate: float = Field(default=0.0, ge=0, le=1e9)
    """Events per second of wall time; 0 = as fast as they are read (bounded sources only)."""
    since: float | None = Field(default=None, ge=0, le=LAST_UNIX_TIME_S)
    """Unix time of the first event's arrival, so that several jobs see one stream; default: when the source opens."""
    partitions: int = Field(default=4, ge=1, le=256)
    """Number of partitions."""
    users: int = Field(default=10_000, ge=1, le=MAX_ALIVE)
    """Users alive at any time."""
    items: int = Field(default=2_000, ge=10, le=MAX_ALIVE)
    """Items alive at any time."""
    item_life: int = Field(default=200_000, ge=1, le=MAX_SIMULATED_EVENTS)
    """Average number of events during which an item is alive."""
    shown: int = Field(default=5, ge=1, le=100)
    """Items shown by an event; one sample each."""
    drift: float = Field(default=1.0, ge=0, le=1e6)
    """How fast tastes change; 0 = never."""

    @model_validator(mode="after")
    def _arrives(self) -> "SimulatedSource":
        if self.events is None and not self.rate:
            raise ValueError("a stream without an end needs a rate: set rate = 10000, or events = 100000")
        return self

    @model_validator(mode="after")
    def _numbers_fit(self) -> "SimulatedSource":
        """Numbers of users and items grow with each life; the greatest must fit 63 bits."""
        lives = 2 * (self.events or MAX_SIMULATED_EVENTS) // self.item_life + 2
        if max(self.users, self.items) * lives >= 1 << 62:
            raise ValueError("numbers of users or items exceed 63 bits: raise item_life, or lower users and items")
        return self


AnySource = Annotated[FilesSource | KafkaSource | SimulatedSource, Field(discriminator="kind")]


class Protocol(StrEnum):
    """The protocol of the pipe command."""

    MULTISLOT = "multislot"
    ARROW = "arrow"


class OnBadEvent(StrEnum):
    """Treatment of a rejected event."""

    FAIL = "fail"
    SKIP = "skip"
    DEAD_LETTER = "dead_letter"


class DeadLettersSection(Section):
    """The part of rejected events that is kept."""

    keep_bytes: bool = True
    """Keep the event itself (base64); false for private data."""
    max_per_pass: Count = 10_000
    """Most dead letters written per pass and rank; the others are only counted."""
    keep_passes: PositiveCount = 1_000
    """Number of files kept; older ones are deleted at a close."""


class PipeSettings(Section):
    """Settings common to all kinds of pipe."""

    processes: int = Field(default=1, ge=1, le=64)
    """Number of processes (kind "columns": of threads) in each trainer."""
    batch_events: int = Field(default=1024, ge=1, le=65536)
    """Events per request of the arrow protocol, or per block of kind "columns"."""
    on_bad_event: OnBadEvent = OnBadEvent.DEAD_LETTER
    """"fail", "skip" or "dead_letter"."""
    max_bad_fraction: float = Field(default=0.01, ge=0, le=1)
    """The job stops above this fraction of rejected events, over the last 10,000 events, never before 1,000."""
    dead_letters: DeadLettersSection = DeadLettersSection()
    """The part of rejected events that is kept."""


class PipeSection(PipeSettings):
    """The program that turns events into samples."""

    kind: Literal["command"] = "command"
    """A program; the default."""
    command: Annotated[tuple[str, ...], Field(min_length=1)]
    """Program and arguments, run in the spec's folder; `python` is Headrace's own interpreter. No shell."""
    protocol: Protocol = Protocol.MULTISLOT
    """"multislot" text or "arrow" IPC."""
    tries: int = Field(default=3, ge=1, le=10)
    """Number of tries for a failing segment before the job stops."""
    deadline: PositiveDuration = 60.0
    """A command that neither reads nor writes for this time is killed."""
    extra: Literal["fail", "drop"] = "fail"
    """Treatment of columns that are not slots: "fail"; or "drop", so that one generator serves several specs."""

    @property
    def traced(self) -> bool:
        """Whether samples can be traced to their events."""
        return self.protocol is Protocol.ARROW


class ColumnsPipe(PipeSettings, EventFormat):
    """Samples from events by the keys of the slots, without a program."""

    kind: Literal["columns"]
    """Columns."""
    explode: FieldPath | None = None
    """A list of the event: each of its elements is a sample. Unset: each event is one."""

    @property
    def traced(self) -> bool:
        """Whether samples can be traced to their events."""
        return True


def _pipe_kind(value: Any) -> str:
    kind = value.get("kind", "command") if isinstance(value, dict) else getattr(value, "kind", None)
    return f"tag:{kind}"


AnyPipe = Annotated[
    Annotated[PipeSection, Tag("tag:command")] | Annotated[ColumnsPipe, Tag("tag:columns")],
    Discriminator(
        _pipe_kind, custom_error_type="pipe_kind", custom_error_message='kind is one of "command", "columns"'
    ),
]


class SlotKind(StrEnum):
    """Content of a slot."""

    SPARSE = "sparse"
    DENSE = "dense"
    META = "meta"


class SlotEntry(FeatureKeys):
    """Settings common to all kinds of slot: names; `C{1..26}` is a range."""

    name: str | None = None
    """One name."""
    names: tuple[str, ...] = ()
    """Several names."""

    @model_validator(mode="after")
    def _named(self) -> "SlotEntry":
        if (self.name is None) == (not self.names):
            raise ValueError('needs either name = "..." or names = ["...", ...]')
        self.expanded()
        return self

    def expanded(self) -> list[str]:
        """All names, with ranges expanded."""
        return [name for pattern in ((self.name,) if self.name else self.names) for name in expand(pattern)]


class HistorySection(Section):
    """A slot that the job fills itself: the last signs of another slot among earlier samples with the same key.

    The pipe does not emit such a slot. A sample sees the samples of earlier events, in the order of the log, and none
    of its own event. A sample without a key has an empty history."""

    key: str
    """Sparse slot whose first sign is the key, for example "user"."""
    of: str
    """Sparse slot whose signs are remembered, for example "article"."""
    last: int = Field(ge=1, le=MAX_HISTORY)
    """Number of signs that are remembered for each key; the oldest is dropped for a new one."""
    when: str | None = None
    """Meta slot, for example "click": samples in which it is 0 or missing are not remembered. Unset: all are."""
    delete_after_days: int | None = Field(default=None, ge=0, le=1_000_000)
    """Histories without a new sign for more days are deleted at a day's tick. Unset: they are kept, so that memory
    grows with the number of keys."""


class SparseSlot(SlotEntry):
    """Signs (feature ids): 0..n per sample."""

    kind: Literal["sparse"] = "sparse"
    """Sparse."""
    table: str = "default"
    """The table of its rows."""
    pooling: Literal["sum", "mean", "sqrtn", "none"] = "sum"
    """How several rows are combined into one vector; "none" gives the model the padded sequence and its mask."""
    values: Literal["uint64", "string"] = "uint64"
    """Decimal numbers, or text, which is hashed."""
    share: str | None = None
    """Slots with the same share group share rows."""
    padding: int | None = Field(default=None, ge=0, lt=1 << 64)
    """A sign that means "no feature"; it is dropped and counted."""
    max_len: int | None = Field(default=None, ge=1, le=MAX_LEN)
    """Most signs kept per sample; the others are dropped and counted. Required by pooling = "none"."""
    keep: Literal["head", "tail"] = "head"
    """Which end of the signs is kept."""
    weighted: bool = False
    """Whether signs carry weights (arrow protocol: column "<slot>.weight")."""
    history: HistorySection | None = None
    """Set: the job fills this slot with what it remembers of earlier samples; see HistorySection. Its table, `values`
    and, unless set, `share` are those of the slot `of`, and max_len is `last`."""
    group: SlotGroup | None = None
    """Number that makes the keys of its rows; of several names, that of the first one. Unset: by the order of the
    slots. A job file needs it nowhere: when slots are removed or change places, Headrace writes it into the logged
    spec, so that every slot keeps its rows."""

    @model_validator(mode="after")
    def _sequence(self) -> "SparseSlot":
        if self.history is not None and self.max_len is None:
            object.__setattr__(self, "max_len", self.history.last)  # the model is frozen once it is checked
        if self.pooling == "none" and self.max_len is None:
            raise ValueError('pooling = "none" needs max_len')
        if self.history is not None and self.max_len != self.history.last:
            raise ValueError(f"max_len = {self.max_len} is not history.last = {self.history.last}; leave max_len out")
        if self.history is not None and (self.weighted or self.padding is not None or self.keep != "head"):
            raise ValueError("a history has no weighted, padding or keep: set them for the slot that it remembers")
        return self


class DenseSlot(SlotEntry):
    """A fixed number of floats per sample."""

    kind: Literal["dense"]
    """Dense."""
    size: int = Field(default=1, ge=1, le=MAX_DENSE)
    """Number of floats; of counters and statistics, set by them."""
    counters: CountersSection | None = None
    """Set: the job fills this slot with what it counted in earlier samples; see CountersSection."""
    statistics: StatisticsSection | None = None
    """Set: the job fills this slot with shows and clicks of rows; see StatisticsSection."""

    @model_validator(mode="after")
    def _sized(self) -> "DenseSlot":
        if self.counters is not None and self.statistics is not None:
            raise ValueError("counters and statistics are two slots: give each its own entry")
        if (filled := self.counters or self.statistics) is not None and self.size != filled.size:
            if "size" in self.model_fields_set:
                what = "statistics" if self.counters is None else "counters"
                raise ValueError(f"size = {self.size} is not the {filled.size} numbers of {what}; leave it out")
            object.__setattr__(self, "size", filled.size)  # the model is frozen once it is checked
        return self


class MetaSlot(SlotEntry):
    """Values that the model does not get: labels, groups, weights, masks, times. One value per sample."""

    kind: Literal["meta"]
    """Meta."""
    type: Literal["float", "uint64", "string", "int64"] = "float"
    """Type of the value."""


class RemovedSlot(SlotEntry):
    """A sparse slot that the job had before. Its number stays taken, so that no other slot reads its rows. Headrace
    writes such entries into the logged spec; a job file needs none."""

    kind: Literal["removed"]
    """Removed."""
    group: SlotGroup
    """Number of its rows; see sparse slots."""


def _slot_kind(value: Any) -> str:
    kind = value.get("kind", "sparse") if isinstance(value, dict) else getattr(value, "kind", None)
    return f"tag:{kind}"


AnySlot = Annotated[
    Annotated[SparseSlot, Tag("tag:sparse")]
    | Annotated[DenseSlot, Tag("tag:dense")]
    | Annotated[MetaSlot, Tag("tag:meta")]
    | Annotated[RemovedSlot, Tag("tag:removed")],
    Discriminator(
        _slot_kind, custom_error_type="slot_kind", custom_error_message='kind is one of "sparse", "dense", "meta"'
    ),
]


class SampleSection(Section):
    """Slots that describe the sample itself."""

    group: str | None = None
    """Slot with the sample's group, for example its impression."""
    weight: str | None = None
    """Meta slot with the sample's weight; unset: 1."""


def expand(pattern: str) -> list[str]:
    """Names of a pattern: "C{1..3}" is C1, C2, C3; a name without braces is itself. Raises ValueError."""
    match = re.fullmatch(r"([^{}]*)\{(\d+)\.\.(\d+)\}([^{}]*)", pattern)
    if match is None:
        if not re.fullmatch(r"[A-Za-z_][\w.-]*", pattern):
            raise ValueError(f"{pattern!r} is not a name of a slot; a range is written C{{1..26}}")
        return [pattern]
    first, last = int(match[2]), int(match[3])
    if last < first or last - first > 10_000:
        raise ValueError(f"{pattern!r} is not a rising range of at most 10,000")
    return [f"{match[1]}{number}{match[4]}" for number in range(first, last + 1)]
