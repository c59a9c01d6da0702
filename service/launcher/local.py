"""Runs a job's workers as child processes of this one, on this machine.

Starts shards, then trainers; carries out what service.launcher.supervision decides. A worker watches its standard
input, which closes when this process is gone, however it died: then it kills itself and what it started.
"""

import queue
import time
from collections.abc import Mapping
from typing import Any, Protocol, assert_never

from millrace.deadline import Deadline
from millrace.lifecycle import on_stop_signal
from service.launcher.chief import ChiefLine
from service.launcher.plan import JobPlan, WorkerPlan
from service.launcher.process import OnLine, Worker
from service.launcher.run_folder import write_private
from service.launcher.supervision import (
    Drain,
    Effect,
    Event,
    Exited,
    Kill,
    Limits,
    Outcome,
    Started,
    StartFailed,
    StopAsked,
    Supervision,
    Terminate,
    Tick,
)

TICK_S = 0.1
"""How often time is looked at; a death or a signal is noticed at once."""
START_S = 120.0
"""How long all shards may take to give their addresses: they compile their kernels at the first start."""
KILL_S = 30.0
"""How long processes may take to be gone after SIGKILL; then the operating system is at fault."""


class Launcher(Protocol):
    """Starts a job's workers, keeps them together, ends them together."""

    def run(self) -> Outcome:
        """Run the job to its end. SIGINT or SIGTERM: ends after the pass in training; a second one: at once.

        Main thread only. No worker is left when this returns or raises.
        """
        ...

    def status(self) -> Mapping[str, Any]:
        """The chief's last status. Any thread."""
        ...

    def last_lines(self, worker: str) -> list[str]:
        """The last lines of output of a worker. Any thread."""
        ...


class LocalLauncher:
    """The launcher for one machine."""

    def __init__(
        self, plan: JobPlan, on_line: OnLine, *, limits: Limits | None = None, status_interval_s: float = 0.5
    ) -> None:
        self._plan, self._on_line = plan, on_line
        shards, trainers = [p.name for p in plan.shards], [p.name for p in plan.trainers]
        self._supervision = Supervision(shards, trainers, limits or Limits())
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()  # put() is safe in a signal handler
        self._workers: dict[str, Worker] = {}
        self._chief = ChiefLine(plan.job, plan.chief.address_file, plan.secret, status_interval_s)
        self._start_by = Deadline.after(START_S)

    def status(self) -> Mapping[str, Any]:
        """The chief's last status."""
        return self._chief.status

    def last_lines(self, worker: str) -> list[str]:
        """The last lines of output of a worker."""
        return list(self._workers[worker].tail) if worker in self._workers else []

    def run(self) -> Outcome:
        """Run the job to its end; see Launcher.run."""
        with on_stop_signal(lambda: self._events.put(StopAsked())):
            try:
                self._chief.start()
                for plan in self._plan.shards:
                    self._start(plan, plan.config)
                while (outcome := self._supervision.outcome) is None:
                    self._start_trainers_when_shards_are_up()
                    self._take_event()
                return outcome
            finally:
                self._chief.close()
                self._kill_all()

    def _take_event(self) -> None:
        try:
            event: Event = self._events.get(timeout=TICK_S)
        except queue.Empty:
            event = Tick()
        self._step(event)

    def _step(self, event: Event) -> None:
        for effect in self._supervision.step(event, time.monotonic()):
            self._act(effect)

    def _act(self, effect: Effect) -> None:
        match effect:
            case Drain():
                self._chief.drain()
            case Terminate(workers):
                for name in workers:
                    self._workers[name].terminate()
            case Kill(workers):
                for name in workers:
                    self._workers[name].kill()
            case _:
                assert_never(effect)

    def _start(self, plan: WorkerPlan, config: Mapping[str, Any]) -> None:
        path = self._plan.run_folder / f"{plan.name}.json"
        try:
            write_private(path, config)
            command = (*plan.command, "--config", str(path))
            worker = Worker.start(plan.name, command, self._plan.folder, self._on_line, self._on_exit)
        except OSError as error:
            self._step(StartFailed(plan.name, f"cannot be started: {error}"))
            return
        self._workers[plan.name] = worker
        self._step(Started(plan.name))

    def _on_exit(self, worker: str, code: int) -> None:
        self._events.put(Exited(worker, code))

    def _start_trainers_when_shards_are_up(self) -> None:
        if self._supervision.ending or self._plan.chief.name in self._workers:
            return
        late = [shard for shard in self._plan.shards if not shard.address_file.exists()]
        if late and self._start_by.passed():
            self._step(StartFailed(late[0].name, f"did not come up within {START_S:g} s"))
        elif not late:
            addresses = [shard.address_file.read_text() for shard in self._plan.shards]
            for plan in self._plan.trainers:
                if not self._supervision.ending:
                    self._start(plan, {**plan.config, "shards": addresses})

    def _kill_all(self) -> None:
        """Nothing may outlive the launcher, even where it fails itself."""
        for worker in self._workers.values():
            worker.kill()
        deadline = Deadline.after(KILL_S)
        for worker in self._workers.values():
            worker.join(deadline.left_s())
