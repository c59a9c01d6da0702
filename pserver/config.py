"""Sections of the job spec about tables, and the configuration of a shard process."""

import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from headrace.address import LOOPBACK_INTERFACE
from headrace.config import (
    Count,
    Float32,
    GrownSection,
    NotNegative,
    Positive,
    PositiveCount,
    PositiveDuration,
    PositiveSize,
    Rate,
    Section,
    Seed,
    Size,
    SlotGroup,
)
from headrace.failpoints import ArmedFailpoint
from headrace.identity.credentials import Credentials
from headrace.launcher_contact import LauncherContact
from headrace.pserver.admission_entries import AnyAdmissionEntry
from headrace.pserver.rate_schedules import Schedule
from headrace.pserver.row_optimizers import Adagrad, AnyRowOptimizer
from headrace.shared_folder import SharedFolder
from headrace.text_kinds import TextKind
from headrace.timeline import TracePart

MAX_DAYS = 1_000_000
"""Most days of a rule: longer than any row lives, and within the 32 bits of the count."""
LAST_DAY = 32_767
"""The last day of a job: rows store days in 16 bits."""
Days = Annotated[int, Field(ge=0, le=MAX_DAYS)]
MIN_TABLE_BYTES = 8 << 20
"""Smallest `tables.<t>.memory`."""


MIN_WEIGHT_DECAY = 2.0**-24
"""A smaller share is lost where it is taken from 1, in float32."""


def _decays(share: float) -> float:
    if 0 < share < MIN_WEIGHT_DECAY:
        raise ValueError(
            "is so small that weights, which are float32, would not shrink by it; the least is "
            f"{MIN_WEIGHT_DECAY}, and 0 is none"
        )
    return share


class Bounds(Section):
    """Limits of every weight."""

    low: Float32 = -10.0
    """Lower bound."""
    high: Float32 = 10.0
    """Upper bound."""

    @model_validator(mode="after")
    def _in_order(self) -> "Bounds":
        if self.low > self.high:
            raise ValueError(f"low = {self.low:g} is above high = {self.high:g}: no weight is allowed")
        return self


class Initial(StrEnum):
    """How the vector of a new row is drawn, by seed, table and key."""

    UNIFORM = "uniform"
    """In plus or minus `init_range`."""
    NORMAL = "normal"
    """With `init_range` as standard deviation."""
    XAVIER = "xavier"
    """Uniform in plus or minus sqrt(6 / (1 + dim)) (Glorot, Bengio 2010): a key is one input, its vector `dim`
    outputs."""
    ZEROS = "zeros"
    """Zeros."""


class SlotLife(Section):
    """Settings of one slot that differ from its table; unset ones are those of the table."""

    lr: Positive | None = None
    """Learning rate; also of the first-order weight, unless `first_order_lr` is set."""
    first_order_lr: Positive | None = None
    """Learning rate of the first-order weight."""
    bounds: Bounds | None = None
    """Limits of every weight."""
    init: Initial | None = None
    """How the vector of a new row is drawn."""
    init_range: NotNegative | None = None
    """Bound, or standard deviation, of a new vector."""
    admission: tuple[AnyAdmissionEntry, ...] | None = None
    """Which keys may have a row; () admits all."""
    extend_at: NotNegative | None = None
    """Score at which a row gets its vector."""
    decay: Rate | None = None
    """Factor of show and click for each day."""
    delete_below: NotNegative | None = None
    """A shrink deletes rows with a lower score."""
    delete_after_days: Days | None = None
    """A shrink deletes rows unseen for more days."""


OF_ROWS = frozenset({"optimizer", "first_order_optimizer", "grad_scale"})
"""Keys of a table that say how its rows learn. If one is set, the others keep the defaults of their classes; if none
is, all follow from the number of slots (trainer.spec.defaults)."""


