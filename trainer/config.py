"""The sections of a job spec about training, and the configuration of one trainer process."""

import json
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from headrace.address import LOOPBACK_INTERFACE
from headrace.blob.store_address import parse as parse_address
from headrace.config import (
    Count,
    Duration,
    FolderPath,
    GrownSection,
    NotNegative,
    Positive,
    PositiveCount,
    PositiveDuration,
    PositiveSize,
    Section,
    Seed,
    Size,
)
from headrace.dataset.sources.kinds import AnySource
from headrace.dataset.spec.config import READ_AHEAD_BYTES, AnyPipe, AnySlot, SampleSection
from headrace.dataset.spec.join_section import JoinSection
from headrace.errors import SpecError
from headrace.failpoints import ArmedFailpoint
from headrace.identity.credentials import Credentials
from headrace.launcher_contact import LauncherContact
from headrace.pserver.config import LAST_DAY, Days, MergeSection, ShardProcess, TableName, TableSection, Wire
from headrace.pserver.consistency.policy import MODES, Consistency
from headrace.renamed_keys import Renamed
from headrace.secrets import FORMS, is_reference
from headrace.shared_folder import SharedFolder
from headrace.text_kinds import TextKind
from headrace.timeline import TracePart
from headrace.trainer.cross_config import CrossesSection
from headrace.trainer.dense_config import RENAMED_TO_DENSE, DenseSection
from headrace.trainer.guard_config import GatesSection, GuardsSection, RollbackSection
from headrace.trainer.loss_scale import LossScaleSection
from headrace.trainer.retrieval_config import RetrievalSection
from headrace.trainer.tuning_config import TuningSection
from headrace.trainer.value_types import Dtype

NEWEST_DEFAULTS = 6
"""Number of the set of defaults in the classes of the spec (trainer.spec.defaults). New stores use it."""


class TaskSection(Section):
    """A prediction task."""

    holds: ClassVar[Mapping[str, TextKind]] = {
        "name": TextKind.NAME,
        "label": TextKind.NAME,
        "mask": TextKind.NAME,
    }

    name: str
    """Name of the task and of its prediction."""
    label: str
    """Meta slot with the label."""
    loss: Literal["bce", "mse", "softmax"] = "bce"
    """"bce": log loss of a probability, for labels from 0 to 1; "mse": squared error of a value, for any finite label;
    "softmax": log loss of the right one of many classes, whose number is the label (model "next_item",
    docs/large-classes.md). An event with another label is rejected."""
    weight: Positive = 1.0
    """Weight of the task's loss in the sum."""
    mask: str | None = None
    """Meta slot that is 0 where this task has no label; a missing label (NaN) is then not an error."""


class ModelSection(Section):
    """The model and its settings."""

    holds: ClassVar[Mapping[str, TextKind]] = {
        "name": TextKind.MODEL,
        "class_path": TextKind.MODEL,
        "settings": TextKind.MODEL_SETTINGS,
    }

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)
    name: str | None = None
    """Name of a model of Headrace."""
    class_path: str | None = Field(default=None, alias="class")
    """Your own torch module, "package.module:Class", imported from the spec's folder."""
    settings: dict[str, Any] = {}
    """The model's own settings."""

    @field_validator("settings")
    @classmethod
    def _finite(cls, settings: dict[str, Any]) -> dict[str, Any]:
        try:
            json.dumps(settings, allow_nan=False)
        except ValueError:
            raise ValueError("holds a number that is not finite") from None
        return settings

    @model_validator(mode="after")
    def _one(self) -> "ModelSection":
        if (self.name is None) == (self.class_path is None):
            raise ValueError('needs either name = "..." or class = "package.module:Class"')
        return self


MAX_SHUFFLED = 2_000_000
"""Most positions of a pass that is shuffled: 16 bytes each for its order, beside the samples."""
MAX_STALENESS = 8
"""Most steps by which rows may lag behind. One hides an exchange that takes as long as the computation of a step; more
only even out exchanges of uneven length. Each costs memory, and accuracy."""


if TYPE_CHECKING:
    ModeName = str
