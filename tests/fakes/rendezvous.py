"""A launcher's rendezvous for workers that a test starts by hand."""

import time
from collections.abc import Callable
from pathlib import Path

from headrace.deadline import Deadline
from headrace.identity.authority import Authority
from headrace.launcher_contact import LauncherContact
from headrace.rpc.rendezvous import RendezvousServer
from headrace.service.cluster.meeting import Meeting
from headrace.service.cluster.runtime import WorkerRole, WorkerSpec

SECRET = "of the launcher"


class RendezvousHere:
    """Expects `workers`, such as "shard-0", in one generation. A context."""

    def __init__(self, folder: Path, *workers: str, generation: int = 1, authority: Authority | None = None) -> None:
        self._generation = generation
        self._specs = {name: _spec(name, folder) for name in workers}
        self.meeting = Meeting(authority)
        self.meeting.begin(list(self._specs.values()), generation)
        self._server = RendezvousServer(self.meeting, SECRET, len(workers), socket=folder / "launcher.socket")

    def __enter__(self) -> "RendezvousHere":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving."""
        self._server.close()

    def contact(self, worker: str, **changes) -> LauncherContact:
        """For the configuration of a worker."""
        told = {"address": self._server.address, "secret": SECRET, "worker": worker, "generation": self._generation}
        return LauncherContact(**(told | changes))

    def address(self, worker: str, alive: Callable[[], None] = lambda: None, within_s: float = 60.0) -> str:
        """The address that `worker` tells; `alive` raises where its process has ended."""
        deadline = Deadline.after(within_s)
        while (found := self.meeting.address(self._specs[worker])) is None:
            alive()
            deadline.check(f"waiting for {worker}")
            time.sleep(0.005)
        return found

    def forget(self) -> None:
        """Expect the workers anew."""
        self.meeting.begin(list(self._specs.values()), self._generation)


def _spec(name: str, folder: Path) -> WorkerSpec:
    role, _, number = name.partition("-")
    return WorkerSpec(
        role=WorkerRole(role), number=int(number), command=(), config={}, folder=folder, run_folder=folder
    )