class TableSection(GrownSection):
    """One embedding table."""

    holds: ClassVar[Mapping[str, TextKind]] = {
        "show": TextKind.NAME,
        "click": TextKind.NAME,
    }

    begins_as: ClassVar[Mapping[str, str]] = {"first_order_optimizer": "optimizer"}
    later: ClassVar[frozenset[str]] = frozenset({"schedule", "weight_decay", "l2", "in_batch"})
    dim: int = Field(default=16, ge=0, le=4096)
    """Length of the vector; with 0 a row has only a first-order weight."""
    first_order: bool = True
    """Whether a row has a first-order weight before its vector."""
    init: Initial = Initial.UNIFORM
    """How the vector of a new row is drawn, as a function of seed, table and key: "uniform" in plus or minus
    `init_range`; "normal" with `init_range` as standard deviation; "xavier": uniform in plus or minus
    sqrt(6 / (1 + dim)); "zeros"."""
    init_range: NotNegative = 0.01
    """Bound of a uniform vector, or standard deviation of a normal one; "xavier" and "zeros" do not use it."""
    optimizer: AnyRowOptimizer = Adagrad()
    """Optimizer of the rows. Without `optimizer`, `first_order_optimizer` and `grad_scale` all three follow from the
    number of sparse slots (docs/tables.md)."""
    first_order_optimizer: AnyRowOptimizer | None = None
    """Optimizer of the first-order weight, of the same kind; `optimizer` unless set. Without `kind`, keys that it lacks
    are those of `optimizer`."""
    schedule: Schedule | None = None
    """Multiplies the learning rates of the rows, those of single slots included, by a share that depends on the samples
    or versions learnt. Unset: the rates stay."""
    weight_decay: Annotated[NotNegative, Field(lt=1), AfterValidator(_decays)] = 0.0
    """Share of its weights that a row loses for each pass since its last push, at its next push and before its step
    (decoupled weight decay). It does not depend on the learning rate."""
    l2: NotNegative = 0.0
    """Its product with a row's weights is added to the row's gradient, after `clip_norm`."""
    bounds: Bounds = Bounds()
    """Limits of every weight."""
    grad_scale: Literal["mean", "show", "sum"] = "mean"
    """"mean": gradients of the step's mean loss; "sum": times the step's batch size, the sum over the key's samples;
    "show": that divided by the key's shows."""
    in_batch: bool = False
    """Whether first-order weights follow each event of a batch before the next one is predicted
    (trainer.train.in_batch). Without `optimizer`, `first_order_optimizer` and `grad_scale`: yes."""
    clip_norm: Positive | None = None
    """Largest norm of the gradient of one row in a step, over its first-order weight and its vector, after
    `grad_scale`. A longer gradient is scaled to it before the optimizer. Unset: none is."""
    nonclk_coeff: NotNegative = 0.1
    """Weight of a show without a click in the score."""
    click_coeff: NotNegative = 1.0
    """Weight of a click in the score."""
    show: str | None = None
    """Meta slot with a sample's shows; 1 unless set."""
    click: str | None = None
    """Meta slot with a sample's clicks; the first task's label unless set."""
    admission: tuple[AnyAdmissionEntry, ...] = ()
    """Which keys may have a row: all entries must agree. Without entries every key gets one at its first push."""
    default_row: Literal["zeros", "learnt"] = "zeros"
    """Weights of a key without a row that has no initial value either; "learnt": one row for all of them, a parameter
    of the dense part, which learns from keys without admission."""
    extend_at: NotNegative | None = None
    """Score at which a row gets its vector; unless set, a row starts with it."""
    decay: Rate = 0.98
    """Factor of a row's show and click for each day."""
    delete_below: NotNegative | None = None
    """A shrink deletes rows with a lower score."""
    delete_after_days: Days | None = None
    """A shrink deletes rows unseen for more days."""
    shrink: Literal["daily", "asked"] = "daily"
    """"daily": at each day's tick, if a `delete_` rule is set; "asked": only by `headrace shrink`."""
    max_shrink_fraction: Rate = 0.2
    """Above this share of the table's rows, a requested shrink needs `--allow`. A daily shrink waits for it only if the
    rule changed, the day jumped or statistics broke; steady ageing never waits."""
    slots: dict[str, SlotLife] = {}
    """Settings of single slots."""
    memory: Size | None = None
    """Most memory of the table's rows on each shard, including copies for commits; unless set, all rows stay in
    memory."""

    @field_validator("memory")
    @classmethod
    def _holds_a_batch(cls, memory: int | None) -> int | None:
        if memory is not None and memory < MIN_TABLE_BYTES:
            raise ValueError(f"is less than {MIN_TABLE_BYTES >> 20}MiB, which would not hold the rows of a batch")
        return memory

    @model_validator(mode="after")
    def _follows_events(self) -> "TableSection":
        first = self.first_order_optimizer or self.optimizer
        needs = {
            "first_order = true": self.first_order,
            'optimizers of kind "adagrad"': first.kind == "adagrad",
            'grad_scale = "sum"': self.grad_scale == "sum" or not OF_ROWS & self.model_fields_set,
            "rows that start with their vectors": not extends(self),
        }
        missing = [need for need, there in needs.items() if not there]
        if self.in_batch and missing:
            raise ValueError(f"in_batch = true needs {' and '.join(missing)}; or set in_batch = false")
        return self

    @property
    def learns_default_row(self) -> bool:
        """Whether its default row is a dense parameter."""
        return self.default_row == "learnt"

    @property
    def num_weights(self) -> int:
        """D: floats of a row that a model reads."""
        return int(self.first_order) + self.dim

    @property
    def num_pulled(self) -> int:
        """Floats of a row that a trainer pulls to learn from: with `in_batch`, two more (pserver.rows.kernels)."""
        return self.num_weights + 2 * self.in_batch


def extends(section: TableSection) -> bool:
    """Whether some rows get their vector later."""
    return section.extend_at is not None or any(slot.extend_at is not None for slot in section.slots.values())


