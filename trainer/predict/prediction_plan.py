"""The plan of a prediction job, fixed before it begins: segments, their order, the version.

The plan is in the output's work folder, so that a rerun does the same as the first run, whatever happened since.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from headrace import documents
from headrace.blob.store_address import parse
from headrace.dataset.sources.files import FileFormat, FilesSource
from headrace.dataset.sources.kafka import KafkaSource
from headrace.dataset.sources.kinds import open_source
from headrace.dataset.spec.config import Opening, PipeSection, SourceSection
from headrace.dataset.stream.source import Partition, Segment, Source
from headrace.deadline import Deadline
from headrace.errors import BadInput, HeadraceError, SpecError
from headrace.secrets import without_keys
from headrace.trainer.checkpoint.commits import NAME, VERSION
from headrace.trainer.config import TrainerJob
from headrace.trainer.predict.config import LIVE, InputSection, KafkaInput, PredictionRequest
from headrace.trainer.predict.output_place import WORK, OutputPlace

PLAN = f"{WORK}/plan.json"
MAX_PARTS = 100_000
"""Most parts of one prediction: each is a file, and all are planned at once."""
OTHER_PIPE_KEYS = ("processes", "tries", "deadline", "extra", "max_bad_fraction", "dead_letters")
"""Keys of a pipe that do not change its samples."""
OPEN_S = 60.0
"""Longest wait for Kafka's partitions and offsets."""
KEYS = {
    "sources.*.paths": "input.paths",
    "sources.*.root": "input.root",
    "sources.*.topics": "input.kafka.topic",
    "sources.*.options": "input.kafka.options",
}
"""Names of a source's keys in a request."""
READ_ALL: tuple[dict[str, str], ...] = ({}, {"null_values": "reject"}, {"blank_lines": "read"})
"""Keys of sources that leave no event out because it has no value."""
SECURITY = ("sasl_", "ssl_", "security_protocol", "proxy_url", "socks5_proxy")
"""Prefixes of Kafka options for authentication and proxies."""


class OutputTaken(HeadraceError):
    """The output folder has the output of another request."""


@dataclass(frozen=True, slots=True)
class PredictionPlan:
    """The plan of a prediction job."""

    fingerprint: str
    """Hash of everything that the output depends on, except the version and the ends of the input."""
    version: Mapping[str, Any]
    """Origin of rows and weights, for people and for a rerun."""
    segments: tuple[Segment, ...]
    """One per part, in order."""

    def write(self, place: OutputPlace) -> None:
        """Store the plan, unless there is one. Raises Unwritable, BlobUnavailable."""
        segments = [asdict(segment) for segment in self.segments]
        message = {"fingerprint": self.fingerprint, "version": dict(self.version), "segments": segments}
        place.put_new(PLAN, json.dumps(message).encode())

    @staticmethod
    def forget(place: OutputPlace) -> None:
        """Remove a plan of which no part exists."""
        place.remove(PLAN)

    @classmethod
    def read(cls, place: OutputPlace) -> "PredictionPlan | None":
        """The stored plan; None where there is none."""
        if (content := place.get(PLAN)) is None:
            return None
        try:
            message = documents.parse_object(content, place.named(PLAN))
            segments = tuple(Segment(**each) for each in message["segments"])
            return cls(message["fingerprint"], message["version"], segments)
        except (KeyError, TypeError) as error:
            raise documents.InvalidDocument(place.named(PLAN), f"is not a plan: {error!r}") from error


