"""The request of a prediction job, the configuration of its workers, and the evaluator's section. Imports no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from headrace.blob.store_address import parse
from headrace.config import Count, FolderPath, PositiveCount, PositiveDuration, PositiveSize, Section
from headrace.dataset.spec.path_pattern import PathPattern
from headrace.identity.credentials import Credentials
from headrace.launcher_contact import LauncherContact
from headrace.pserver.config import Wire, check_holds_rows
from headrace.secrets import Options
from headrace.shared_folder import SharedFolder
from headrace.text_kinds import TextKind

LIVE = "live"
"""Version name of the newest commit."""
TIMES = "event_time"
"""Name of the column with the time of the event."""


class KafkaInput(Section):
    """Ranges of a Kafka topic."""

    holds: ClassVar[Mapping[str, TextKind]] = {
        "topic": TextKind.NAME,
        "options": TextKind.KAFKA_OPTIONS,
    }

    topic: str
    """The topic."""
    ranges: dict[Annotated[str, Field(pattern=r"^\d{1,10}$")], tuple[Count, Count]] | None = None
    """By number of partition: first offset, and the one after the last. Default: all that is retained now."""
    options: Options = {}
    """Options of kafka-python's consumer; they override those of the job's own Kafka source. Where they change brokers
    or any security option, none of the job's credentials are used."""


class InputSection(Section):
    """The events to predict: files in the job's own format, or ranges of a Kafka topic."""

    holds: ClassVar[Mapping[str, TextKind]] = {
        "paths": TextKind.PATTERNS,
        "root": TextKind.PLACE,
    }

    paths: tuple[PathPattern, ...] | None = Field(default=None, min_length=1, max_length=1_000)
    """Globs or templates as in sources.*.paths, relative to the job's folder. If all end with .parquet, rows of Parquet
    files are events."""
    root: str | None = Field(default=None, max_length=4096)
    """Where `paths` begin, if the files are in an object store, as in sources.*.root."""
    kafka: KafkaInput | None = None
    """Records of a Kafka topic."""

    @model_validator(mode="after")
    def _one_of(self) -> "InputSection":
        if (self.paths is None) == (self.kafka is None):
            raise ValueError('needs either paths = ["..."] or kafka = { topic = "..." }')
        if self.root is not None and self.paths is None:
            raise ValueError("root is where paths begin; Kafka has none: leave it out")
        return self


_EXAMPLE: dict[str, Any] = {"input": {"paths": ["/data/clicks/*.jsonl"]}, "output": "/data/predictions"}
_OF_EXPORT: dict[str, Any] = {
    "version": "/models/clicks/t1/0000000012-base",
    "base": "/srv/clicks",
    "spec": {"pipe": {"kind": "columns"}},
}


class PredictionRequest(Section):
    """One prediction job."""

    model_config = ConfigDict(
        defer_build=False,  # a body of the API: FastAPI hides a warning about its own fields only while it builds
        json_schema_extra={"examples": [_EXAMPLE, {**_EXAMPLE, **_OF_EXPORT}]},
    )
    holds: ClassVar[Mapping[str, TextKind]] = {
        "output": TextKind.PLACE,
        "version": TextKind.VERSION,
        "columns": TextKind.NAME,
        "shuffle": TextKind.NAME,
        "outputs": TextKind.NAME,
        "spec": TextKind.SPEC,
        "base": TextKind.BASE,
    }

    input: InputSection
    """The events."""
    output: str
    """Folder of the Parquet files, made if absent, or an address in an object store as of a mirror. A rerun of the same
    request continues in it."""
    version: str = LIVE
    """"live" (the newest commit), a commit's name, a version's number, or an export: its folder or address."""
    columns: tuple[str, ...] = ()
    """Slots to copy to the output, and "event_time"."""
    outputs: tuple[str, ...] = ()
    """Tensors to write: a task (its prediction), any other tensor that the model returns, "slot." before a pooled
    slot's name (its vector), or the path of a module in the model. Default: the predictions."""
    metrics: bool = True
    """Whether to compute metrics where events have labels."""
    shuffle: tuple[str, ...] = Field(default=(), max_length=1_000)
    """Sparse and dense slots whose values the model gets from other samples, drawn among some thousand neighbours: what
    the metrics lose is what these slots are worth."""
    worth: bool = False
    """Whether the metrics have `worth`, too: for each other slot that can be shuffled, the metrics with that slot
    shuffled as well. The model predicts the events once more for each."""
    trainers: int = Field(default=1, ge=1, le=64)
    """Processes that predict. The output does not depend on their number."""
    shards: int | None = Field(default=None, ge=0, le=64)
    """Processes that hold the rows; 0: the one trainer holds them. Default: 0 with one trainer, else 1."""
    on: Literal["here", "cluster"] = "here"
    """Where the processes run: "here", on this machine, or "cluster", on the launcher of the section `cluster`, as the
    job's own workers do. There `trainers` and `shards` are by default those of the job."""
    segment_events: int = Field(default=20_000, ge=1, le=10_000_000)
    """Events (positions) of one output file: the unit of work, and what a kill may lose."""
    batch_size: int = Field(default=1024, ge=1, le=1 << 20)
    """Samples of a batch; the last batch of a file is padded with empty samples."""
    share: float | None = Field(default=None, gt=0, le=1)
    """Share of this machine's cores that the workers may use together. Default: half if the job trains in its store at
    the start, else all. Below 1, every other process has priority, too."""
    wire: Wire = Wire.FLOAT32
    """How rows travel from the processes that hold them: "bfloat16" in half the bits, "int8" with 8 bits a number and a
    scale for each vector. Rows are rounded so with shards = 0, too."""
    spec: dict[str, Any] | None = None
    """Sections of a job spec, where no job is named: an export does not say how to parse events."""
    base: FolderPath | None = None
    """Folder at which relative paths of `spec` start."""

    @field_validator("output")
    @classmethod
    def _is_a_place(cls, output: str) -> str:
        try:
            parse(output)
        except RuntimeError as error:  # for "~nobody"
            raise ValueError(str(error)) from None
        return output

    @model_validator(mode="after")
    def _reachable(self) -> "PredictionRequest":
        check_holds_rows(self.shards, self.trainers)
        if self.worth and not self.metrics:
            raise ValueError("worth is what the metrics lose: remove metrics = false, or worth")
        if self.on == "cluster" and self.share is not None:
            raise ValueError('share is a part of this machine\'s cores; with on = "cluster" leave it out')
        if self.on == "cluster" and self.spec is not None:
            raise ValueError('on = "cluster" needs a job, at whose store workers join; name it instead of `spec`')
        return self

    @property
    def num_shards(self) -> int:
        """Shard processes to start; 0: the shard is embedded."""
        if self.shards is not None:
            return self.shards
        return 0 if self.trainers == 1 else 1

    def what(self) -> dict[str, Any]:
        """Everything that the output depends on, as JSON-able data: without its folder and the number of processes."""
        without = {"output", "trainers", "shards", "on", "share", "spec", "base"}
        if self.wire is Wire.FLOAT32:  # requests of older versions had no such key
            without.add("wire")
        without |= {name for name in ("shuffle", "worth") if not getattr(self, name)}  # nor these
        if self.input.root is None:  # nor this one
            return self.model_dump(mode="json", exclude={**dict.fromkeys(without, True), "input": {"root"}})
        return self.model_dump(mode="json", exclude=without)