else:
    ModeName = Literal[tuple(MODES.names())]


class TrainSection(GrownSection):
    """How a training step works."""

    later: ClassVar[frozenset[str]] = frozenset({"max_ahead", "tune", "rows", "rows_memory"})
    holds: ClassVar[Mapping[str, TextKind]] = {
        "amp_white": TextKind.NAME,
        "amp_black": TextKind.NAME,
    }

    mode: ModeName = "sync"
    """Consistency of training. "sync": all trainers take each step together, and a job has the same bits at every run.
    "async": no trainer waits for another before the end of a pass; the shards apply gradients as they come. Every event
    counts once; weights differ a little from run to run. It needs dense.strategy = "shards". "geo": as "async", but
    each trainer learns k_steps batches on a copy of their rows before it sends the sum; it needs sgd in every table."""
    staleness: int = Field(default=0, ge=0, le=MAX_STALENESS)
    """Number of steps by which rows lag behind, at most 8: a step reads them as they were that many steps before. With
    mode = "geo", at most 1: the exchange after k_steps batches goes on beside the next ones.

    With 1 or more, gradients and rows travel beside the computation of the next steps, so a step need not wait for the
    shards. Results differ a little from those with 0, and are as repeatable. Each step of staleness keeps one more
    batch in every trainer, and its rows in the shards' memory."""
    early_rows: bool = False
    """With mode = "sync" and staleness = 0: while a step is computed, shards send those rows of the next batch that no
    trainer reads in this one, so that none changes. Less is left to send after the step. No bit depends on it. For
    slow networks: it costs messages, and time of the shards."""
    k_steps: int | None = Field(default=None, ge=1, le=1000)
    """With mode = "geo", which needs it: number of batches between two exchanges of a trainer with the shards. A row
    moves by the mean of what the trainers have learnt. More send less, and each trainer's rows are older."""
    merge: MergeSection = MergeSection()
    """Gradients of several trainers that shards apply together, with mode = "async"."""
    max_ahead: int | None = Field(default=None, ge=1, le=1_000_000)
    """With mode = "async": most steps by which a trainer may be ahead of the slowest one within a pass (bounded
    staleness). One that is further waits, at most step_deadline; for one that has learnt its part of the pass nobody
    waits. Unset: there is no bound within a pass."""
    batch_size: int = Field(default=256, ge=1, le=1 << 20)
    """Samples in one step of one trainer; the samples of one event stay together."""
    amp: Literal["off", "bfloat16", "float16"] = "off"
    """Type of the model's arithmetic; float16 only on GPUs, with loss scaling."""
    amp_white: tuple[str, ...] = ()
    """Further operations in that type, by their names in torch.nn.functional or torch: "layer_norm"."""
    amp_black: tuple[str, ...] = ()
    """Operations that stay in float32: "linear". Each list costs some microseconds for each operation of the model."""
    loss_scale: LossScaleSection = LossScaleSection()
    """Scale of the loss with float16."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto": GPUs if there are any."""
    rows: Literal["host", "device"] = "host"
    """Where the rows of a step are read and learn (docs/gpu.md). "host": on the shards. "device": in memory of the
    trainer's device; changed rows go back at each close to the shard in its process, and each trainer has one."""
    rows_memory: PositiveSize | None = None
    """With rows = "device": about the most memory of the device for them. Rows that find no room travel for each step;
    after each pass those that most steps read get the room. Unset: there is no bound."""
    threads: int | None = Field(default=None, ge=1, le=1024)
    """Threads of torch in each trainer; unless set, an equal share of the machine's cores."""
    matmul: Literal["measured", "mkl", "onednn"] = "measured"
    """Library of the matrix products of float32 on a CPU. "measured": for each product of each layer the quicker one,
    by a short measurement when the job is first made. The log keeps the result: restarts and reruns read it, and it
    is measured again only if the machine or a library changes, or this key."""
    tune: Literal["auto", "off"] = "off"
    """"auto": a new job whose stream begins with `tuning.events` events first tries settings on them, and keeps the
    best for its whole life: rates, batch size and the like, as far as this file leaves them out (docs/choosing.md).
    "off": it does not."""
    learn: bool = True
    """False: the job reads the stream, predicts and measures every sample, and does not change its model.

    No row is created or pushed, no key is counted for admission, and no dense update is made. Days stand still, so
    rows neither age nor expire until the job learns again. Keys without a row read the table's default row, as in
    inference. Commits hold positions and metrics as usual. `headrace forget` still deletes rows."""
    learn_until: Count | None = None
    """Number of events after which the job only predicts, as with learn = false."""
    calibrate: bool = True
    """Keep probabilities calibrated, by a scale and an offset of each task's logits that follow the stream
    (docs/calibration.md). Jobs with dense.strategy = "pipeline" or a task with loss "softmax" go without."""
    on_nonfinite: Literal["fail", "skip_batch"] = "fail"
    """Reaction to a loss or gradient that is not finite: stop the job, or skip the step."""
    step_deadline: PositiveDuration = 120.0
    """Longest time a step waits for shards and other trainers."""
    prefetch_batches: int = Field(default=4, ge=1, le=1024)
    """Number of batches prepared ahead."""

    @property
    def policy(self) -> type[Consistency]:
        """The mode."""
        return MODES.load(self.mode)

    @model_validator(mode="after")
    def _built(self) -> "TrainSection":
        unset = type(self).model_construct()
        for name in MODES.own:  # a package's mode has no keys of its own
            for key, message in MODES.load(name).own.items():
                if key in self.policy.own:
                    continue
                if (value := attrgetter(key)(self)) != attrgetter(key)(unset):
                    raise ValueError(message.format(value=value, chosen=self.mode))
        self.policy.check(self)
        if (self.amp_white or self.amp_black) and self.amp == "off":
            raise ValueError('amp_white and amp_black are for amp = "bfloat16" or "float16"; remove them')
        if twice := sorted({*self.amp_white} & {*self.amp_black}):
            raise ValueError(f"{twice[0]!r} is in amp_white and in amp_black; remove it from one")
        if self.learn_until is not None and not self.learn:
            raise ValueError("learn_until says when learning ends, and learn = false that it never begins; remove one")
        return self


