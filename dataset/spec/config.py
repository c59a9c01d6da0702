"""The sections of a job file about the stream: what sources share, pipe, slots, sample, dead letters."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from headrace.config import Count, PositiveCount, PositiveDuration, PositiveSize, Section, SlotGroup
from headrace.dataset.spec.counters import CountersSection
from headrace.dataset.spec.event_format import EventFormat
from headrace.dataset.spec.feature_keys import FeatureKeys, FieldPath
from headrace.dataset.spec.row_statistics import StatisticsSection
from headrace.deadline import Deadline
from headrace.text_kinds import TextKind

if TYPE_CHECKING:
    from headrace.dataset.stream.source import Source

MAX_LEN = 1 << 20
"""Upper limit of `max_len`, in signs per sample."""
MAX_HISTORY = 1_000
"""Upper limit of `history.last`, in signs of one key: 8 bytes each in memory, commits and messages."""
MAX_PAIRS = 64
"""Most pairs of one slot."""
MAX_DENSE = 1 << 24
"""Upper limit of a dense slot's size, in floats: 64 MiB per sample."""


class EventTime(Section):
    """Where the time of an event comes from."""

    holds: ClassVar[Mapping[str, TextKind]] = {
        "field": TextKind.NAME,
        "slot": TextKind.NAME,
    }

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


RECORD_CLOCK = "record"
"""The clock of sources whose events have times: time stamps of records, or a field of a file's events."""
READ_AHEAD_BYTES = 512 << 20
"""Bytes of events and samples that a trainer reads ahead, if the job does not say."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """The job and machine for which a source is opened."""

    folder: Path
    """The spec's folder, at which relative paths start."""
    job: str
    """Name of the job: Kafka's group, unless the source has its own."""
    seed: int
    """The job's seed."""
    deadline: Deadline
    """By then it answers, or raises SourceUnavailable."""
    known: Collection[str] | None = ()
    """Names of the partitions that the job found before a restart; None: only segments of a plan are read."""


class SourceSection(Section):
    """Settings common to all kinds of source, and what each kind says of itself; `dataset.sources.kinds` lists them."""

    holds: ClassVar[Mapping[str, TextKind]] = {
        "after": TextKind.NAME,
    }

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

    no_record_times: ClassVar[str] = ""
    """Why its events have no time stamps of their own beside their bytes; empty where they have."""
    faster: ClassVar[str] = ""
    """A way to make reading faster, in words."""
    made_up_times: ClassVar[bool] = False
    """Whether the times of its events are made up, so that no freshness follows from them."""

    @property
    def ends(self) -> bool:
        """Whether the stream ends."""
        return False

    @property
    def skips_null(self) -> bool:
        """Whether events without a value are left out."""
        return False

    @property
    def skips_blank(self) -> bool:
        """Whether events without a byte are left out."""
        return False

    @property
    def first_has_all_fields(self) -> bool:
        """Whether a partition's first event has all fields that any has."""
        return False

    def stream(self, partition: str) -> str:
        """The name of what is read in one order: the partition, unless several are."""
        return partition

    def clock(self, *, merged: bool) -> str:
        """Sources of one clock advance together in event time; "" is its own alone. `merged`: of merged streams."""
        return ""

    def open(self, opening: Opening) -> "Source":
        """The stream, read once whatever `epochs` is.

        Raises SpecError if a setting is wrong or a library is missing, SourceUnavailable without an answer in time.
        """
        raise NotImplementedError

    def check(self, folder: Path, at: str) -> None:
        """Raise SpecError for what this machine lacks. `at`: the path of the section. Nothing is connected to."""

    def check_data(self, opening: Opening) -> None:
        """Raise SpecError where a new job would find no data at once; None where it may still arrive."""

    def local_files(self, folder: Path) -> Iterable[str]:
        """Files below the spec's folder that each machine must have, in order."""
        return ()

    def not_in_pods(self) -> Iterable[tuple[str, str]]:
        """Keys that name something on one machine's disk, and what to do."""
        return ()

    def not_repeated(self) -> Iterable[tuple[str, str]]:
        """Keys by which two runs would not read the same events, and what to do."""
        return ()

    def beside(self, job: str, suffix: str) -> Mapping[str, str]:
        """Keys of a run beside `job`, told apart by `suffix`: it must change nothing that others see of the job."""
        return {}


class RecordedSource(SourceSection):
    """Settings of sources whose events were written by others: files and Kafka."""

    holds: ClassVar[Mapping[str, TextKind]] = {
        "since": TextKind.NAME,
        "until": TextKind.NAME,
    }

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

    holds: ClassVar[Mapping[str, TextKind]] = {
        "command": TextKind.PIPE_COMMAND,
    }

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

    holds: ClassVar[Mapping[str, TextKind]] = {
        "explode": TextKind.NAME,
    }

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

    holds: ClassVar[Mapping[str, TextKind]] = {
        "name": TextKind.NAME,
        "names": TextKind.NAME,
    }

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

    holds: ClassVar[Mapping[str, TextKind]] = {
        "key": TextKind.NAME,
        "of": TextKind.NAME,
        "when": TextKind.NAME,
    }

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

    holds: ClassVar[Mapping[str, TextKind]] = {
        "table": TextKind.NAME,
        "share": TextKind.NAME,
        "pairs": TextKind.NAME,
    }

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
    pairs: Annotated[tuple[tuple[str, str], ...], Field(max_length=MAX_PAIRS)] = ()
    """Set: the job fills this slot with crosses of sparse slots, whatever the pipe is. For each pair of slots, two ids
    of a sample together are one id; of a slot with several ids, the first 32 of a sample are crossed."""
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
        if self.pairs:
            self._only_pairs()
        return self

    def _only_pairs(self) -> None:
        """Raise ValueError for a pair that is none, and for keys that do not go with `pairs`."""
        if self.history is not None or self.weighted or self.padding is not None or self.max_len is not None:
            raise ValueError("pairs do not go with history, weighted, padding or max_len")
        if self.pooling == "none" or self.values != "uint64" or self.share is not None or self.names:
            raise ValueError('pairs need a name of their own, pooling, values = "uint64", and no share')
        if same := [one for one, other in self.pairs if one == other]:
            raise ValueError(f"pairs hold {same[0]!r} with itself")
        if len({frozenset(pair) for pair in self.pairs}) < len(self.pairs):
            raise ValueError("pairs hold one pair twice")


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

    holds: ClassVar[Mapping[str, TextKind]] = {
        "group": TextKind.NAME,
        "weight": TextKind.NAME,
    }

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
