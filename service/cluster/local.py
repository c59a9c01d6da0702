"""The local launcher: workers as child processes of this one, which meet at a socket in their private folder.

service.cluster.child starts the single process. What brings gRPC is imported late: every check of a job file loads this
module.
"""

import secrets
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Self

from headrace.extras import require
from headrace.launcher_contact import LauncherContact
from headrace.printable import printable
from headrace.service.cluster.child import Starter, WorkerProcess, local_starter
from headrace.service.cluster.run_folder import write_private
from headrace.service.cluster.runtime import (
    KILL_S,
    TAIL_LINES,
    CannotStart,
    OnExit,
    OnLine,
    WorkerHandle,
    WorkerRole,
    WorkerSpec,
)
from headrace.service.cluster.store import IDENTITY
from headrace.service.spec.config import ClusterSection
from headrace.service.spec.job import LoadedJob
from headrace.service.spec.launchers import JobLauncher

if TYPE_CHECKING:
    from headrace.identity.authority import Authority
    from headrace.rpc.rendezvous import RendezvousServer

MAX_LINE_CHARACTERS = 4096
"""A longer line of output is cut into several."""
LAST_LINES_S = 2.0
"""Longest wait for output after a process and its group are gone."""


class LocalWorker:
    """A worker process of this machine, with two threads: one reads its output, one waits for its end.

    See WorkerHandle.
    """

    def __init__(self, name: str, child: WorkerProcess, on_line: OnLine, on_exit: OnExit) -> None:
        self.name = name
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._child, self._on_line, self._on_exit = child, on_line, on_exit
        self._code: int | None = None
        self._reader = threading.Thread(target=self._read, name=f"{name}-output", daemon=True)
        self._waiter = threading.Thread(target=self._wait, name=f"{name}-wait", daemon=True)
        self._reader.start()
        self._waiter.start()

    def poll(self) -> int | None:
        return self._code

    def terminate(self) -> None:
        self._child.terminate()

    def kill(self, within_s: float = KILL_S) -> bool:
        self._child.kill()
        self._waiter.join(within_s)
        return not self._waiter.is_alive()

    def last_lines(self) -> list[str]:
        return list(self._tail)

    def _read(self) -> None:
        with self._child.output as output:
            while line := output.readline(MAX_LINE_CHARACTERS):
                text = printable(line.rstrip("\n"))
                self._tail.append(text)
                self._on_line(self.name, text)

    def _wait(self) -> None:
        self._code = self._child.wait()
        self._on_exit(self.name, self._code)  # before its last lines are read, so that deaths are reported in order
        self._child.release()
        self._reader.join(LAST_LINES_S)


class ProcessLauncher(JobLauncher):
    """Starts workers as processes of this machine. See SpareLauncher. A context. One thread."""

    same_machine = True

    @classmethod
    def check(cls, cluster: ClusterSection) -> None:
        require("torch", "training")

    @classmethod
    @contextmanager
    def of_job(cls, job: LoadedJob) -> Iterator[Self]:
        from headrace.identity.authority import open_authority
        from headrace.service.cluster.worker_plan import preloaded

        cluster = job.spec.cluster
        signs = open_authority(job.store / IDENTITY, job.spec.name) if cluster.leaves_machine else None
        with local_starter(preloaded(cluster)) as starter, cls(starter, signs) as launcher:
            yield launcher

    def __init__(self, starter: Starter, authority: "Authority | None" = None) -> None:
        """`authority`: signs the certificates of workers that listen for other machines."""
        from headrace.service.cluster.meeting import Meeting

        self._starter, self._authority = starter, authority
        self._newest = 0
        self._server: RendezvousServer | None = None
        self._secret = secrets.token_hex(32)
        self.rendezvous = Meeting(authority)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()

    @property
    def starter(self) -> Starter:
        """Starts other processes on this machine as it starts workers."""
        return self._starter

    def prepare(self, specs: Sequence[WorkerSpec], generation: int) -> None:
        if generation < self._newest:
            raise ValueError(f"generation {generation} is older than {self._newest}, which was started before")
        from headrace.rpc.rendezvous import RendezvousServer

        self._newest = generation
        self.rendezvous.begin(specs, generation)
        if self._server is not None:
            self._server.close()
        socket = specs[0].run_folder / "launcher.socket"
        self._server = RendezvousServer(self.rendezvous, self._secret, len(specs), socket=socket)

    def beside(self) -> "ProcessLauncher":
        return ProcessLauncher(self._starter, self._authority)

    def waits_for(self) -> str | None:
        """This machine is always there."""
        return None

    def has_place(self, spec: WorkerSpec) -> bool:
        return True

    def end(self, code: int, reason: str) -> None:
        """Workers that are gone need not hear of it."""

    def start(
        self, specs: Sequence[WorkerSpec], generation: int, *, on_line: OnLine, on_exit: OnExit
    ) -> list[WorkerHandle]:
        if generation != self._newest or self._server is None:
            raise ValueError(f"generation {generation} is not in preparation; the newest is {self._newest}")
        self.rendezvous.expect_again(spec.name for spec in specs)
        children: list[WorkerProcess] = []
        with ExitStack() as undo:
            for spec in specs:
                contact = LauncherContact(
                    address=self._server.address, secret=self._secret, worker=spec.name, generation=generation
                )
                children.append(start_process(self._starter, spec, contact))
                undo.callback(_end, spec.name, children[-1])
            undo.pop_all()
        return [LocalWorker(spec.name, child, on_line, on_exit) for spec, child in zip(specs, children, strict=True)]


def start_process(starter: Starter, spec: WorkerSpec, contact: LauncherContact) -> WorkerProcess:
    """Start a worker whose private files are in its run folder. Raises CannotStart, Unwritable."""
    path = spec.run_folder / f"{spec.name}.json"
    config = dict(spec.config)
    config["launcher"] = contact.model_dump(mode="json")
    if spec.role is not WorkerRole.PREDICTOR:  # nobody calls a predictor
        config["socket"] = str(spec.run_folder / f"{spec.name}.socket")
    write_private(path, config)
    try:
        return starter.start((*spec.command, "--config", str(path)), spec.folder)
    except OSError as error:
        raise CannotStart(spec.name, error) from error


def _end(name: str, child: WorkerProcess) -> None:
    """End a worker of a start that failed, without any report."""
    LocalWorker(name, child, lambda _name, _text: None, lambda _name, _code: None).kill()