class PassesSection(Section):
    """How the stream is cut into passes."""

    holds: ClassVar[Mapping[str, TextKind]] = {
        "keep_in": TextKind.FOLDER,
    }

    max_events: int = Field(default=20_000, ge=1, le=100_000_000)
    """Most events (positions) of a pass, over all partitions."""
    wait: Duration = 1.0
    """With cut = "arrival": how long events are collected for a pass."""
    cut: Literal["count", "arrival"] | None = None
    """"count": passes of max_events, the same at every run (default of bounded sources); "arrival": the events that
    came within `wait`. Both take fewer events if parallel partitions would be further apart than max_skew."""
    max_skew: PositiveDuration = 3_600.0
    """Largest difference in time between the events of parallel partitions in a pass, by the records' time stamps.
    Partitions ahead wait for those behind, but not for a gap within a partition or for one without events."""
    max_day_jump: int = Field(default=7, ge=1, le=LAST_DAY)
    """Most days by which a pass may be ahead of the one before. More stop the job, since a clock is probably wrong."""
    max_outage: Duration = 600.0
    """How long a source may be unavailable before the job stops."""
    memory: Annotated[Size, Field(ge=16 << 20)] = READ_AHEAD_BYTES
    """About the most bytes of events and samples that each trainer reads ahead of training, from the source to batches.
    Passes may be larger: they are read in parts. A batch, and with `shuffle` a pass, is in memory besides."""
    shuffle: bool = False
    """Whether the events of a pass are learnt in another order: a permutation by seed, pass and position, which is the
    same for any number of trainers. Every trainer reads the whole pass from the source, and gives its own part of the
    events to the pipe; its samples of the pass are in memory. Learning is no longer measured in the order of time
    within a pass. Needs a pipe whose samples can be traced to their events."""
    keep: Size = 0
    """Bytes of samples after the pipe that each trainer keeps in memory for the next epoch of their source, so that
    pipe and source rest. What is beyond is read again in each epoch; so is a pass that was cut in another way, and with
    `shuffle` and several trainers every pass. 0: nothing is kept."""
    keep_in: FolderPath | None = None
    """Folder, relative to the spec's folder: samples after the pipe are kept in files there, up to `keep` bytes, and
    used again by later epochs, by a job that starts again, and by other jobs with the same sources and pipe. Empty it
    when the program of the pipe changes."""

    @model_validator(mode="after")
    def _kept(self) -> "PassesSection":
        if self.keep_in is not None and not self.keep:
            raise ValueError('keep_in needs keep, the most bytes of its files: keep = "8GiB"')
        if self.shuffle and self.max_events > MAX_SHUFFLED:
            raise ValueError(f"shuffle keeps a pass in memory: max_events is at most {MAX_SHUFFLED} with it")
        return self


