"""The section `cluster` of a job spec: how many processes a job has, where they listen, and how often they restart."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from headrace.address import LOOPBACK, LOOPBACK_INTERFACE, format_address, is_loopback, parse_address
from headrace.config import Duration, GrownSection, PositiveDuration, Section, Size
from headrace.pserver.config import check_holds_rows
from headrace.service.spec.launchers import LauncherName
from headrace.text_kinds import TextKind

NOBODY_JOINS = format_address(LOOPBACK, 0)
"""Default of `cluster.listen`: no other machine reaches it, and nobody knows the port before."""


class WorkerResources(Section):
    """Resources that a Ray cluster reserves for one process, or the limits of its container on Kubernetes."""

    cores: float = Field(default=1.0, gt=0, le=4096)
    """Processors. A trainer has as many threads of torch, and one at least."""
    memory: Size = 0
    """Memory that must be free on its node; 0: any. Ray counts it and does not enforce it."""
    gpus: int = Field(default=0, ge=0, le=64)
    """GPUs of its own: it sees no others. With 0 it reserves none, and sees all of its node."""


class RoleResources(GrownSection):
    """Resources of each process, by role."""

    later: ClassVar[frozenset[str]] = frozenset({"reader"})

    trainer: WorkerResources = WorkerResources()
    shard: WorkerResources = WorkerResources()
    reader: WorkerResources = WorkerResources()


MAX_TRAINERS = 64
"""Most trainers of a job."""


class TrainerRange(Section):
    """An elastic number of trainers: as many as there are machines for."""

    min: int = Field(ge=1, le=MAX_TRAINERS)
    """The job waits where fewer can run."""
    max: int = Field(ge=2, le=MAX_TRAINERS)
    """Further workers stand by as spares. `headrace resize` sets a lower bound than this while the job runs."""

    @model_validator(mode="after")
    def _is_a_range(self) -> "TrainerRange":
        if self.min >= self.max:
            raise ValueError(f"min = {self.min} is not below max = {self.max}; for a fixed number write trainers = 4")
        return self


NUMBER, RANGE = "int", "dict[str, int]"
"""The alternatives of a number of trainers; headrace.validation leaves such names out of messages."""


def _kind_of_number(value: Any) -> str:
    return RANGE if isinstance(value, dict | TrainerRange) else NUMBER


NumTrainers = Annotated[
    Annotated[int, Field(ge=1, le=MAX_TRAINERS), Tag(NUMBER)] | Annotated[TrainerRange, Tag(RANGE)],
    Discriminator(_kind_of_number),
]


class ClusterSection(GrownSection):
    """How many processes of each role."""

    later: ClassVar[frozenset[str]] = frozenset({"elastic_wait", "readers"})

    holds: ClassVar[Mapping[str, TextKind]] = {
        "interface": TextKind.NETWORK,
        "listen": TextKind.NETWORK,
        "ray_address": TextKind.RAY_CLUSTER,
    }

    trainers: NumTrainers = 1
    """Trainer processes. { min = 2, max = 8 } is an elastic number, for workers that join from elsewhere: one that is
    lost for longer than `node_timeout` makes the job go on with fewer, and those that join make it grow."""
    elastic_wait: Duration = Field(default=30.0, le=3600)
    """With an elastic number of trainers: how long the first of new workers waits for others that may follow. Then all
    of them are taken together, at the next close."""
    shards: int | None = Field(default=None, ge=0, le=64)
    """Shard processes; 0: the shard lives in the trainer. Unless set: 0 with one trainer, else 1. With
    `train.rows = "device"` and several trainers: as many as trainers, each in the process of one."""
    readers: int = Field(default=0, ge=0, le=64)
    """Reader processes, which read the source and run the pipe for the trainers, also on machines of their own; the
    same samples in the same order. 0: each trainer does so itself."""
    max_message: Size = 256 << 20
    """Longest message between a trainer and a shard. The rows of one step on one shard must fit."""
    wire: Literal["float32", "bfloat16"] = "float32"
    """How pulled rows and pushed gradients travel between trainers and shards. "bfloat16" halves their bytes and rounds
    them, with shards = 0, too. Stored rows, their optimizers and sums over trainers stay float32."""
    max_restarts: int = Field(default=5, ge=0, le=1000)
    """Restarts of the workers within `restart_window` after which the next death ends the job. 0: never restart."""
    restart_window: Duration = 600.0
    """The time over which restarts are counted."""
    interface: str = Field(default=LOOPBACK_INTERFACE, min_length=1, max_length=15)
    """Network interface, such as "eth0", at which shards and trainers listen and over which they reach each other; the
    same name on every machine. "lo": this machine alone. Any other one needs `trust_interface`."""
    listen: str = NOBODY_JOINS
    """Address of the launcher, HOST:PORT, at which workers and replicas of other machines join. Port 0 takes a free
    one. Launcher "local" listens for replicas alone, and only where this is set."""
    trust_interface: bool = False
    """Whether everybody on the network of `interface` is trusted. Calls and rows are encrypted and both ends prove
    their identity. Collectives of the trainers (gloo, NCCL) are neither encrypted nor authenticated by their makers:
    on a network that strangers reach they can be read and changed."""
    launcher: LauncherName = "local"
    """"local": processes of this machine; "external": started by you, by torchrun or by an orchestrator, as
    `headrace worker --join`; "ray": placed by a Ray cluster, of which this machine is a node."""
    node_timeout: PositiveDuration = 30.0
    """A worker of the external launcher, or of Ray, that is unreachable for so long counts as dead; so does the head
    for a worker, and a shard on another machine for a trainer."""
    ray_address: str | None = None
    """Address of the Ray cluster, HOST:PORT, as its head tells it. Launcher "ray" needs it."""
    resources: RoleResources = RoleResources()
    """Resources of each process. Read by launcher "ray" and by `headrace render kubernetes`."""

    @model_validator(mode="after")
    def _reachable(self) -> "ClusterSection":
        check_holds_rows(self.shards, self.num_trainers)
        return self

    @model_validator(mode="after")
    def _trusted(self) -> "ClusterSection":
        if self.leaves_machine and not self.trust_interface:
            where = (
                f"interface = {self.interface!r}"
                if self.interface != LOOPBACK_INTERFACE
                else f"listen = {self.listen!r}"
            )
            raise ValueError(
                f"{where} opens the job to other machines; the collectives of its trainers are neither encrypted nor "
                "authenticated, so everybody on that network can read and change them: set trust_interface = true if "
                "that network is yours alone"
            )
        return self

    @model_validator(mode="after")
    def _reached_by_all(self) -> "ClusterSection":
        if self.interface == LOOPBACK_INTERFACE and self.leaves_machine:
            raise ValueError(
                f"listen = {self.listen!r} lets workers of other machines join, and at interface = "
                f"{self.interface!r} no worker can reach those of another machine: set interface, such as eth0"
            )
        return self

    @model_validator(mode="after")
    def _knows_ray(self) -> "ClusterSection":
        if self.launcher == "ray" and self.ray_address is None:
            raise ValueError('launcher = "ray" needs ray_address: HOST:PORT of the cluster, as `ray start --head` says')
        return self

    @field_validator("listen")
    @classmethod
    def _is_an_address(cls, listen: str) -> str:
        parse_address(listen, format_address(LOOPBACK, 7070))
        return listen

    @field_validator("ray_address")
    @classmethod
    def _is_an_address_of_ray(cls, ray_address: str | None) -> str | None:
        if ray_address is not None:
            parse_address(ray_address, format_address(LOOPBACK, 6379))
        return ray_address

    @field_validator("max_message")
    @classmethod
    def _within_grpc(cls, max_message: int) -> int:
        if not 1 << 20 <= max_message < 2 << 30:
            raise ValueError("must be at least 1MiB and less than 2GiB")
        return max_message

    def resized(self, numbers: Mapping[str, int]) -> Self:
        """The section with the numbers of workers that a resize gave, by the path of their key.

        Where the file has changed one of them since, several trainers have one shard at least.
        """
        trainers = numbers.get("cluster.trainers", numbers.get("cluster.trainers.max", self.num_trainers))
        shards = numbers.get("cluster.shards", self.shards)
        return self.model_copy(update={"trainers": trainers, "shards": (shards or None) if trainers > 1 else shards})

    @property
    def num_trainers(self) -> int:
        """Trainer processes; of an elastic number, the most."""
        return self.trainers.max if isinstance(self.trainers, TrainerRange) else self.trainers

    @property
    def elastic(self) -> TrainerRange | None:
        """The bounds of an elastic number of trainers."""
        return self.trainers if isinstance(self.trainers, TrainerRange) else None

    @property
    def leaves_machine(self) -> bool:
        """Whether processes of the job listen for other machines."""
        return self.interface != LOOPBACK_INTERFACE or not is_loopback(parse_address(self.listen)[0])

    @property
    def num_workers(self) -> int:
        """All processes of a generation."""
        return self.num_trainers + self.num_shards + self.readers

    @property
    def num_shards(self) -> int:
        """Shard processes to start; 0: the shard is embedded."""
        if self.shards is not None:
            return self.shards
        return 0 if self.num_trainers == 1 else 1