def fingerprint_of(request: PredictionRequest, job: TrainerJob) -> str:
    """Hash of a request and of the parts of the spec that turn events into predictions; without secrets."""
    kept = {name for name in type(job.pipe).model_fields if name not in OTHER_PIPE_KEYS}
    pipe = job.pipe.model_dump(mode="json", include=kept)
    if isinstance(job.pipe, PipeSection):  # there was no kind before "columns"
        del pipe["kind"]
    source = own_source(request.input, job)
    shapes = {name: [table.dim, table.first_order] for name, table in job.tables.items()}
    spec = {
        "pipe": pipe,
        "event_time": source.event_time.model_dump(mode="json"),
        "max_event_bytes": source.max_event_bytes,
        "tables": shapes,
        **_format_of(request.input, job),
        **({} if job.join is None else {"join": job.join.model_dump(mode="json", include={"label", "key", "window"})}),
        **({} if (values := _values_of(source)) in READ_ALL else values),  # older fingerprints had none
        **job.model_dump(mode="json", include={"slots", "tasks", "sample", "model", "metrics"}),
    }
    text = json.dumps({"format": 1, "request": without_keys(request.what()), "spec": spec}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def own_source(asked: InputSection, job: TrainerJob) -> SourceSection:
    """The source of the job whose events are like those of the input: the first of its kind, or else the first."""

    def is_like(source: SourceSection) -> bool:
        if asked.paths is None:
            return isinstance(source, KafkaSource)
        return isinstance(source, FilesSource) and source.format is _format(asked)

    return next(filter(is_like, job.sources.values()), next(iter(job.sources.values())))


def _format(asked: InputSection) -> FileFormat:
    """Input files are Parquet if their names say so."""
    named = asked.paths is not None and all(path.endswith(".parquet") for path in asked.paths)
    return FileFormat.PARQUET if named else FileFormat.LINES


def _format_of(asked: InputSection, job: TrainerJob) -> dict[str, Any]:
    """The settings of Parquet input; empty for lines, as their fingerprints have always been."""
    if _format(asked) is FileFormat.LINES:
        return {}
    own, found = own_source(asked, job), {"format": FileFormat.PARQUET}
    is_like = isinstance(own, FilesSource) and own.format is FileFormat.PARQUET
    return found | (own.model_dump(include={"columns", "timestamps"}) if is_like else {})


def _values_of(own: SourceSection) -> dict[str, str]:
    """The key of the job's source for events that have no value."""
    if isinstance(own, KafkaSource):
        return {"null_values": own.null_values}
    return {"blank_lines": own.blank_lines} if isinstance(own, FilesSource) else {}


def source_config(asked: InputSection, job: TrainerJob) -> SourceSection:
    """The input as a source with the job's event format. Raises SpecError."""
    own = own_source(asked, job)
    shared: dict[str, Any] = {"event_time": own.event_time, "max_event_bytes": own.max_event_bytes}
    if asked.paths is not None:
        shared |= _values_of(own) if isinstance(own, FilesSource) else {}
        try:
            return FilesSource(kind="files", paths=asked.paths, root=asked.root, **shared, **_format_of(asked, job))
        except ValidationError as error:  # what only a source of files checks
            told = error.errors()[0]
            words = str(told["msg"]).removeprefix("Value error, ")
            raise SpecError(words, ".".join(("input", *map(str, told["loc"])))) from None
    assert asked.kafka is not None, "checked"
    options = merge_options(own.options if isinstance(own, KafkaSource) else {}, asked.kafka.options)
    if isinstance(own, KafkaSource):
        shared |= {"library": own.library, **_values_of(own)}
    if "bootstrap_servers" not in options:
        raise SpecError("the job's source is not Kafka, so set options.bootstrap_servers", "input.kafka.options")
    return KafkaSource(kind="kafka", topics=(asked.kafka.topic,), options=options, end="latest", **shared)


def merge_options(own: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """A job's Kafka options, overridden by those of a request.

    The job's credentials are for its own brokers and its own authentication. A request that names another broker,
    or any security option, gets none of them.
    """
    if any(name.startswith(SECURITY) for name in asked) or servers_of(asked) - servers_of(own):
        own = {name: value for name, value in own.items() if not name.startswith(SECURITY)}
    return {**own, **asked}


def servers_of(options: Mapping[str, Any]) -> frozenset[str]:
    """The brokers in Kafka options, however they are written."""
    if "bootstrap_servers" not in options:
        return frozenset()
    given = options["bootstrap_servers"]
    texts = given if isinstance(given, list | tuple) else [given]
    return frozenset(server.strip() for text in texts for server in str(text).split(","))


def names_commit(version: str) -> bool:
    """Whether a request's version names one of the job's commits; otherwise it is the address of an export."""
    return version == LIVE or any(form.fullmatch(version) for form in (VERSION, NAME))


def with_absolute_paths(request: PredictionRequest, folder: Path) -> PredictionRequest:
    """The request with absolute addresses of output and export: what is checked is then what is used.

    Relative addresses start at `folder`. Raises SpecError.
    """
    found = {"output": request.output, "version": request.version}
    for key, address in found.items():
        if key == "version" and names_commit(address):
            continue
        try:
            found[key] = parse(address, folder).text
        except (ValueError, RuntimeError) as error:  # RuntimeError for "~nobody"
            raise SpecError(str(error), key) from None
    return request.model_copy(update=found)


def open_input(asked: InputSection, job: TrainerJob, folder: Path) -> Source:
    """The input, opened. Raises SpecError, SourceUnavailable."""
    deadline = Deadline.after(OPEN_S)
    config = source_config(asked, job)
    try:
        opening = Opening(folder=folder, job=f"{job.name}-predict", seed=job.seed, deadline=deadline)
        return open_source(config, opening)
    except SpecError as error:
        for key, ours in KEYS.items():
            if error.path.startswith(key):
                raise error_at(error, error.path.replace(key, ours)) from None
        raise


def error_at(error: SpecError, path: str) -> SpecError:
    """The same error for the key at `path`."""
    return SpecError(str(error).removeprefix(f"{error.path}: "), path)


def segments_of(asked: InputSection, job: TrainerJob, folder: Path, segment_events: int) -> tuple[Segment, ...]:
    """Segments of the present input, cut by position alone. Raises SpecError, BadInput, SourceUnavailable."""
    source = open_input(asked, job, folder)
    try:
        partitions = source.partitions(Deadline.after(OPEN_S))
    finally:
        source.close()
    if asked.kafka is not None and asked.kafka.ranges is not None:
        bounds = _ranges(asked.kafka, partitions)
    else:
        bounds = [(partition, partition.start, partition.end) for partition in partitions]
    num_parts = sum(max(0, -((begin - end) // segment_events)) for _, begin, end in bounds)
    if num_parts > MAX_PARTS:
        problem = f"{segment_events} gives {num_parts} parts of this input; the most is {MAX_PARTS}: choose more events"
        raise SpecError(problem, "segment_events")
    return tuple(
        Segment(part.name, part.number, at, min(at + segment_events, end), part.identity)
        for part, begin, end in bounds
        for at in range(begin, end, segment_events)
    )


def newest_ranges(asked: InputSection, job: TrainerJob, folder: Path, last: int) -> dict[str, tuple[int, int]]:
    """By number of partition of a Kafka topic: where its share of the `last` newest events begins and ends now.

    Raises SpecError, SourceUnavailable.
    """
    source = open_input(asked, job, folder)
    try:
        partitions = source.partitions(Deadline.after(OPEN_S))
    finally:
        source.close()
    share = -(-last // max(1, len(partitions)))
    return {each.name.rpartition("/")[2]: (max(each.start, each.end - share), each.end) for each in partitions}


def _ranges(asked: KafkaInput, partitions: Sequence[Partition]) -> list[tuple[Partition, int, int]]:
    """The requested partitions with begin and end, by number."""
    by_name = {partition.name: partition for partition in partitions}
    found: list[tuple[Partition, int, int]] = []
    for number, (begin, end) in sorted((asked.ranges or {}).items(), key=lambda each: int(each[0])):
        partition = by_name.get(f"{asked.topic}/{int(number)}")
        if partition is None:
            raise SpecError(f"{asked.topic} has no partition {number}; it has {len(partitions)}", "input.kafka.ranges")
        if not partition.begin <= begin <= end <= partition.end:
            raise BadInput(
                f"{partition.name}: the request names offsets {begin} to {end}; it has {partition.begin} to "
                f"{partition.end} now"
            )
        found.append((partition, begin, end))
    return found