class MetricsSection(Section):
    """Metrics. Each sample is measured before it is learnt."""

    holds: ClassVar[Mapping[str, TextKind]] = {
        "gauc_by": TextKind.NAME,
        "slices": TextKind.NAME,
        "own": TextKind.METRIC,
    }

    window: PositiveDuration = 86_400.0
    """Length of the sliding window of event time; without event time the window is the last 24 passes."""
    gauc_by: str | None = None
    """Slot whose values group samples for GAUC, the mean AUC of groups."""
    slices: tuple[str, ...] = ()
    """Slots with few values; each value gets its own metrics."""
    max_slice_values: int = Field(default=32, ge=1, le=1024)
    """Most values of a slice with their own metrics; the rest is measured together as "other"."""
    halves: bool = True
    """On bounded sources: also measure the first and the last half of the samples, in training order."""
    progressive: Literal["inference", "training"] = "inference"
    """Mode of the model in which a sample is predicted and measured before it is learnt. "inference": without dropout,
    BatchNorm by its running statistics, as a server predicts. A model with such layers makes one more forward pass
    without gradients for it; others make none. "training": by the forward pass of the step, which costs nothing."""
    at_k: Annotated[tuple[Annotated[int, Field(ge=1, le=1000)], ...], Field(max_length=8)] = ()
    """Numbers k: measure the k samples of each group (`gauc_by`) with the highest predictions. acc@k is the share of
    groups with a click that have one among them, recall@k the mean share of a group's clicks among them."""
    group_calibration: bool = False
    """Also measure how far the sum of predictions of each group (`gauc_by`) is from that of its labels, over all groups
    and divided by the samples: 0 is perfect."""
    own: Annotated[tuple[str, ...], Field(max_length=16)] = ()
    """More metrics: names of registered ones, or classes of your own, "package.module:Class", imported from the spec's
    folder; see headrace.Metric."""
    infer_first: bool = False
    """Also predict all samples of a pass with the model at the beginning of the pass, as Paddle's online trainer does.
    This costs one more forward pass. Its metrics are reported as `infer_first`."""
    infer_first_memory: PositiveSize = 1 << 30
    """Memory for the batches of a pass in each trainer; the rest of the pass is left out of `infer_first`."""

    @model_validator(mode="after")
    def _grouped(self) -> "MetricsSection":
        if self.gauc_by is None and (self.at_k or self.group_calibration):
            raise ValueError("at_k and group_calibration measure groups: name their slot in gauc_by")
        if len(set(self.at_k)) < len(self.at_k) or len(set(self.own)) < len(self.own):
            raise ValueError("at_k or own names something twice")
        return self


class CommitSection(Section):
    """When the state of the job is committed, and how many commits are kept."""

    every: Duration = 30.0
    """Time between commits. Training goes on meanwhile. An orderly end always commits."""
    every_passes: PositiveCount | None = None
    """Also commit after this many passes."""
    keep: int = Field(default=3, ge=1, le=1000)
    """Newest commits to keep, beside pinned ones, with the log from the oldest on. The log's beginning is one, too."""
    deadline: PositiveDuration = 600.0
    """Longest time to write a commit."""
    max_failing: Duration = 900.0
    """How long commits may keep failing, for example on a full disk, before the job stops."""
    on_replay_mismatch: Literal["fail", "warn"] = "fail"
    """Reaction when a pass that is trained again after a restart differs from its close in the log."""


