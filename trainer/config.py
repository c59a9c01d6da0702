"""What a user writes about training, and what a launcher tells one trainer process."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from dataset.config import AnySlot, AnySource, PipeSection, SampleSection
from millrace.config import Count, Duration, FolderPath, PositiveCount, PositiveDuration, PositiveSize, Section, Seed
from millrace.errors import SpecError
from millrace.points import Fault
from pserver.config import LAST_DAY, Beta, NotNegative, Positive, TableName, TableSection
from trainer.exports.config import ExportSection
from trainer.mirror.address import parse as parse_address

NEWEST_DEFAULTS = 2
"""The set of defaults that the classes of the spec hold, see trainer.defaults; a new store begins with it."""


class TaskSection(Section):
    """One thing to predict."""

    name: str
    """Name of the task and of its prediction."""
    label: str
    """Meta slot with the label."""
    loss: Literal["bce", "mse"] = "bce"
    """"bce": log loss of a probability; "mse": squared error of a value."""
    weight: Positive = 1.0
    """Weight of the task's loss in the sum."""
    mask: str | None = None
    """Meta slot that is 0 where this task has no label; an absent label (NaN) is then no error."""


class ModelSection(Section):
    """Which model."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)
    name: str | None = None
    """One of Millrace's own."""
    class_path: str | None = Field(default=None, alias="class")
    """A torch module of one's own, "package.module:Class", found from the spec's folder."""
    settings: dict[str, Any] = {}
    """The model's own settings."""

    @field_validator("settings")
    @classmethod
    def _finite(cls, settings: dict[str, Any]) -> dict[str, Any]:
        try:
            json.dumps(settings, allow_nan=False)
        except ValueError:
            raise ValueError("holds a number that is infinite or none") from None
        return settings

    @model_validator(mode="after")
    def _one(self) -> "ModelSection":
        if (self.name is None) == (self.class_path is None):
            raise ValueError('needs either name = "..." or class = "package.module:Class"')
        return self


class DenseSgd(Section):
    """torch.optim.SGD."""

    kind: Literal["sgd"]
    """SGD."""
    lr: Positive = 0.01
    """Learning rate."""
    momentum: Beta = 0.0
    """Momentum."""


class DenseAdam(Section):
    """torch.optim.Adam."""

    kind: Literal["adam"] = "adam"
    """Adam."""
    lr: Positive = 0.003
    """Learning rate."""
    beta1: Beta = 0.9
    """Decay of the first moment."""
    beta2: Beta = 0.999
    """Decay of the second moment."""
    epsilon: Positive = 1e-8
    """Added to the root."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay (AdamW)."""


class DenseAdagrad(Section):
    """torch.optim.Adagrad."""

    kind: Literal["adagrad"]
    """Adagrad."""
    lr: Positive = 0.01
    """Learning rate."""
    initial: NotNegative = 0.0
    """Accumulator at the start."""
    epsilon: Positive = 1e-10
    """Added to the root."""


DenseOptimizer = Annotated[DenseSgd | DenseAdam | DenseAdagrad, Field(discriminator="kind")]


