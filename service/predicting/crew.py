"""The processes of one prediction: shards that hold the rows, workers that predict.

Started, watched and ended here. None is left when the context ends, and none outlives this process: each watches its
standard input, which only this process holds.
"""

import queue
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dataset.schema import Schema
from millrace.deadline import Deadline
from millrace.errors import DeadlineExceeded, MillraceError, SpecError, Unavailable
from millrace.lifecycle import ExitCode
from millrace.secrecy import revealed, with_secrets
from pserver.remote import RemoteShards
from service.launcher.child import Spawner
from service.launcher.plan import PYTHON
from service.launcher.process import OnLine, Worker
from service.launcher.run_folder import write_private
from service.launcher.supervision import how_it_ended
from service.spec import LoadedJob
from trainer.commits import read_commit
from trainer.predict.config import PredictionRequest

START_S, RESTORE_S, KILL_S = 120.0, 3600.0, 30.0
"""How long shards may take to come up, to read the rows, and processes to be gone after SIGKILL."""
LOOK_S = 0.1
"""How often who waits looks whether it is to end."""
ERROR = "error: "
"""Begins the line by which a worker says, for people, why it ended."""


class PredictionFailed(MillraceError):
    """A worker ended on an error that would come again."""


class PredictionCancelled(MillraceError):
    """It was called off; what is there stays, and a rerun goes on."""

    def __init__(self) -> None:
        super().__init__("the prediction was called off; a rerun goes on from the parts that are there")


class WorkerDied(Unavailable):
    """A worker ended for a reason that may pass."""


class Crew:
    """See module docstring. One thread; `on_line` is called on others."""

    def __init__(
        self, job: LoadedJob, live: Path, private: Path, on_line: OnLine, check: Callable[[], None], *, beside: bool
    ) -> None:
        """Rows lie in the folder `live`, what workers are told in `private`; both are new, and for their owner only.

        `check` raises where the work is called off; `beside`: all others go first.
        """
        self._job, self._live, self._private, self._on_line, self._check = job, live, private, on_line, check
        self._modules = ("trainer.predict.beside",) if beside else ()
        self._spawner, self._secret = Spawner(), secrets.token_hex(32)
        self._workers: dict[str, Worker] = {}
        self._ends: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers.values():
            worker.kill()
        deadline = Deadline.after(KILL_S)
        for worker in self._workers.values():
            worker.join(deadline.left_s())

    def run(
        self, request: PredictionRequest, output: Path, commit: Path, cores: float, tick: Callable[[], None]
    ) -> None:
        """Predict to the end. Raises what ended it; `tick` is called while it goes on."""
        addresses = self._start_shards(request, commit) if request.num_shards else []
        told = {
            **{
                "job": with_secrets(self._job.full, self._job.secrets),
                "folder": str(self._job.folder),
                "output": str(output),
            },
            **{"commit": str(commit), "request": revealed(request), "shards": addresses, "secret": self._secret},
            **{"cores": cores / request.trainers, "max_message": self._job.spec.cluster.max_message},
        }
        names = [f"predictor-{rank}" for rank in range(request.trainers)]
        for rank, name in enumerate(names):
            self._start(name, "trainer.predict", {**told, "rank": rank, "live": str(self._live / "live")})
        left = set(names)
        while left:
            left -= self._look()
            tick()

    def _start_shards(self, request: PredictionRequest, commit: Path) -> list[str]:
        """Start them, and have them read the rows of the commit."""
        spec, num_shards = self._job.spec, request.num_shards
        files = [self._private / f"shard-{shard}.address" for shard in range(num_shards)]
        for shard, file in enumerate(files):
            config = {
                **{"shard": shard, "num_shards": num_shards, "num_ranks": request.trainers, "seed": spec.seed},
                "tables": {table: section.model_dump(mode="json") for table, section in spec.tables.items()},
                "groups": {slot.name: slot.group for slot in Schema.of(spec.slots).sparse},
                **{"secret": self._secret, "address_file": str(file), "live": str(self._live / f"live-{shard}")},
                "max_message": spec.cluster.max_message,
            }
            self._start(f"shard-{shard}", "pserver", config)
        deadline = Deadline.after(START_S)
        while not all(file.exists() for file in files):
            self._look()
            if deadline.passed():
                raise DeadlineExceeded(f"shards did not come up within {START_S:g} s")
        addresses = [file.read_text() for file in files]
        found = read_commit(commit)
        shards = RemoteShards(
            addresses,
            spec.tables,
            rank=0,
            world=request.trainers,
            generation=1,
            secret=self._secret,
            deadline=Deadline.after(START_S),
            max_message_bytes=spec.cluster.max_message,
        )
        try:
            shards.restore(found.folder, found.shards, found.version, Deadline.after(RESTORE_S))
        finally:
            shards.close()
        return addresses

    def _start(self, name: str, module: str, config: Mapping[str, Any]) -> None:
        path = self._private / f"{name}.json"
        write_private(path, config)
        command = (*PYTHON, *self._modules, module, "--config", str(path))
        try:
            child = self._spawner.start(command, self._job.folder)
        except OSError as error:
            raise Unavailable(f"{name} cannot be started: {error}") from error
        self._workers[name] = Worker(name, child, self._on_line, lambda who, code: self._ends.put((who, code)))

    def _look(self) -> set[str]:
        """Wait a moment; workers that have ended well. Raises for any other end, and where it is called off."""
        self._check()
        try:
            name, code = self._ends.get(timeout=LOOK_S)
        except queue.Empty:
            return set()
        worker = self._workers[name]
        worker.join(KILL_S)
        if code == ExitCode.DRAINED and not name.startswith("shard-"):
            return {name}
        raise self._error(name, code, list(worker.tail))

    @staticmethod
    def _error(name: str, code: int, tail: list[str]) -> MillraceError:
        """What a worker's end means for who asked."""
        begins = max((place for place, line in enumerate(tail) if line.startswith(ERROR)), default=None)
        said = "\n".join(tail[begins:]).removeprefix(ERROR) if begins is not None else ""
        if code == ExitCode.BAD_CONFIG:
            return SpecError(said or f"{name}: {how_it_ended(code)}")
        if code == ExitCode.FAILED:
            return PredictionFailed(said or f"{name}: {how_it_ended(code)}")
        last = said or "\n".join(tail)
        return WorkerDied(f"{name} ended first: {how_it_ended(code)}; its last words:\n{last or '(none)'}")
