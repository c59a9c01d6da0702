"""The section `dense` of a job spec: how the gradients of all trainers become dense parameters, and the strategies.

A strategy is described here, without torch, as job files are checked without it; its work is a class of trainer.dense.
`trainer.spec.section_rules` checks the section against the others by these descriptions.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from headrace.config import Count, GrownSection, Positive, PositiveCount, PositiveSize, Section
from headrace.errors import SpecError
from headrace.pserver.rate_schedules import Constant, Schedule
from headrace.registry import Registry
from headrace.renamed_keys import Renamed, RenamedKey
from headrace.text_kinds import TextKind
from headrace.trainer.dense_optimizers import AnyDenseOptimizer, DenseAdam

RENAMED_TO_DENSE: Renamed = {
    "train.dense": RenamedKey("dense.strategy", {"allreduce": "all_reduce"}),
    "train.accumulate": RenamedKey("dense.accumulate"),
    "train.dense_optimizer": RenamedKey("dense.optimizer"),
    "train.clip_norm": RenamedKey("dense.clip_norm"),
}
"""Keys of other sections before there was a section `dense`."""


MAX_ADAPTIVE = 16
"""Most steps between two averages that adapt to the loss."""
BUCKET_BYTES, MAX_BUCKET_BYTES, BUCKET_STEP_BYTES = 4 << 20, 32 << 20, 64


class DgcSection(GrownSection):
    """Deep gradient compression (Lin et al. 2018): each trainer sends its largest sums of gradients only."""

    later: ClassVar[frozenset[str]] = frozenset({"begin", "stages"})

    sparsity: float = Field(default=0.999, ge=0, lt=1)
    """Share of the dense parameters of which a trainer sends nothing in a step. 0: it sends all."""
    warmup_steps: Count = 0
    """Number of steps at the beginning in which the sparsity rises to that, in five stages: the share that is sent
    falls by the same factor at each."""
    begin: Count = 0
    """Number of steps before those, in which a trainer sends all."""
    stages: Annotated[tuple[Annotated[float, Field(ge=0, lt=1)], ...], Field(max_length=1000)] = ()
    """Sparsities of equal parts of warmup_steps, one after another, in place of the five stages."""

    @model_validator(mode="after")
    def _has_steps(self) -> "DgcSection":
        if len(self.stages) > self.warmup_steps:
            raise ValueError(
                f"stages has {len(self.stages)} parts of warmup_steps = {self.warmup_steps}: set it to as many steps "
                "or more"
            )
        return self


class PowerSgdSection(Section):
    """PowerSGD (Vogels et al. 2019): the gradient of a matrix travels as the product of two narrow matrices."""

    rank: int = Field(default=4, ge=1, le=64)
    """Number of columns of the narrow matrices. More is more exact, and more bytes."""


class PipelineSection(GrownSection):
    """Stages of the model on the trainers, through which the parts of a batch pass one after another."""

    later: ClassVar[frozenset[str]] = frozenset({"stages"})

    stages: int | None = Field(default=None, ge=1, le=64)
    """Number of neighbouring trainers that share a model. Of each such group the first one reads events, and gradients
    of a stage are summed over the groups. The number of trainers is a multiple of it. Default: all trainers share one
    model."""
    micro_batches: int = Field(default=4, ge=1, le=256)
    """Number of equal parts of a batch. While one trainer computes a part, the next one computes the part before."""
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """Order of the work. "1f1b": a trainer computes the backward pass of a part as soon as it can, so it keeps the
    activations of at most as many parts as there are trainers. "gpipe": all forward passes first. No bit depends on it.
    With fewer parts than stages it is "gpipe"."""


def group_size(world: int, wanted: int | None) -> int:
    """Ranks of a group: `wanted`, or else the next lower number that divides `world`; without it, all ranks."""
    most = min(wanted or world, world)
    return next(size for size in range(most, 0, -1) if world % size == 0)


class HierarchySection(Section):
    """Sums in two levels: within a machine, then between machines."""

    group: int = Field(ge=2, le=4096)
    """Number of neighbouring trainers that share a machine. If it does not divide the number of trainers, the next
    lower number that does."""

    def size(self, num_trainers: int) -> int:
        """Trainers of a group, of so many."""
        return group_size(num_trainers, self.group)


class RecomputeSection(Section):
    """Blocks of the model that are computed twice, to keep less memory between the forward and the backward pass."""

    holds: ClassVar[Mapping[str, TextKind]] = {
        "blocks": TextKind.NAME,
    }

    blocks: Literal["all"] | tuple[str, ...] = "all"
    """Names of modules in the model, such as "deep" or "encoder.blocks". A list of modules stands for each of them.
    "all": every part of the model that has parameters."""
    segments: PositiveCount | None = None
    """Number of parts of a block that is a sequence of layers (torch.nn.Sequential); each is recomputed for itself.
    Default: about the root of the number of its layers with parameters."""


FOR_ONE = '{key} is for strategy = "{own}", not for "{chosen}": remove one'


class StrategyKind:
    """A strategy as a job file names it: its class, its settings, and what it refuses beside what."""

    implementation: ClassVar[str]
    """The subclass of trainer.dense.strategy.DenseStrategy, as "module:Class"."""
    own: ClassVar[Mapping[str, str]] = {}
    """Keys of `dense` for this strategy alone, with the message about one that is set beside another strategy."""
    meets_in_steps: ClassVar[bool] = True
    """Whether trainers wait for each other in every step."""
    on_shards: ClassVar[bool] = False
    """Whether the dense parameters are rows on the shards."""
    in_stages: ClassVar[bool] = False
    """Whether each trainer has some layers of the model; not all of them read events then."""

    def class_of(self, dense: "DenseSection") -> str:
        """`implementation`, where it depends on other settings."""
        return self.implementation

    def check(self, dense: "DenseSection") -> None:
        """Raise ValueError for a setting of its own that is missing or wrong."""

    def refused(self, dense: "DenseSection") -> dict[str, bool]:
        """Settings of `dense` that do not work with it, in words, and whether each is there."""
        return {
            "overlap": dense.overlap,
            "hierarchy": dense.hierarchy is not None,
            "compression": dense.compression != "none",
            "bucket_bytes, which is for all_reduce": dense.bucket_bytes != BUCKET_BYTES,
        }


class AllReduceKind(StrategyKind):
    """On every trainer; gradients are summed over trainers."""

    implementation = "headrace.trainer.dense.all_reduce:AllReduceDense"

    def refused(self, dense: "DenseSection") -> dict[str, bool]:
        return {}


class LocalSgdKind(StrategyKind):
    """On every trainer, which learns by itself; trainers average now and then."""

    implementation = "headrace.trainer.dense.local_sgd:LocalSgdDense"
    own = dict.fromkeys(("k_steps", "begin", "adaptive"), FOR_ONE)

    def check(self, dense: "DenseSection") -> None:
        if dense.k_steps is None:
            raise ValueError('strategy = "local_sgd" needs k_steps, the number of steps between two averages')
        if dense.adaptive and dense.k_steps > MAX_ADAPTIVE:
            raise ValueError(f"k_steps is {dense.k_steps}; with adaptive at most {MAX_ADAPTIVE}")


class ShardedKind(StrategyKind):
    """On every trainer; the optimizer's state is divided, and in stages 2 and 3 gradients and weights."""

    implementation = "headrace.trainer.dense.sharded:ShardedDense"
    own = {"group": FOR_ONE, "stage": FOR_ONE}

    def class_of(self, dense: "DenseSection") -> str:
        in_blocks = "headrace.trainer.dense.sharded_blocks:BlockShardedDense"
        return in_blocks if dense.divides_gradients else self.implementation

    def refused(self, dense: "DenseSection") -> dict[str, bool]:
        kind = f'optimizer.kind = "{dense.optimizer.kind}", which needs whole parameters'
        stage, blocks = f"stage = {dense.stage}", dense.divides_gradients
        found = super().refused(dense) | {
            kind: dense.optimizer.whole and not dense.optimizer.by_norms,
            f'buffers = "sync_bn" and {stage}, as trainers meet in both during the backward pass': (
                blocks and dense.buffers == "sync_bn"
            ),
            f"offload and {stage}, which gives weights back itself": dense.stage == 3 and bool(dense.offload),
        }
        return {name: there for name, there in found.items() if not (blocks and name.startswith("bucket_bytes"))}