def _is_a_folders_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", name):
        raise ValueError("a table is a folder of commits and exports: name it by letters, digits, '_' and '-'")
    return name


TableName = Annotated[str, AfterValidator(_is_a_folders_name)]
"""A table's name, which is also the name of a folder."""


WindowS = Annotated[int, Field(gt=-(1 << 62), lt=1 << 62)]
"""The length of a window of counters in seconds; 0: without end; below 0: a half-life."""


DENSE_SLICES = "dense-slices"
"""Name of the table with slices of the dense parameters, if the shards hold them. It has no features' rows."""
SLICE_FLOATS = 1024
"""Floats of such a row."""


class MergeSection(Section):
    """With mode = "async": how shards apply the gradients of several trainers together (half-async)."""

    pushes: int = Field(default=1, ge=1, le=1024)
    """Number of trainers whose gradients a shard applies as one step; 1: each when it comes. More than there are
    trainers mean all of them."""
    wait: PositiveDuration = 0.01
    """Longest time for which the first of them waits for the others."""


class Wire(StrEnum):
    """How rows and gradients travel between trainers and shards (pserver.protocol.wire)."""

    FLOAT32 = "float32"
    """As they are."""
    BFLOAT16 = "bfloat16"
    """In half the bits."""
    INT8 = "int8"
    """Rows in 8 bits a number with a scale for each vector; for predictions, which push no gradients."""


class PartStore(Section):
    """Where a process keeps its files of commits, with `store.parts = "object"`."""

    address: str
    """Address of the object store."""
    cache: Path | None = None
    """Folder on the disk of this process with files of the newest commit; None: the one that rank 0 names."""


def check_holds_rows(shards: int | None, trainers: int) -> None:
    """Raise ValueError for several trainers without a shard. None: as many shards as they need."""
    if shards == 0 and trainers > 1:
        raise ValueError(
            f"shards = 0 keeps the rows inside the one trainer; {trainers} trainers need shards = 1 or more"
        )


class ShardProcess(Section):
    """One shard. For a process of its own the launcher writes it as JSON; `alone` is the one inside a trainer."""

    shard: Count
    """This shard's number."""
    num_shards: PositiveCount
    """Number of shards of the job."""
    num_ranks: PositiveCount
    """Number of trainers of the job."""
    tables: dict[TableName, TableSection]
    """The tables of the job."""
    histories: dict[TableName, PositiveCount | tuple[WindowS, ...] | TableName] = {}
    """The tables that hold histories in place of weights, with the most signs of a key; or counters, with the lengths
    of their windows in seconds, 0 for one without end, below 0 for half-lives. Of questions about the statistics of
    rows: the rows' table."""
    joins: dict[TableName, PositiveDuration] = {}
    """The table of what waits for a join, if the job has one, with the window of event time."""
    groups: dict[str, SlotGroup] = {}
    """Slot group of each sparse slot, by name."""
    seed: Seed
    """The job's seed: initial values come from it."""
    mode: str = "sync"
    """Name of the consistency policy; see pserver.consistency.policy."""
    merge: MergeSection = MergeSection()
    """See MergeSection."""
    max_ahead: PositiveCount | None = None
    """Most steps by which a rank is ahead of another one within a pass; None: any number."""
    wire: Wire = Wire.FLOAT32
    """How rows and gradients travel."""
    secret: str = ""
    """Secret that callers must send."""
    generation: Count = 1
    """How many times the workers were started; callers of another generation are refused."""
    interface: str = LOOPBACK_INTERFACE
    """Network interface at which it listens."""
    credentials: Credentials | None = None
    """Its certificate; without one it listens for this machine alone."""
    launcher: LauncherContact | None = None
    """Where this process says where it listens; None: it was started by hand."""
    socket: Path | None = None
    """Unix socket at which this process serves; None: a port of loopback."""
    node_timeout: PositiveDuration = 30.0
    """How long a trainer's machine may be silent before its connections count as broken."""
    live: Path | None = None
    """Folder of this generation's row stores, made at restore; without one, rows are in memory only."""
    sees: SharedFolder | None = None
    """The store, which it must see before it serves; None: the files of commits go elsewhere, or all is one machine."""
    parts: PartStore | None = None
    """Where commits are uploaded to; None: they stay in the folder that rank 0 names."""
    max_message: PositiveSize = 256 << 20
    """Largest message; a step that needs a larger one is refused."""
    faults: tuple[ArmedFailpoint, ...] = ()
    """Failpoints at which this process is killed, in fault runs."""
    trace: TracePart | None = None
    """The timeline that this process records."""
    end_with_stdin: bool = True
    """Whether the process ends when standard input closes, that is, when the launcher has ended."""

    @classmethod
    def alone(cls, tables: Mapping[str, TableSection], seed: int, **more: Any) -> Self:
        """The one shard of one trainer."""
        return cls(shard=0, num_shards=1, num_ranks=1, tables=dict(tables), seed=seed, **more)
