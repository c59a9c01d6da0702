"""The section `dense` of a job spec: how the gradients of all trainers become dense parameters.

`trainer.spec.dense_rules` checks it against the other sections.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from headrace.config import Count, PositiveCount, PositiveSize, Section
from headrace.pserver.config import Positive
from headrace.renamed_keys import Renamed, RenamedKey
from headrace.text_kinds import TextKind
from headrace.trainer.dense_optimizers import AnyDenseOptimizer, DenseAdam
from headrace.trainer.rate_schedules import Constant, Schedule

RENAMED_TO_DENSE: Renamed = {
    "train.dense": RenamedKey("dense.strategy", {"allreduce": "all_reduce"}),
    "train.accumulate": RenamedKey("dense.accumulate"),
    "train.dense_optimizer": RenamedKey("dense.optimizer"),
    "train.clip_norm": RenamedKey("dense.clip_norm"),
}
"""Keys of other sections before there was a section `dense`."""


MAX_ADAPTIVE = 16
"""Most steps between two averages that adapt to the loss."""
MAX_BUCKET_BYTES, BUCKET_STEP_BYTES = 4 << 20, 64


class DgcSection(Section):
    """Deep gradient compression (Lin et al. 2018): each trainer sends its largest sums of gradients only."""

    sparsity: float = Field(default=0.999, ge=0, lt=1)
    """Share of the dense parameters of which a trainer sends nothing in a step. 0: it sends all."""
    warmup_steps: Count = 0
    """Number of steps at the beginning in which the sparsity rises to that, in five stages: the share that is sent
    falls by the same factor at each."""


class PowerSgdSection(Section):
    """PowerSGD (Vogels et al. 2019): the gradient of a matrix travels as the product of two narrow matrices."""

    rank: int = Field(default=4, ge=1, le=64)
    """Number of columns of the narrow matrices. More is more exact, and more bytes."""


class PipelineSection(Section):
    """Stages of the model on the trainers, through which the parts of a batch pass one after another."""

    micro_batches: int = Field(default=4, ge=1, le=256)
    """Number of equal parts of a batch. While one trainer computes a part, the next one computes the part before."""
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """Order of the work. "1f1b": a trainer computes the backward pass of a part as soon as it can, so it keeps the
    activations of at most as many parts as there are trainers. "gpipe": all forward passes first. No bit depends on it.
    With fewer parts than trainers it is "gpipe"."""


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


def _there(found: Mapping[str, bool]) -> str:
    return ", ".join(name for name, there in found.items() if there)


class DenseSection(Section):
    """How the dense parameters learn."""

    holds: ClassVar[Mapping[str, TextKind]] = {
        "offload": TextKind.NAME,
    }

    strategy: Literal["all_reduce", "local_sgd", "sharded", "shards", "pipeline"] = "all_reduce"
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
    """Largest norm of the dense gradient."""
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
    bucket_bytes: PositiveSize = MAX_BUCKET_BYTES
    """Size of the parts in which gradients are summed over trainers, at most 4MiB, a multiple of 64. With three
    trainers or more it changes how sums are rounded."""
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

    def _not_on_shards(self) -> str:
        """The settings that need all dense gradients in one place, in words; empty without them."""
        of_rows = self.optimizer.of_rows()
        found = {
            "overlap": self.overlap,
            "hierarchy": self.hierarchy is not None,
            "compression": self.compression != "none",
            "clip_norm, which needs the gradients of all slices": self.clip_norm is not None,
            str(of_rows): isinstance(of_rows, str),
            "schedule, since rates of rows change with `headrace set` only": not isinstance(self.schedule, Constant),
        }
        return _there(found)

    @model_validator(mode="after")
    def _belongs(self) -> "DenseSection":
        """Each setting of one strategy is there with that strategy only."""
        if self.strategy == "local_sgd" and self.k_steps is None:
            raise ValueError('strategy = "local_sgd" needs k_steps, the number of steps between two averages')
        if self.adaptive and self.k_steps is not None and self.k_steps > MAX_ADAPTIVE:
            raise ValueError(f"k_steps is {self.k_steps}; with adaptive at most {MAX_ADAPTIVE}")
        given = {
            "k_steps": (self.k_steps, "local_sgd"),
            "begin": (self.begin, "local_sgd"),
            "adaptive": (self.adaptive, "local_sgd"),
            "group": (self.group, "sharded"),
            "pipeline": (self.pipeline, "pipeline"),
        }
        for name, (value, strategy) in given.items():
            if value and self.strategy != strategy:
                raise ValueError(f'{name} is for strategy = "{strategy}", not for "{self.strategy}": remove one')
        if self.strategy in ("local_sgd", "sharded", "pipeline") and (trouble := self._not_with_parts()):
            raise ValueError(f'strategy = "{self.strategy}" does not work with {trouble}')
        return self

    def _not_with_parts(self) -> str:
        """The settings that "local_sgd", "sharded" or "pipeline" does not have, in words; empty without them."""
        stages = self.strategy == "pipeline"
        found = {
            "overlap": self.overlap,
            "hierarchy": self.hierarchy is not None,
            "compression": self.compression != "none",
            "bucket_bytes, which is for all_reduce": self.bucket_bytes != MAX_BUCKET_BYTES,
            f'optimizer.kind = "{self.optimizer.kind}", which needs whole parameters': self.optimizer.whole
            and self.strategy == "sharded",
            "accumulate, as pipeline.micro_batches divides a batch": stages and self.accumulate > 1,
            'buffers = "sync_bn"': stages and self.buffers == "sync_bn",
        }
        return _there(found)

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
            raise ValueError(f"bucket_bytes must be a multiple of {BUCKET_STEP_BYTES}, and at most 4MiB")
        if self.strategy == "shards" and (trouble := self._not_on_shards()):
            raise ValueError(f'strategy = "shards" does not work with {trouble}')
        if self.strategy != "shards" and self.slice_floats is not None:
            raise ValueError(f'slice_floats is for strategy = "shards"; "{self.strategy}" has no slices: remove it')
        if self.slice_floats is None and self.priority != "sparse_first":
            raise ValueError("priority is the order of messages of slice_floats floats: set that, too, or remove it")
        return self