class StoreSection(Section):
    """Where a job keeps its log, commits and exports."""

    holds: ClassVar[Mapping[str, TextKind]] = {
        "path": TextKind.FOLDER,
        "mirror": TextKind.PLACE,
        "key": TextKind.SECRET,
    }

    path: FolderPath
    """Folder, relative to the spec's folder."""
    mirror: str | None = None
    """Copy of commits and log: an address in an object store ("s3://bucket/prefix", "gs://bucket/prefix",
    "az://container/prefix?account=NAME"), "file:///folder", or a folder relative to the spec's folder.

    Options follow a "?": docs/object-stores.md. Credentials come from the environment."""
    parts: Literal["shared", "object"] = "shared"
    """Where the files of commits are. "shared": in the folder `path`, which every process of the job sees; the mirror
    is a copy. "object": in the mirror, which then is the truth; every disk is a cache, and no folder is shared."""
    log_mirror: Literal["async", "sync"] = "async"
    """With "sync" every record of the log is in the mirror before it acts, so that the disk of rank 0 may be lost:
    the job goes on with the same bits. With "async" a lost disk means a new timeline from the newest commit. "sync"
    needs parts = "object"."""
    key: Mapping[str, str] | None = None
    """A secret key of the job, { env = "NAME" } or { file = "path" }: what makes commits count in the mirror, manifests
    and records of the fence, is signed with it, and refused unsigned. So who can write there and has not the key can
    make no other model count. Set it before the first commit, the same for every head of the job."""
    gc_grace: Duration = 86400.0
    """With parts = "object": how long files of removed commits stay in the mirror for those who still read them."""

    def objects_at(self, folder: Path) -> str | None:
        """The address of the object store that has the files of commits; None: the folder `path` has them.

        A relative one starts at `folder`."""
        return None if self.parts != "object" or self.mirror is None else parse_address(self.mirror, folder).text

    @field_validator("key")
    @classmethod
    def _is_a_reference(cls, value: Mapping[str, str] | None) -> Mapping[str, str] | None:
        if value is not None and not is_reference(value):
            raise ValueError(f"is not a reference to a secret: {FORMS}")
        return value

    @model_validator(mode="after")
    def _has_a_mirror(self) -> "StoreSection":
        if self.key is not None and self.mirror is None:
            raise ValueError("key signs what is in the mirror, and there is none: set mirror, too")
        if self.parts == "object" and self.mirror is None:
            raise ValueError('parts = "object" needs a mirror: the object store that holds the parts')
        if self.log_mirror == "sync" and self.parts != "object":
            raise ValueError('log_mirror = "sync" needs parts = "object"')
        return self

    @field_validator("mirror")
    @classmethod
    def _is_an_address(cls, mirror: str | None) -> str | None:
        try:
            if mirror is not None:
                parse_address(mirror)
        except ValueError as error:
            # pydantic would show the value, which may contain a password.
            raise SpecError(str(error), "store.mirror") from None
        return mirror


