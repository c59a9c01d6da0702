"""The runtime seam: where workers run, and how they find each other.

A launcher starts the workers of one generation and holds a handle for each. Which workers there are is decided in
service.cluster.worker_plan, what their ends mean in service.cluster.supervision. Implementations are listed in
service.spec.launchers; tests/contract/test_launchers.py is the contract that each must pass.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from headrace.errors import Unavailable

PYTHON = (sys.executable, "-P", "-m")
"""-P: a file of the user's folder must not stand in for a package of Headrace."""
LAUNCHER = "launcher"
"""The name of the launcher among the names of workers, for its own lines."""
KILL_S = 30.0
"""Longest wait for a worker after SIGKILL. Beyond it the operating system is at fault."""
TAIL_LINES = 20
"""Last lines of output kept of each worker, to explain its death."""

UNREACHABLE = -1000
"""In place of an exit code: the launcher has heard nothing of a worker for longer than cluster.node_timeout."""

OnLine = Callable[[str, str], None]
"""Takes a worker's name and one line of its output. Called on a thread of the launcher."""
OnExit = Callable[[str, int], None]
"""Takes a worker's name and exit code (minus the signal's number; or UNREACHABLE). Called once, on a thread of the
launcher."""


class CannotStart(Unavailable):
    """A worker cannot be started, and no worker of the same call was."""

    def __init__(self, worker: str, reason: object) -> None:
        super().__init__(f"{worker} cannot be started: {reason}")
        self.worker, self.reason = worker, str(reason)


class WorkerRole(StrEnum):
    """The work of a process. Its value begins the worker's name."""

    SHARD = "shard"
    TRAINER = "trainer"
    PREDICTOR = "predictor"
    READER = "reader"


MODULES = {
    WorkerRole.SHARD: ("headrace.pserver.server.shard_server",),
    WorkerRole.READER: ("headrace.dataset.reader.server", "headrace.dataset.features.json_decoder", "pyarrow.compute"),
    WorkerRole.TRAINER: (
        "headrace.trainer.train.assembly",
        "headrace.dataset.features.json_decoder",
        "headrace.rpc.role",
        "pyarrow.compute",
    ),
}
"""The modules that workers of a role import, also those that they import late."""
OF_ANY_JOB = [module for role in MODULES for module in MODULES[role]]
"""The modules that the workers of some job import."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Resources that a worker may use. None: the launcher sets no limit and reserves nothing."""

    cores: float | None = None
    memory_bytes: int | None = None
    gpus: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """One worker: `<command> --config <its configuration as a file>`."""

    role: WorkerRole
    number: int
    """From 0 within its role."""
    command: tuple[str, ...]
    config: Mapping[str, Any] = field(repr=False)
    """The configuration as JSON. It holds secrets: only the worker's user may read it."""
    folder: Path
    """The working directory of the worker: the folder of the job file."""
    run_folder: Path
    """Private files of this generation: configurations and sockets."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Digests of the files that it reads, by path (headrace.shared_folder): its machine must have the same ones."""
    resources: Resources = Resources()

    @property
    def name(self) -> str:
        """For people and for events: "shard-0", "trainer-1"."""
        return f"{self.role}-{self.number}"


class WorkerHandle(Protocol):
    """One worker that was started. Any thread, but not from inside `on_exit`."""

    name: str

    def poll(self) -> int | None:
        """None while the worker runs; its exit code, or minus the signal's number, once it and its group are gone.

        UNREACHABLE for a worker that may still run, and is refused everywhere.
        """
        ...

    def terminate(self) -> None:
        """Ask the worker to end (SIGTERM). Returns at once. Without effect after its end."""
        ...

    def kill(self, within_s: float = KILL_S) -> bool:
        """End the worker and everything that it started, also where it is stopped.

        Returns True when all of it is gone or unreachable for cluster.node_timeout, `on_exit` was called and its last
        lines are read; False where that takes longer than `within_s`. 0 begins the end and does not wait. May be
        repeated.
        """
        ...

    def last_lines(self) -> list[str]:
        """The last TAIL_LINES lines of its output."""
        ...


class Rendezvous(Protocol):
    """Where the workers of the newest generation tell their addresses, and renew their certificates."""

    def address(self, spec: WorkerSpec) -> str | None:
        """The address of the worker; None until the worker has told it."""
        ...

    def unrenewed(self) -> dict[str, datetime]:
        """The workers whose certificates were not renewed in time, with the time of the last renewal."""
        ...


class Launcher(Protocol):
    """Starts workers. Those that it started end with the process that holds it, however that ends."""

    @property
    def rendezvous(self) -> Rendezvous:
        """Where the workers of its generations meet."""
        ...

    def prepare(self, specs: Sequence[WorkerSpec], generation: int) -> None:
        """Expect `specs`, all workers of a generation, at the rendezvous; workers of older ones are refused.

        Raises ValueError for a generation older than one before, and Unwritable.
        """
        ...

    def waits_for(self) -> str | None:
        """The workers of the generation in preparation for which no place to run is known yet, in words; or None.

        `start` is called once it is None. Readers are waited for as long as cluster.node_timeout once there are places
        for all other workers, and for one of them.
        """
        ...

    def has_place(self, spec: WorkerSpec) -> bool:
        """Whether this worker of the generation, which does not run, could be started now."""
        ...

    def end(self, code: int, reason: str) -> None:
        """The job has ended with this exit code of its launcher. No worker runs any more, and none is started."""
        ...

    def start(
        self, specs: Sequence[WorkerSpec], generation: int, *, on_line: OnLine, on_exit: OnExit
    ) -> list[WorkerHandle]:
        """Start all of `specs`, some workers of the generation in preparation, or none: handles in their order.

        A reader that has ended, or that had no place, may be started while the trainers run: this returns at once then.
        Deaths are reported through `on_exit` rather than polled, so that one is noticed at once. A death may be
        reported before this returns. Raises CannotStart, which names the worker, and Unwritable; then every worker of
        this call is gone and none is reported. Raises ValueError for another generation than the one in preparation.
        """
        ...


@runtime_checkable
class SpareLauncher(Launcher, Protocol):
    """A launcher with room for a second generation, which stands by while a job is resized.

    Without one, a job that is resized ends its workers and then starts the new ones.
    """

    def beside(self) -> AbstractContextManager[Launcher]:
        """A launcher of its own for another generation that runs at the same time. One thread uses both."""
        ...
