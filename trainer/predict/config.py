"""The request of a prediction job, and the configuration of its workers. Imports no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, field_validator, model_validator

from headrace.config import Count, FolderPath, PositiveSize, Section
from headrace.dataset.spec.path_pattern import PathPattern
from headrace.pserver.config import Wire
from headrace.secrets import Options
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
    }

    paths: tuple[PathPattern, ...] | None = Field(default=None, min_length=1, max_length=1_000)
    """Globs or templates as in sources.*.paths, relative to the job's folder. If all end with .parquet, rows of Parquet
    files are events."""
    kafka: KafkaInput | None = None
    """Records of a Kafka topic."""

    @model_validator(mode="after")
    def _one_of(self) -> "InputSection":
        if (self.paths is None) == (self.kafka is None):
            raise ValueError('needs either paths = ["..."] or kafka = { topic = "..." }')
        return self


class PredictionRequest(Section):
    """One prediction job."""

    holds: ClassVar[Mapping[str, TextKind]] = {
        "output": TextKind.FOLDER,
        "version": TextKind.VERSION,
        "columns": TextKind.NAME,
        "shuffle": TextKind.NAME,
        "outputs": TextKind.NAME,
        "spec": TextKind.SPEC,
        "base": TextKind.BASE,
    }

    input: InputSection
    """The events."""
    output: FolderPath
    """Folder of the Parquet files; made if absent. A rerun of the same request continues in it."""
    version: str = LIVE
    """"live" (the newest commit), a commit's name, a version's number, or an export: its folder or s3:// address."""
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
    trainers: int = Field(default=1, ge=1, le=64)
    """Processes that predict. The output does not depend on their number."""
    shards: int | None = Field(default=None, ge=0, le=64)
    """Processes that hold the rows; 0: the one trainer holds them. Default: 0 with one trainer, else 1."""
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
    def _is_a_folder(cls, output: str) -> str:
        if "://" in output:
            raise ValueError(
                "predictions are written to a folder; an object store is not supported: copy the folder there"
            )
        return output

    @model_validator(mode="after")
    def _reachable(self) -> "PredictionRequest":
        if self.shards == 0 and self.trainers > 1:
            raise ValueError(
                f"shards = 0 keeps the rows inside the one trainer; {self.trainers} trainers need shards = 1 or more"
            )
        return self

    @property
    def num_shards(self) -> int:
        """Shard processes to start; 0: the shard is embedded."""
        if self.shards is not None:
            return self.shards
        return 0 if self.trainers == 1 else 1

    def what(self) -> dict[str, Any]:
        """Everything that the output depends on, as JSON-able data: without its folder and the number of processes."""
        without = {"output", "trainers", "shards", "share", "spec", "base"}
        if self.wire is Wire.FLOAT32:  # requests of older versions had no such key
            without.add("wire")
        if not self.shuffle:  # nor this one
            without.add("shuffle")
        return self.model_dump(mode="json", exclude=without)


class PredictWorker(Section):
    """Configuration of one worker, as JSON."""

    job: dict[str, Any]
    """The whole spec."""
    folder: Path
    """Folder of the job file."""
    request: PredictionRequest
    """The request."""
    output: Path
    """Absolute path of the output."""
    commit: Path
    """Folder of the commit with rows and weights."""
    rank: Count
    """This worker's number."""
    shards: tuple[str, ...] = ()
    """Addresses of shards that hold the rows; without any, this process restores the rows itself."""
    secret: str = ""
    """Secret of the shards."""
    live: Path
    """Folder for the open row stores of an embedded shard."""
    cores: float = Field(default=1.0, gt=0, le=1 << 20)
    """Cores that this process may use on average."""
    max_message: PositiveSize = 256 << 20
    """Largest message from a shard."""