class TrainSection(Section):
    """How steps are made."""

    mode: Literal["sync", "async", "geo"] = "sync"
    """"sync"; the others are not built yet."""
    staleness: Count = 0
    """Steps a pull may lag behind; only 0 is built."""
    dense: Literal["allreduce", "ps"] = "allreduce"
    """"allreduce"; "ps" is not built yet."""
    batch_size: int = Field(default=64, ge=1, le=1 << 20)
    """Samples a step and trainer; the samples of one event stay together."""
    accumulate: int = Field(default=1, ge=1, le=1024)
    """Steps whose dense gradients are summed before the dense update."""
    dense_optimizer: DenseOptimizer = DenseAdam()
    """How dense parameters learn."""
    clip_norm: Positive | None = None
    """Largest norm of the dense gradient."""
    amp: Literal["off", "bfloat16", "float16"] = "off"
    """Type of the model's arithmetic; float16 on GPUs only, with loss scaling."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto": GPUs where there are any."""
    threads: int | None = Field(default=None, ge=1, le=1024)
    """Threads of torch in each trainer; the machine's cores shared equally unless set."""
    learn: bool = True
    """False: the job reads the stream, predicts and measures every sample, and its model stays what it was.

    No row is made or pushed, no key counted for admission, no dense update made; days stand still, so that nothing ages
    or goes, until passes are learnt from again. Keys without a row read what inference reads: the table's default row.
    Commits hold positions and metrics, as ever. What a person has forgotten (`millrace forget`) still goes."""
    learn_until: Count | None = None
    """Events after which the job only predicts, as with learn = false."""
    on_nonfinite: Literal["fail", "skip_batch"] = "fail"
    """What a loss or gradient that is no number does."""
    step_deadline: PositiveDuration = 120.0
    """How long a step may wait for shards and other trainers."""
    prefetch_batches: int = Field(default=4, ge=1, le=1024)
    """Batches made ready ahead."""

    @model_validator(mode="after")
    def _built(self) -> "TrainSection":
        if self.mode != "sync":
            raise ValueError(f'mode = "{self.mode}" is not built yet; use "sync"')
        if self.staleness:
            raise ValueError("staleness above 0 is not built yet")
        if self.dense != "allreduce":
            raise ValueError(f'dense = "{self.dense}" is not built yet; use "allreduce"')
        if self.learn_until is not None and not self.learn:
            raise ValueError("learn_until says when learning ends, and learn = false that it never begins; drop one")
        return self


class PassesSection(Section):
    """How the stream is cut into passes."""

    max_events: int = Field(default=20_000, ge=1, le=100_000_000)
    """Events (positions) a pass holds at most, over all partitions."""
    wait: Duration = 1.0
    """cut = "arrival": how long events are collected."""
    cut: Literal["count", "arrival"] | None = None
    """"count": max_events, alike at every run (default of bounded sources); "arrival": what came in `wait`. Both take
    fewer where parallel partitions would be further apart than max_skew."""
    max_skew: PositiveDuration = 3_600.0
    """How far apart in time the events of parallel partitions may lie in a pass, by their records' time stamps: those
    ahead wait for those behind. A gap within one partition, and one where nothing waits, holds nobody."""
    max_day_jump: int = Field(default=7, ge=1, le=LAST_DAY)
    """Days by which one pass may be ahead of the one before; more stop the job: somebody's clock is wrong."""
    max_outage: Duration = 600.0
    """How long a source may be away before the job stops."""


class MetricsSection(Section):
    """What is measured, always before the sample is learnt."""

    window: PositiveDuration = 86_400.0
    """Length of the sliding window of event time; without event time it is the last 24 passes."""
    gauc_by: str | None = None
    """Slot whose values group samples for the mean AUC of groups."""
    slices: tuple[str, ...] = ()
    """Slots with few values; each value gets metrics of its own."""
    max_slice_values: int = Field(default=32, ge=1, le=1024)
    """Values measured apart for each slice; the rest is put together as "other"."""
    halves: bool = True
    """On bounded sources: also the first and the last half of the samples, in training order."""
    infer_first: bool = False
    """Also what Paddle's online trainer prints: each pass's samples all predicted by the model as it was at the pass's
    beginning, then learnt. Costs one more forward pass; the metrics are `infer_first` beside the others."""
    infer_first_memory: PositiveSize = 1 << 30
    """Of a pass's batches so much is kept by each trainer; the rest of the pass is left out of `infer_first`."""


class CommitSection(Section):
    """When everything learnt so far is made durable, and how much of the past is kept."""

    every: Duration = 30.0
    """Seconds between commits; training goes on meanwhile. There is always one at an orderly end."""
    every_passes: PositiveCount | None = None
    """Commit at least after so many passes, too."""
    keep: int = Field(default=3, ge=1, le=1000)
    """Newest commits kept; pinned ones are kept beside."""
    deadline: PositiveDuration = 600.0
    """How long writing one may take."""
    max_failing: Duration = 900.0
    """How long commits may go on failing (a full disk) before the job stops."""
    on_replay_mismatch: Literal["fail", "warn"] = "fail"
    """What it means that a pass trained again after a restart differs from what the log says of it."""