class ShardsKind(StrategyKind):
    """On the shards, as rows."""

    implementation = "headrace.trainer.dense.shard_slices:ShardDense"
    own = {"slice_floats": '{key} is for strategy = "{own}"; "{chosen}" has no slices: remove it'}
    meets_in_steps = False
    on_shards = True

    def refused(self, dense: "DenseSection") -> dict[str, bool]:
        of_rows = dense.optimizer.of_rows()
        return {
            "overlap": dense.overlap,
            "hierarchy": dense.hierarchy is not None,
            "compression": dense.compression != "none",
            str(of_rows): isinstance(of_rows, str),
        }


class PipelineKind(StrategyKind):
    """Each trainer has some layers of the model."""

    implementation = "headrace.trainer.dense.pipeline:PipelineDense"
    own = {"pipeline": FOR_ONE}
    in_stages = True

    def refused(self, dense: "DenseSection") -> dict[str, bool]:
        return super().refused(dense) | {'buffers = "sync_bn"': dense.buffers == "sync_bn"}


DENSE_STRATEGIES = Registry(
    kind="dense strategy",
    group="headrace.dense_strategies",
    base=StrategyKind,
    own={
        "all_reduce": "trainer.dense_config:AllReduceKind",
        "local_sgd": "trainer.dense_config:LocalSgdKind",
        "sharded": "trainer.dense_config:ShardedKind",
        "shards": "trainer.dense_config:ShardsKind",
        "pipeline": "trainer.dense_config:PipelineKind",
    },
)

