"""One generation of a job's workers as child processes of this one: started in order, supervised, ended together.

Starts shards, then trainers; carries out what service.launcher.supervision decides. A worker watches its standard
input, which closes when this process is gone, however it died: then it kills itself and what it started.
"""

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, assert_never

from millrace.deadline import Deadline
from millrace.points import Fault
from service.launcher.chief import ChiefLine
from service.launcher.child import Starter
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

Faults = Callable[[int, str], Sequence[Fault]]
"""Takes a generation and a worker's name; at which points that worker is to die. For fault runs."""


class Generation:
    """The workers of one plan. Events come through `events`, which outlives the generation."""

    def __init__(
        self,
        plan: JobPlan,
        events: "queue.SimpleQueue[Event]",
        chief: ChiefLine,
        on_line: OnLine,
        limits: Limits,
        faults: Faults,
        starter: Starter,
    ) -> None:
        self._starter = starter
        self._plan, self._events, self._chief, self._on_line, self._faults = plan, events, chief, on_line, faults
        shards, trainers = [p.name for p in plan.shards], [p.name for p in plan.trainers]
        self._supervision = Supervision(shards, trainers, limits)
        self._workers: dict[str, Worker] = {}
        self._start_by = Deadline.after(START_S)

    @property
    def stop_asked(self) -> bool:
        """Whether the job was asked to end while these workers ran."""
        return self._supervision.stop_asked

    def last_lines(self, worker: str) -> list[str]:
        """The last lines of output of a worker."""
        return list(self._workers[worker].tail) if worker in self._workers else []

    def run(self) -> Outcome:
        """Run to the end of all workers; none is left when this returns or raises."""
        try:
            self._chief.start()
            for plan in self._plan.shards:
                self._start(plan, plan.config)
            while (outcome := self._supervision.outcome) is None:
                self._start_trainers_when_shards_are_up()
                self._take_event()
            return outcome
        finally:
            self._kill_all()
            self._chief.close()

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
        if self._supervision.ending:
            return
        path = self._plan.run_folder / f"{plan.name}.json"
        if faults := self._faults(self._plan.generation, plan.name):
            config = {**config, "faults": [fault.model_dump(mode="json") for fault in faults]}
        try:
            write_private(path, config)
            command = (*plan.command, "--config", str(path))
            child = self._starter.start(command, self._plan.folder)
        except OSError as error:
            self._step(StartFailed(plan.name, f"cannot be started: {error}"))
            return
        self._workers[plan.name] = Worker(plan.name, child, self._on_line, self._on_exit)
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
                self._start(plan, {**plan.config, "shards": addresses})

    def _kill_all(self) -> None:
        """Nothing may outlive the generation, even where the launcher fails itself."""
        for worker in self._workers.values():
            worker.kill()
        deadline = Deadline.after(KILL_S)
        for worker in self._workers.values():
            worker.join(deadline.left_s())