class StoreSection(Section):
    """Where a job keeps what it makes."""

    path: FolderPath
    """Folder, relative to the spec's."""
    mirror: str | None = None
    """Where commits and log are copied to: "s3://bucket/prefix", "file:///folder" or a folder, relative to the spec's.

    Options of S3 follow a "?": endpoint_override, region, scheme. Credentials come from the environment."""

    @field_validator("mirror")
    @classmethod
    def _is_an_address(cls, mirror: str | None) -> str | None:
        try:
            if mirror is not None:
                parse_address(mirror)
        except ValueError as error:
            # Not a mistake among others, whose message shows the value: there may be a password in this one.
            raise SpecError(str(error), "store.mirror") from None
        return mirror


class TrainerJob(Section):
    """The sections of the job spec that a trainer reads."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Name of the job: letters, digits, '.', '_', '-'."""
    seed: Seed = 1
    """Seed of everything that is drawn."""
    defaults: int | None = Field(default=None, ge=1, le=NEWEST_DEFAULTS)
    """Number of the set of defaults that holds for keys which are left out; unless set, the one that the store began
    with, which is the newest for a new store."""
    sources: Annotated[dict[str, AnySource], Field(min_length=1)]
    """The stream; one source is built."""
    pipe: PipeSection
    """Events to samples."""
    slots: Annotated[tuple[AnySlot, ...], Field(min_length=1)]
    """Slots, in the order of the pipe's output."""
    tasks: Annotated[tuple[TaskSection, ...], Field(min_length=1)]
    """What is predicted."""
    sample: SampleSection = SampleSection()
    """Group and weight of a sample."""
    tables: dict[TableName, TableSection] = {"default": TableSection()}
    """Embedding tables, by name; commits and exports have a folder named like each."""
    model: ModelSection
    """The model."""
    train: TrainSection = TrainSection()
    """Steps."""
    passes: PassesSection = PassesSection()
    """Passes."""
    metrics: MetricsSection = MetricsSection()
    """Measurements."""
    commit: CommitSection = CommitSection()
    """Commits."""
    store: StoreSection
    """Where results go."""
    exports: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,31}$")], ExportSection] = {}
    """Streams of exports, by name."""

    @field_validator("sources")
    @classmethod
    def _one_source(cls, sources: dict[str, Any]) -> dict[str, Any]:
        if len(sources) != 1:
            raise ValueError(f"several sources are not built yet; {len(sources)} given")
        return sources


class Rerun(Section):
    """Train what another store's log says again, and compare."""

    store: Path
    """The store whose log and commits are read."""
    commit: str | None
    """Name of the commit to begin from; None: the initial state."""


class WorkerConfig(Section):
    """What the launcher tells one trainer process, as JSON."""

    job: dict[str, Any]
    """The whole spec, checked, with its defaults written out (trainer.defaults); the trainer reads its sections."""
    secrets: dict[str, Any] = Field(default={}, repr=False)
    """Secrets of the spec, by the path of their key; `job`, which is logged, has "***" in their place."""
    folder: Path
    """The spec's folder: relative paths start there."""
    store: Path
    """The store's absolute path."""
    rank: Count
    """This trainer's number."""
    world: PositiveCount
    """Number of trainers."""
    rendezvous: Path | None = None
    """File through which trainers find each other (world > 1)."""
    shards: tuple[str, ...] = ()
    """Addresses of the shards; none: the shard is embedded."""
    secret: str = ""
    """What shards and roles ask for."""
    generation: Count = 1
    """How many times the workers were started."""
    live: Path | None = None
    """Folder for the embedded shard's open row stores; made anew."""
    until: Literal["logged"] | None = None
    """"logged": train what the log says, commit, and end; nothing new is planned."""
    rerun: Rerun | None = None
    """Train another store's log again instead of planning."""
    faults: tuple[Fault, ...] = ()
    """Where a fault run has this process killed."""
    address_file: Path
    """Where this process writes the address of its Role service."""
    cores: PositiveCount = 1
    """Cores this trainer may use."""
    max_message: PositiveSize = 256 << 20
    """Bound of a message to or from a shard."""