class EvaluatorSection(Section):
    """The evaluator: a process beside the trainers that measures each version on events of its own (docs/guards.md)."""

    input: InputSection
    """The events, with labels, that each version is measured on."""
    last: PositiveCount | None = None
    """Of a Kafka topic: only about so many of the newest events, equally from its partitions, as they are when the
    version's turn comes."""
    of: Literal["commits", "exports"] = "commits"
    """"commits": every commit is scored, the newest first; one that is removed before its turn is left out. "exports":
    only versions of which an export waits for its gate."""
    trainers: int = Field(default=1, ge=1, le=64)
    """As in "predict"."""
    shards: int | None = Field(default=None, ge=0, le=64)
    """As in "predict"."""
    share: float = Field(default=0.5, gt=0, le=1)
    """Share of this machine's cores that it may use."""
    priority: Literal["low", "normal"] = "low"
    """"low": every other process has priority, so on a machine without idle cores scores come late or never. "normal":
    it competes with the trainers for its share."""

    @model_validator(mode="after")
    def _has_one_window(self) -> "EvaluatorSection":
        if self.last is not None and (self.input.kafka is None or self.input.kafka.ranges is not None):
            raise ValueError("last bounds a Kafka topic without ranges; remove it, or set input.kafka without ranges")
        return self

    @model_validator(mode="after")
    def _reachable(self) -> "EvaluatorSection":
        check_holds_rows(self.shards, self.trainers)
        return self

    def request_of(self, commit: str, output: Path, asked: InputSection) -> PredictionRequest:
        """The prediction that measures a commit on `asked`, its input."""
        return PredictionRequest(
            input=asked,
            output=str(output),
            version=commit,
            trainers=self.trainers,
            shards=self.shards,
            share=self.share,
        )


class PredictWorker(Section):
    """Configuration of one worker, as JSON."""

    job: dict[str, Any]
    """The whole spec."""
    folder: Path
    """Folder of the job file."""
    request: PredictionRequest
    """The request."""
    output: str
    """Absolute address of the output."""
    commit: Path
    """Folder of the commit with rows and weights."""
    uploaded: dict[str, Any] | None = None
    """Name and manifest of the commit, where its files are in an object store and no folder is shared."""
    rank: Count
    """This worker's number."""
    shards: tuple[str, ...] = ()
    """Addresses of shards that hold the rows; without any, this process restores the rows itself."""
    secret: str = ""
    """Secret of the shards."""
    live: Path
    """Folder for open row stores, and for unfinished files of an object store."""
    generation: Count = 1
    """That of the shards; callers of another one are refused."""
    credentials: Credentials | None = None
    """Its certificate, where shards are on other machines."""
    launcher: LauncherContact | None = None
    """Where its certificate is renewed."""
    node_timeout: PositiveDuration = 30.0
    """How long a shard's machine may be silent before its connections count as broken."""
    sees: SharedFolder | None = None
    """The store, which it must see; None: all is one machine, or the files of commits are in an object store."""
    sees_output: SharedFolder | None = None
    """The folder of the output, which it must see; None: all is one machine, or it is an object store."""
    cores: float = Field(default=1.0, gt=0, le=1 << 20)
    """Cores that this process may use on average."""
    max_message: PositiveSize = 256 << 20
    """Largest message from a shard."""