if TYPE_CHECKING:
    StrategyName = str
else:
    StrategyName = Literal[tuple(DENSE_STRATEGIES.names())]


def strategy_kind(name: str) -> StrategyKind:
    """The strategy of a name. Raises SpecError."""
    return DENSE_STRATEGIES.load(name)()


def _there(found: Mapping[str, bool]) -> str:
    return ", ".join(name for name, there in found.items() if there)


class DenseSection(Section):
    """How the dense parameters learn."""

    holds: ClassVar[Mapping[str, TextKind]] = {
        "offload": TextKind.NAME,
    }

    strategy: StrategyName = "all_reduce"
    """Place of the dense parameters. "all_reduce": on every trainer; gradients are summed over trainers. "local_sgd":
    on every trainer, which learns by itself; trainers average every k_steps steps and before each close. "sharded": as
    "all_reduce", and the optimizer's state is divided over trainers. "shards": on the shards, as rows; trainers push
    gradients and pull the parameters with the rows of each batch. "pipeline": each trainer has some layers of the
    model; the first one reads all events."""
    k_steps: int | None = Field(default=None, ge=1, le=1000)
    """With strategy = "local_sgd", which needs it: number of steps between two averages."""
    begin: Count = 0
    """With strategy = "local_sgd": number of steps at the beginning in which gradients are summed over trainers."""
    adaptive: bool = False
    """With strategy = "local_sgd": k_steps is the first interval. Later ones, at most 16 steps, shrink with the loss:
    ceil(k_steps * sqrt(loss / first loss * first learning rate / learning rate))."""
    group: PositiveCount | None = None
    """With strategy = "sharded": number of neighbouring trainers over which the state is divided; every such group has
    all of it. If it does not divide the number of trainers, the next lower number that does. Default: all trainers."""
    stage: Literal[1, 2, 3] | None = None
    """With strategy = "sharded": what is divided over trainers (the stages of ZeRO). 1 (default): the optimizer's
    state. 2: also gradients, which are summed by parts of bucket_bytes or more as soon as the backward pass has filled
    them. 3: also the parameters, of which a part is there as a whole while its layers are computed."""
    accumulate: int = Field(default=1, ge=1, le=1024)
    """Number of batches of each trainer that are learnt from in one step (gradient merge). A trainer pulls the rows of
    all of them at once, and runs the model on one after another; gradients of rows and dense parameters are summed over
    them and over trainers, and applied once. The last step of a pass may have fewer."""
    average: bool = True
    """Whether a step learns from the mean over all its samples. False: from that times the number of its batches on
    each trainer, as if the means of the batches were added."""
    optimizer: AnyDenseOptimizer = DenseAdam()
    """Optimizer of the dense parameters."""
    schedule: Schedule = Constant()
    """How the optimizer's learning rate changes with the number of samples or versions: "constant", "warmup_linear",
    "warmup_cosine", "exponential", "piecewise", "inverse_sqrt"."""
    clip_norm: Positive | None = None
    """Largest norm of the dense gradient of a step: that of the sum over trainers. With train.mode = "async" and "geo"
    each trainer clips its own."""
    slice_floats: int | None = Field(default=None, ge=1000, le=1 << 30)
    """With strategy = "shards": number of parameters in one message, in steps of 1,024. Shards learn the first ones and
    send them back while others are on their way. Unless set, all travel in one message, with the rows of the batch. No
    bit depends on it."""
    priority: Literal["sparse_first", "fifo"] = "sparse_first"
    """With slice_floats: order of the messages. "sparse_first": as the next forward pass needs them, so the rows of the
    batch, then the parameters from the first layer to the last. "fifo": as the backward pass is done with them, so the
    other way round."""
    buffers: Literal["rank0", "sync_bn"] = "rank0"
    """Buffers of the model, such as the statistics of BatchNorm. "rank0": every trainer has its own within a pass, and
    takes those of trainer 0 at its end. "sync_bn": BatchNorm has the statistics of all trainers' batches, as if one
    trainer had them all; each layer costs two small messages a step. Other buffers are as with "rank0"."""
    bucket_bytes: PositiveSize = BUCKET_BYTES
    """Size of the parts in which gradients are summed over trainers, at most 32MiB, a multiple of 64. With three
    trainers or more it changes how sums are rounded. With stage = 2 or 3 of "sharded" they are whole layers
    of at least this size in all."""
    overlap: bool = False
    """Whether gradients are summed over trainers while the backward pass still computes others, with the same result.
    A step that is skipped has then sent its gradients for nothing."""
    hierarchy: HierarchySection | None = None
    """With strategy = "all_reduce": gradients are summed within each machine first, and between machines then."""
    compression: Literal["none", "fp16", "bf16", "powersgd", "dgc"] = "none"
    """The part of its gradients that a trainer sends; the rest is added to its gradients of the next step. "fp16",
    "bf16": numbers of 16 bits. "powersgd": two narrow matrices for each matrix. "dgc": the largest numbers."""
    dgc: DgcSection | None = None
    """Settings of compression = "dgc"."""
    powersgd: PowerSgdSection | None = None
    """Settings of compression = "powersgd"."""
    pipeline: PipelineSection | None = None
    """Settings of strategy = "pipeline"."""

    recompute: RecomputeSection | None = None
    """Blocks of the model of which a trainer keeps the inputs alone; the rest is computed once more in the backward
    pass. It saves memory for time, and changes no bit."""
    offload: Literal["all"] | tuple[str, ...] = ()
    """Names of blocks, as in recompute, whose activations wait in the memory of the CPU for the backward pass. For
    GPUs. "all": every part of the model that has parameters."""

    @property
    def divides_gradients(self) -> bool:
        """Whether each trainer has only a part of the gradients."""
        return self.stage in (2, 3)

    @property
    def kind(self) -> StrategyKind:
        """The strategy."""
        return strategy_kind(self.strategy)

    def num_stages(self, num_trainers: int) -> int:
        """Number of neighbouring trainers, of so many, over which a model is divided: of each such group the first one
        alone reads events, those of all."""
        if not self.kind.in_stages:
            return 1
        return num_trainers if self.pipeline is None else self.pipeline.stages or num_trainers

    def check_trainers(self, num_trainers: int) -> None:
        """Raise SpecError for a number of trainers that the strategy cannot have."""
        if num_trainers % (stages := self.num_stages(num_trainers)):
            raise SpecError(
                f"{stages} trainers share a model, and {num_trainers} is no multiple of that: change it, or the number "
                "of trainers",
                "dense.pipeline.stages",
            )

    @model_validator(mode="after")
    def _belongs(self) -> "DenseSection":
        """Each setting of one strategy is there with that strategy only."""
        kind = self.kind
        kind.check(self)
        for name in DENSE_STRATEGIES.own:  # a package's strategy has no keys of its own
            for key, message in strategy_kind(name).own.items() if name != self.strategy else ():
                if getattr(self, key):
                    raise ValueError(message.format(key=key, own=name, chosen=self.strategy))
        if trouble := _there(kind.refused(self)):
            raise ValueError(f'strategy = "{self.strategy}" does not work with {trouble}')
        return self

    @model_validator(mode="after")
    def _compresses(self) -> "DenseSection":
        """Each compression has its own settings, and what works with it."""
        for name, value in {"dgc": self.dgc, "powersgd": self.powersgd}.items():
            if value is not None and self.compression != name:
                raise ValueError(f'{name} is for compression = "{name}", not for "{self.compression}": remove one')
        dgc = self.compression == "dgc"
        found = {
            "overlap, as a trainer chooses what it sends when the gradient is complete": self.overlap,
            "hierarchy, as trainers send what each of them chose": dgc and self.hierarchy is not None,
            f'optimizer.kind = "{self.optimizer.kind}", which needs all of a gradient': dgc and self.optimizer.whole,
        }
        if self.compression in ("dgc", "powersgd") and (trouble := _there(found)):
            raise ValueError(f'compression = "{self.compression}" does not work with {trouble}')
        return self

    @model_validator(mode="after")
    def _fits(self) -> "DenseSection":
        if not self.average and self.accumulate == 1:
            raise ValueError("average = false is for accumulate above 1")
        if self.buffers == "sync_bn" and self.accumulate > 1:
            raise ValueError(
                'buffers = "sync_bn" does not work with accumulate above 1, whose batches trainers do not compute in '
                "step"
            )
        if self.buffers == "sync_bn" and self.overlap:
            raise ValueError(
                'buffers = "sync_bn" does not work with overlap, as trainers meet in both during the backward pass'
            )
        if self.bucket_bytes > MAX_BUCKET_BYTES or self.bucket_bytes % BUCKET_STEP_BYTES:
            raise ValueError(f"bucket_bytes must be a multiple of {BUCKET_STEP_BYTES}, and at most 32MiB")
        if self.slice_floats is None and self.priority != "sparse_first":
            raise ValueError("priority is the order of messages of slice_floats floats: set that, too, or remove it")
        return self
