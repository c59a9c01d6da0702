"""What a user writes about tables."""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from millrace.config import Count, PositiveCount, PositiveSize, Section, Seed, Size, SlotGroup
from millrace.points import Fault

MAX_FLOAT32 = (2 - 2**-23) * 2.0**127
"""The greatest number that float32 holds: tables count and learn in it."""
MIN_FLOAT32 = 2.0**-126
"""The least one above 0 that it holds in full; of far lower ones it makes 0."""


def _is_within(number: float) -> float:
    if abs(number) > MAX_FLOAT32:
        raise ValueError(f"is beyond float32, in which it is used; the greatest is {MAX_FLOAT32}")
    return number


def _is_above_0(number: float) -> float:
    if number < MIN_FLOAT32:
        raise ValueError(f"is so small that float32, in which it is used, cannot hold it; the least is {MIN_FLOAT32}")
    return number


Float32 = Annotated[float, AfterValidator(_is_within)]
Positive = Annotated[float, Field(gt=0), AfterValidator(_is_within), AfterValidator(_is_above_0)]
NotNegative = Annotated[float, Field(ge=0), AfterValidator(_is_within)]
Rate = Annotated[float, Field(gt=0, le=1), AfterValidator(_is_above_0)]
Beta = Annotated[float, Field(ge=0, le=1 - 2**-24)]
"""What a step leaves of a moment: below 1, as float32, too."""
MAX_DAYS = 1_000_000
"""The most days of any rule: longer than rows live, and few enough for the 32 bits in which they are counted."""
LAST_DAY = 32_767
"""The last day of a job: rows hold theirs in 16 bits."""
Days = Annotated[int, Field(ge=0, le=MAX_DAYS)]
MIN_TABLE_BYTES = 8 << 20
"""The least `tables.<t>.memory`."""
MIN_COUNTS_BYTES = 1 << 20
"""The least `memory` of an admission entry: 256 bytes for each virtual bucket."""


def _holds_some_counts(memory: int) -> int:
    if memory < MIN_COUNTS_BYTES:
        raise ValueError(
            f"is less than {MIN_COUNTS_BYTES >> 20}MiB, which would leave too few counts to a virtual bucket"
        )
    return memory


CountsSize = Annotated[Size, AfterValidator(_holds_some_counts)]


class Bounds(Section):
    """Limits of every weight."""

    low: Float32 = -10.0
    """No weight goes below."""
    high: Float32 = 10.0
    """No weight goes above."""

    @model_validator(mode="after")
    def _in_order(self) -> "Bounds":
        if self.low > self.high:
            raise ValueError(f"low = {self.low:g} is above high = {self.high:g}: no weight would do")
        return self


class Sgd(Section):
    """Plain gradient descent."""

    kind: Literal["sgd"]
    """SGD."""
    lr: Positive = 0.05
    """Learning rate."""


class Adagrad(Section):
    """Adagrad (Duchi, Hazan, Singer 2011)."""

    kind: Literal["adagrad"] = "adagrad"
    """Adagrad."""
    lr: Positive = 0.05
    """Learning rate."""
    per: Literal["row", "element"] = "row"
    """One accumulator for first-order weight and one for the vector (mean of squares), or one each element."""
    initial: NotNegative = 0.0
    """Accumulator of a new row."""
    epsilon: NotNegative = 1e-10
    """Added to the root."""


class Adam(Section):
    """Adam (Kingma, Ba 2015), steps counted per row."""

    kind: Literal["adam"]
    """Adam."""
    lr: Positive = 0.001
    """Learning rate."""
    beta1: Beta = 0.9
    """Decay of the first moment."""
    beta2: Beta = 0.999
    """Decay of the second moment."""
    epsilon: Positive = 1e-8
    """Added to the root."""


class Ftrl(Section):
    """FTRL-Proximal (McMahan et al. 2013)."""

    kind: Literal["ftrl"]
    """FTRL."""
    lr: Positive = 0.05
    """Alpha of the paper."""
    beta: NotNegative = 1.0
    """Beta of the paper."""
    l1: NotNegative = 0.0
    """L1 strength: drives weights to exactly 0."""
    l2: NotNegative = 0.0
    """L2 strength."""


Optimizer = Annotated[Sgd | Adagrad | Adam | Ftrl, Field(discriminator="kind")]


class CountEntry(Section):
    """A key is admitted when it has been seen often enough."""

    kind: Literal["count"]
    """By count."""
    n: int = Field(ge=1, le=1_000_000)
    """Admitted at its n-th show."""
    exact: bool = False
    """Whether keys are counted one by one; else in a sketch, which may count too many, never too few."""
    memory: CountsSize = 16 << 20
    """Memory of the counts over all shards; its equal part for each of 4,096 virtual buckets."""


class ProbabilityEntry(Section):
    """A key is admitted, or not, for good: drawn from its hash."""

    kind: Literal["probability"]
    """By lot."""
    p: Rate
    """Share of the keys that are admitted."""


class ShowClickEntry(Section):
    """A key is admitted when the score of its shows and clicks is high enough."""

    kind: Literal["show_click"]
    """By score."""
    score: Positive
    """Admitted when the sum of its records' scores reaches this."""
    exact: bool = False
    """As in "count"."""
    memory: CountsSize = 16 << 20
    """As in "count"."""


