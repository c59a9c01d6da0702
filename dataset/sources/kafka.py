"""The section of a Kafka source, and what it says of itself. Needs no library of Kafka.

dataset.sources.kafka_source reads the stream, dataset.sources.kafka_options checks the options of its libraries.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator
from typing_extensions import override

from headrace.config import Duration, PositiveDuration
from headrace.dataset.sources.kafka_options import FILE_OPTIONS, KafkaLibrary, consumer_options, library_of
from headrace.dataset.spec.config import RECORD_CLOCK, Opening, RecordedSource, unix_us
from headrace.dataset.stream.source import Source
from headrace.extras import require
from headrace.secrets import Options
from headrace.text_kinds import TextKind

OVERLAP_S = 3600.0
"""Default of a Kafka source's `overlap`."""


class KafkaSource(RecordedSource):
    """Records of Kafka topics; each Kafka partition is a partition of the source."""

    holds: ClassVar[Mapping[str, TextKind]] = {
        "topics": TextKind.NAME,
        "options": TextKind.KAFKA_OPTIONS,
        "group": TextKind.NAME,
        "start": TextKind.NAME,
        "end": TextKind.NAME,
    }

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

    @property
    @override
    def ends(self) -> bool:
        return self.end != "never"

    @property
    @override
    def skips_null(self) -> bool:
        return self.null_values == "skip"

    @override
    def clock(self, *, merged: bool) -> str:
        return RECORD_CLOCK

    @override
    def open(self, opening: Opening) -> Source:
        require("kafka", "a source of Kafka", "sources.*.kind")
        from headrace.dataset.sources.kafka_source import KafkaStream  # late: it needs the library

        return KafkaStream(self, job=opening.job, folder=opening.folder, deadline=opening.deadline)

    @override
    def check(self, folder: Path, at: str) -> None:
        consumer_options(self.options, folder, f"{at}.options")
        require("kafka", "a source of Kafka", f"{at}.kind")
        library_of(self.library, self.options, at)

    @override
    def not_in_pods(self) -> Iterable[tuple[str, str]]:
        for key in FILE_OPTIONS:
            if key in self.options:
                yield f"options.{key}", "names a file, which a pod does not have"

    @override
    def not_repeated(self) -> Iterable[tuple[str, str]]:
        if self.start == "group":
            yield "start", 'is "group", which moves while the job runs; give a time'
        if self.start == "latest":
            yield "start", 'is "latest", which is another place for each run of the sweep; give a time'
        if self.end == "latest":
            yield "end", 'is "latest", which is another place for each run of the sweep; give a time'

    @override
    def beside(self, job: str, suffix: str) -> Mapping[str, str]:
        group = {"group": (self.group or job) + suffix}
        return {**group, "start": "earliest"} if self.start == "group" else group
