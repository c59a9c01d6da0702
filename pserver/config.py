"""What a user writes about tables."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from millrace.config import Section, Size
from millrace.points import Fault

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
MIN_TABLE_BYTES = 8 << 20
"""The least `tables.<t>.memory`."""


class Bounds(Section):
    """Limits of every weight."""

    low: float = -10.0
    """No weight goes below."""
    high: float = 10.0
    """No weight goes above."""


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
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
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
    memory: Size | None = None
    """Most memory that the table's rows take on each shard, copies for commits included; unless set, all rows stay in
    memory."""

    @field_validator("memory")
    @classmethod
    def _holds_a_batch(cls, memory: int | None) -> int | None:
        if memory is not None and memory < MIN_TABLE_BYTES:
            raise ValueError(f"is less than {MIN_TABLE_BYTES >> 20}MiB, which would not hold the rows of a batch")
        return memory


class ShardProcess(Section):
    """What the launcher tells one shard process, as JSON."""

    shard: int = Field(ge=0)
    """This shard's number."""
    num_shards: int = Field(ge=1)
    """Shards of the job."""
    num_ranks: int = Field(ge=1)
    """Trainers of the job."""
    tables: dict[str, TableSection]
    """Every table of the job."""
    seed: int
    """The job's seed: initial values come from it."""
    secret: str = ""
    """What callers must show."""
    generation: int = 1
    """How many times the workers were started; callers of another generation are refused."""
    address_file: Path
    """Where this process writes its address."""
    live: Path | None = None
    """Folder of this generation's row stores, made at restore; without one, rows are in memory only."""
    max_message: Size = 256 << 20
    """Bound of a message: a step whose keys or rows need more is refused."""
    faults: tuple[Fault, ...] = ()
    """Where this process is to die, in runs that show what that costs."""
    end_with_stdin: bool = True
    """Die when standard input closes, as it does when the launcher is gone."""