class ExportSection(Section):
    """One stream of exports: bases, and deltas between them."""

    holds: ClassVar[Mapping[str, TextKind]] = {
        "path": TextKind.PLACE,
        "tables": TextKind.NAME,
        "command": TextKind.EXPORT_COMMAND,
    }

    path: str | None = None
    """Destination: a folder (relative to the job file's), or an address as in store.mirror.
    Default: exports/<stream> in the store."""
    base: PositiveDuration | None = None
    """Interval of whole models. Default: only the first export is whole, and those that have to be."""
    delta: PositiveDuration | None = None
    """Interval of deltas, which hold what changed. Default: there are only bases."""
    clock: Literal["event", "wall"] | None = None
    """Clock of the intervals: event time (default where events have one) or wall time."""
    at_end: bool = True
    """Whether the end of a bounded stream makes one more export."""
    on_late: Literal["later", "wait"] = "later"
    """Treatment of an export that is due while the one before is being made. "later": it is cut at a later close.
    "wait": training waits, so that the exported versions depend on the events alone."""
    tables: tuple[str, ...] = ()
    """Tables to export. Default: all."""
    dtype: Dtype = "float32"
    """Type of weights and vectors; "int8" has a scale per row."""
    base_threshold: NotNegative = 0.0
    """Rows with a lower score are not exported."""
    delta_threshold: NotNegative = 0.0
    """Rows whose score since their last export is lower are not in a delta. Only one stream may set it above 0."""
    delta_keep_days: Days | None = None
    """Rows that were not seen for more days are not in a delta."""
    keep: int = Field(default=2, ge=1, le=10_000)
    """How many of the newest bases are kept, with the deltas that follow them."""
    tries: int = Field(default=3, ge=1, le=100)
    """Tries of one export before it is given up. The next one then includes what it lacks."""
    deadline: PositiveDuration = 600.0
    """Longest time of one try."""
    golden: int = Field(default=32, ge=0, le=4096)
    """Number of samples with golden predictions."""
    gates: GatesSection = GatesSection()
    """Checks before `current.json` points to an export."""
    rollback: RollbackSection | None = None
    """When `current.json` goes back to an older export (docs/guards.md). Unset: never by itself."""
    command: tuple[str, ...] = ()
    """Program that runs after each complete export, without a shell; its last argument is the export's address."""
    command_deadline: PositiveDuration = 60.0
    """Longest time of the command."""

    @model_validator(mode="after")
    def _has_a_schedule(self) -> "ExportSection":
        if self.base is not None and self.delta is not None and self.delta > self.base:
            raise ValueError("delta is longer than base, so there would be no delta")
        return self

    @property
    def try_s(self) -> float:
        """Longest time of one try, with its wait for a score."""
        gate = self.gates.evaluator
        return self.deadline + (0.0 if gate is None else gate.wait)


class TrainerJob(GrownSection):
    """The sections of the job spec that a trainer reads."""

    later: ClassVar[frozenset[str]] = frozenset({"retrieval", "tuning", "crosses"})
    holds: ClassVar[Mapping[str, TextKind]] = {
        "name": TextKind.NAME,
    }

    renamed: ClassVar[Renamed] = RENAMED_TO_DENSE
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Name of the job: letters, digits, '.', '_', '-'."""
    seed: Seed = 1
    """Seed of all random choices."""
    defaults: int | None = Field(default=None, ge=1, le=NEWEST_DEFAULTS)
    """Number of the set of defaults for keys that are left out. Unless set, the one with which the store began: the
    newest for a new store."""
    sources: Annotated[dict[str, AnySource], Field(min_length=1)]
    """The event stream: one source, or several by name (docs/sources.md)."""
    pipe: AnyPipe
    """The command that turns events into samples; or, with kind = "columns", the keys of the slots do."""
    slots: Annotated[tuple[AnySlot, ...], Field(min_length=1)]
    """Slots, in the order of the pipe's output."""
    tasks: Annotated[tuple[TaskSection, ...], Field(min_length=1)]
    """The predictions."""
    sample: SampleSection = SampleSection()
    """Group and weight of a sample; see SampleSection."""
    join: JoinSection | None = None
    """Impressions whose labels come later, in events of their own; see JoinSection. Unset: labels come with events."""
    tables: dict[TableName, TableSection] = {"default": TableSection()}
    """Embedding tables by name. Commits and exports have a folder with the name of each table."""
    model: ModelSection
    """The model."""
    train: TrainSection = TrainSection()
    """Training steps."""
    dense: DenseSection = DenseSection()
    """How the dense parameters learn."""
    passes: PassesSection = PassesSection()
    """Sizes of passes."""
    metrics: MetricsSection = MetricsSection()
    """Metrics."""
    commit: CommitSection = CommitSection()
    """Commits."""
    store: StoreSection
    """The job's store."""
    exports: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,31}$")], ExportSection] = {}
    """Export streams by name."""
    guards: GuardsSection | None = None
    """Guards of the slots (docs/guards.md). Unset: nothing is compared."""
    retrieval: RetrievalSection | None = None
    """Retrieval of items by replicas, for model two_tower (docs/retrieval.md). Unset: replicas predict only."""
    tuning: TuningSection = TuningSection()
    """The tuning of a new job, with train.tune = "auto"."""
    crosses: CrossesSection = CrossesSection()
    """The crosses of slots that a new job chooses."""