AdmissionEntry = Annotated[CountEntry | ProbabilityEntry | ShowClickEntry, Field(discriminator="kind")]


class SlotLife(Section):
    """What one slot has otherwise than its table; whatever is not set is as in the table."""

    lr: Positive | None = None
    """Learning rate; of the first-order weight, too, unless that has its own."""
    first_order_lr: Positive | None = None
    """Learning rate of the first-order weight."""
    bounds: Bounds | None = None
    """Limits of every weight."""
    init_range: NotNegative | None = None
    """A new vector is uniform in plus or minus this."""
    admission: tuple[AdmissionEntry, ...] | None = None
    """Which keys may have a row; () admits all."""
    extend_at: NotNegative | None = None
    """Score at which a row gets its vector."""
    decay: Rate | None = None
    """What a day leaves of show and click."""
    delete_below: NotNegative | None = None
    """Rows with a lower score go at a shrink."""
    delete_after_days: Days | None = None
    """Rows unseen for more days go at a shrink."""


class TableSection(Section):
    """One embedding table."""

    dim: int = Field(default=16, ge=0, le=4096)
    """Length of the vector; 0 leaves the first-order weight alone."""
    first_order: bool = True
    """Whether a row has a first-order weight before its vector."""
    init_range: NotNegative = 0.01
    """A new vector is uniform in plus or minus this."""
    optimizer: Optimizer = Adagrad()
    """How rows learn."""
    first_order_optimizer: Optimizer | None = None
    """Settings for the first-order weight, of the same kind; as `optimizer` unless set."""
    bounds: Bounds = Bounds()
    """Limits of every weight."""
    grad_scale: Literal["mean", "show"] = "mean"
    """"mean": gradients of the step's mean loss; "show": times the step's batch size, divided by the key's shows."""
    nonclk_coeff: NotNegative = 0.1
    """Weight of a show without a click in the score."""
    click_coeff: NotNegative = 1.0
    """Weight of a click in the score."""
    show: str | None = None
    """Meta slot with a sample's shows; 1 unless set."""
    click: str | None = None
    """Meta slot with a sample's clicks; the first task's label unless set."""
    admission: tuple[AdmissionEntry, ...] = ()
    """Which keys may have a row: all entries must agree; without one, every key has one from its first push."""
    default_row: Literal["zeros", "learnt"] = "zeros"
    """What a key without a row reads where it has no initial value of its own; "learnt": one row for all of them, a
    parameter of the dense part, which learns from those that are not admitted."""
    extend_at: NotNegative | None = None
    """Score at which a row gets its vector; unless set, it is born with it."""
    decay: Rate = 0.98
    """What a day leaves of a row's show and click."""
    delete_below: NotNegative | None = None
    """At a shrink rows with a lower score go."""
    delete_after_days: Days | None = None
    """At a shrink rows unseen for more days go."""
    shrink: Literal["daily", "asked"] = "daily"
    """"daily": at each day's tick, where a `delete_` rule is set; "asked": by `millrace shrink` alone."""
    max_shrink_fraction: Rate = 0.2
    """Above this share of the table's rows, a shrink that a person asks for needs leave, and a daily one waits for it
    where the rule changed, the day jumped or statistics broke; steady ageing never waits."""
    slots: dict[str, SlotLife] = {}
    """What single slots have otherwise."""
    memory: Size | None = None
    """Most memory that the table's rows take on each shard, copies for commits included; unless set, all rows stay in
    memory."""

    @field_validator("memory")
    @classmethod
    def _holds_a_batch(cls, memory: int | None) -> int | None:
        if memory is not None and memory < MIN_TABLE_BYTES:
            raise ValueError(f"is less than {MIN_TABLE_BYTES >> 20}MiB, which would not hold the rows of a batch")
        return memory

    @property
    def learns_default_row(self) -> bool:
        """Whether its default row is a dense parameter."""
        return self.default_row == "learnt"


def _is_a_folders_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", name):
        raise ValueError("a table is a folder of commits and exports: name it by letters, digits, '_' and '-'")
    return name


TableName = Annotated[str, AfterValidator(_is_a_folders_name)]
"""A table's name, which becomes a folder's."""


class ShardProcess(Section):
    """What the launcher tells one shard process, as JSON."""

    shard: Count
    """This shard's number."""
    num_shards: PositiveCount
    """Shards of the job."""
    num_ranks: PositiveCount
    """Trainers of the job."""
    tables: dict[TableName, TableSection]
    """Every table of the job."""
    groups: dict[str, SlotGroup] = {}
    """Slot group of each sparse slot, by name."""
    seed: Seed
    """The job's seed: initial values come from it."""
    mode: str = "sync"
    """Name of the consistency policy; see pserver.consistency.modes."""
    secret: str = ""
    """What callers must show."""
    generation: Count = 1
    """How many times the workers were started; callers of another generation are refused."""
    address_file: Path
    """Where this process writes its address."""
    live: Path | None = None
    """Folder of this generation's row stores, made at restore; without one, rows are in memory only."""
    max_message: PositiveSize = 256 << 20
    """Bound of a message: a step whose keys or rows need more is refused."""
    faults: tuple[Fault, ...] = ()
    """Where this process is to die, in runs that show what that costs."""
    end_with_stdin: bool = True
    """Die when standard input closes, as it does when the launcher is gone."""
