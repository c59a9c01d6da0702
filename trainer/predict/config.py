"""What a user asks of a prediction job, and what its launcher tells one of its workers. Imports no torch."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from dataset.paths import PathPattern
from millrace.config import Count, FolderPath, PositiveSize, Section
from millrace.secrecy import Options

LIVE = "live"
"""As a version: the newest commit."""
TIMES = "event_time"
"""As a column: when the event happened."""


class KafkaInput(Section):
    """Ranges of a Kafka topic."""

    topic: str
    """One topic."""
    ranges: dict[Annotated[str, Field(pattern=r"^\d{1,10}$")], tuple[Count, Count]] | None = None
    """By partition's number: the first offset, and the one after the last; unless given, all that is retained now."""
    options: Options = {}
    """Options of kafka-python's consumer, over those of the job's own source where that is Kafka. Where they change
    brokers or anything of security, none of the job's credentials are used."""


class InputSection(Section):
    """The events to predict: files of the job's own format, or ranges of a topic."""

    paths: tuple[PathPattern, ...] | None = Field(default=None, min_length=1, max_length=1_000)
    """Globs or templates as in sources.*.paths, relative to the job's folder."""
    kafka: KafkaInput | None = None
    """Records of Kafka."""

    @model_validator(mode="after")
    def _one_of(self) -> "InputSection":
        if (self.paths is None) == (self.kafka is None):
            raise ValueError('needs either paths = ["..."] or kafka = { topic = "..." }')
        return self


class PredictionRequest(Section):
    """One prediction job."""

    input: InputSection
    """Which events."""
    output: FolderPath
    """Folder of the Parquet files; made if absent. A rerun of the same request goes on in it."""
    version: str = LIVE
    """"live" (the newest commit), a commit's name, a version's number, or an export: its folder or s3:// address."""
    columns: tuple[str, ...] = ()
    """Slots that are handed through, and "event_time"."""
    outputs: tuple[str, ...] = ()
    """Tensors of the model that are written: a task (its prediction), any other tensor that the model returns, "slot."
    before a pooled slot's name (its vector), or the path of a module in the model; the predictions unless given."""
    metrics: bool = True
    """Whether predictions are measured against the labels, where there are any."""
    trainers: int = Field(default=1, ge=1, le=64)
    """Processes that predict; the output does not depend on how many."""
    shards: int | None = Field(default=None, ge=0, le=64)
    """Processes that hold the rows; 0: they are in the one trainer. Unless set: 0 with one trainer, else 1."""
    segment_events: int = Field(default=20_000, ge=1, le=10_000_000)
    """Events (positions) of one output file: what one trainer does at a time, and what a kill may lose."""
    batch_size: int = Field(default=1024, ge=1, le=1 << 20)
    """Samples the model sees at once; the last ones of a file are filled up with empty samples."""
    share: float | None = Field(default=None, gt=0, le=1)
    """Of this machine's cores, how much the workers may use together. Unless set, half where the job trains in its
    store at the start, else all; below all, every other process goes first, too."""
    spec: dict[str, Any] | None = None
    """The sections of a job spec, where no job is named: an export does not say how its events are parsed."""
    base: FolderPath | None = None
    """With `spec`: the folder where its relative paths start."""

    @field_validator("output")
    @classmethod
    def _is_a_folder(cls, output: str) -> str:
        if "://" in output:
            raise ValueError("predictions are written to a folder; to an object store is not built: copy it there")
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
        """All that the output depends on, as JSON-able data: not who makes it, nor where to."""
        return self.model_dump(mode="json", exclude={"output", "trainers", "shards", "share", "spec", "base"})


class PredictWorker(Section):
    """What the launcher tells one worker, as JSON."""

    job: dict[str, Any]
    """The whole spec."""
    folder: Path
    """The spec's folder."""
    request: PredictionRequest
    """What is asked for."""
    output: Path
    """The absolute path of the output."""
    commit: Path
    """Folder of the commit whose rows and weights are read."""
    rank: Count
    """This worker's number."""
    shards: tuple[str, ...] = ()
    """Addresses of the shards, which hold the rows already; none: they are restored into this process."""
    secret: str = ""
    """What shards ask for."""
    live: Path
    """Folder for an embedded shard's open row stores."""
    cores: float = Field(default=1.0, gt=0, le=1 << 20)
    """Cores that this process may use on average."""
    max_message: PositiveSize = 256 << 20
    """Bound of a message from a shard."""