class Rerun(Section):
    """Train the passes in another store's log again, and compare."""

    store: Path
    """The store whose log and commits are read."""
    commit: str | None
    """Name of the commit to begin from; None: the initial state."""
    last: Count
    """The last of these passes."""


class WorkerConfig(Section):
    """Configuration of one trainer process, written by the launcher as JSON."""

    job: dict[str, Any]
    """The whole checked spec with its defaults (trainer.spec.defaults); the trainer reads its own sections."""
    secrets: dict[str, Any] = Field(default={}, repr=False)
    """Secrets of the spec by the path of their key; `job`, which is logged, has "***" in their place."""
    folder: Path
    """The spec's folder, to which paths are relative."""
    store: Path
    """The store's absolute path."""
    rank: Count
    """This trainer's number."""
    world: PositiveCount
    """Number of trainers."""
    local_rank: Count = 0
    """Its rank among the trainers of its machine, for its GPU."""
    shards: tuple[str, ...] = ()
    """Addresses of the shards; empty: the shard is embedded."""
    shard: ShardProcess | None = None
    """The shard that this trainer serves in its process, where rows are on the devices of several trainers."""
    readers: tuple[str, ...] = ()
    """Addresses of the readers, which run source and pipe, "" of one that does not run; empty: this trainer does."""
    wire: Wire = Wire.FLOAT32
    """How rows and gradients travel to and from shards."""
    secret: str = ""
    """Secret that callers of shards and roles must present."""
    interface: str = LOOPBACK_INTERFACE
    """Network interface of the trainers' collectives, and of rank 0's Role service if there are credentials."""
    credentials: Credentials | None = None
    """Its certificate, to show to shards and launcher; without one all of them are on this machine."""
    generation: Count = 1
    """Number of the generation of workers, from 1."""
    node_timeout: PositiveDuration = 30.0
    """How long a shard's machine may be silent, and how long rank 0 publishes and exports without the object store."""
    live: Path | None = None
    """Folder for the open row stores of the embedded shard; created anew."""
    sees: SharedFolder | None = None
    """The store, which it must see before it serves; None: as for a shard."""
    cache: Path | None = None
    """Folder of a trainer other than rank 0 for files of a commit, with store.parts = "object"."""
    stands_by: str | None = None
    """The id of a resize: this process stands by until it has acted, and only then claims its generation."""
    prepares_resizes: bool = False
    """Whether the launcher prepares the workers of a resize before it is logged."""
    ends_after: PositiveCount | None = None
    """Number of positions after which the stream counts as ended: see LoadedJob.ends_after."""
    elastic: tuple[PositiveCount, PositiveCount] | None = None
    """Fewest and most trainers, where the launcher chooses their number; `world` is logged where it is new."""
    until: Literal["logged"] | None = None
    """"logged": train the passes in the log, commit, and end; plan nothing new."""
    rerun: Rerun | None = None
    """Set: train another store's log again instead of planning."""
    matmul: dict[str, dict[str, str]] | None = None
    """The table of kernels of another job, for a new job whose digests are compared with it; None: by train.matmul."""
    faults: tuple[ArmedFailpoint, ...] = ()
    """Failpoints at which this process is killed, in fault runs."""
    trace: TracePart | None = None
    """The timeline that this process records."""
    launcher: LauncherContact | None = None
    """Where this process meets the others and tells the address of its Role service; None: one trainer, by hand."""
    socket: Path | None = None
    """Unix socket of its Role service; None: a port of loopback."""
    inputs: dict[str, Count] = {}
    """Files that are compared with the head's, by path: how many of their first bytes."""
    cores: PositiveCount = 1
    """Cores this trainer may use."""
    max_message: PositiveSize = 256 << 20
    """Largest message to or from a shard."""
