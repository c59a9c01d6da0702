"""The section `cluster` of a job spec: how many processes a job has, where they listen, and how often they restart."""

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from headrace.address import LOOPBACK, LOOPBACK_INTERFACE, format_address, is_loopback, parse_address
from headrace.config import Duration, PositiveDuration, Section, Size
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


class RoleResources(Section):
    """Resources of each process, by role."""

    trainer: WorkerResources = WorkerResources()
    shard: WorkerResources = WorkerResources()


class ClusterSection(Section):
    """How many processes of each role."""

    holds: ClassVar[Mapping[str, TextKind]] = {
        "interface": TextKind.NETWORK,
        "listen": TextKind.NETWORK,
        "ray_address": TextKind.RAY_CLUSTER,
    }

    trainers: int = Field(default=1, ge=1, le=64)
    """Trainer processes."""
    shards: int | None = Field(default=None, ge=0, le=64)
    """Shard processes; 0: the shard lives in the trainer. Unless set: 0 with one trainer, else 1."""
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
        if self.shards == 0 and self.trainers > 1:
            raise ValueError(
                f"shards = 0 keeps the rows inside the one trainer; {self.trainers} trainers need shards = 1 or more"
            )
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
        trainers = numbers.get("cluster.trainers", self.trainers)
        shards = numbers.get("cluster.shards", self.shards)
        return self.model_copy(update={"trainers": trainers, "shards": (shards or None) if trainers > 1 else shards})

    @property
    def leaves_machine(self) -> bool:
        """Whether processes of the job listen for other machines."""
        return self.interface != LOOPBACK_INTERFACE or not is_loopback(parse_address(self.listen)[0])

    @property
    def num_shards(self) -> int:
        """Shard processes to start; 0: the shard is embedded."""
        if self.shards is not None:
            return self.shards
        return 0 if self.trainers == 1 else 1
