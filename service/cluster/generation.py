"""One generation of a job's workers: started in order, supervised, ended together.

Shards start first, then trainers. service.cluster.supervision decides; this module acts.
"""

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import assert_never

from millrace.deadline import Deadline
from millrace.failpoints import ArmedFailpoint
from service.cluster.chief import ChiefConnection
from service.cluster.runtime import KILL_S, LAUNCHER, CannotStart, Launcher, OnLine, WorkerHandle, WorkerSpec
from service.cluster.supervision import (
    DrainChief,
    Effect,
    EndingLimits,
    Event,
    Exited,
    KillWorkers,
    RunOutcome,
    Started,
    StartFailed,
    Supervision,
    TerminateWorkers,
    Tick,
)
from service.cluster.worker_plan import JobPlan

TICK_S = 0.1
"""Interval at which limits of time are checked. A death or a signal is noticed at once."""
START_S = 120.0
"""Longest time until all shards have their addresses: at the first start they compile their kernels."""

Faults = Callable[[int, str], Sequence[ArmedFailpoint]]
"""Takes a generation and a worker's name; the failpoints at which that worker dies. For fault runs."""


class Generation:
    """The workers of one plan. Events come through `events`, which outlives the generation."""

    def __init__(
        self,
        plan: JobPlan,
        events: "queue.SimpleQueue[Event]",
        chief: ChiefConnection,
        on_line: OnLine,
        limits: EndingLimits,
        faults: Faults,
        launcher: Launcher,
    ) -> None:
        self._launcher = launcher
        self._plan, self._events, self._chief, self._on_line, self._faults = plan, events, chief, on_line, faults
        shards, trainers = [p.name for p in plan.shards], [p.name for p in plan.trainers]
        self._supervision = Supervision(shards, trainers, limits)
        self._workers: dict[str, WorkerHandle] = {}
        self._start_by: Deadline | None = None
        self._waits: str | None = None

    @property
    def stop_asked(self) -> bool:
        """True if a stop of the job was requested while these workers ran."""
        return self._supervision.stop_asked

    @property
    def waits(self) -> str | None:
        """The workers that the launcher waits for before it starts any, in words. Any thread."""
        return self._waits

    def last_lines(self, worker: str) -> list[str]:
        """The last lines of output of a worker."""
        return self._workers[worker].last_lines() if worker in self._workers else []

    def run(self) -> RunOutcome:
        """Run until every worker has ended. None is left when this returns or raises."""
        try:
            # Before the chief is asked for, or the rendezvous might still tell the address of the generation before.
            self._launcher.prepare([*self._plan.shards, *self._plan.trainers], self._plan.generation)
            self._chief.start()
            while (outcome := self._supervision.outcome) is None:
                self._start_workers()
                self._take_event()
            return outcome
        finally:
            self._waits = None
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
            case DrainChief():
                self._chief.drain()
            case TerminateWorkers(workers):
                for name in workers:
                    self._workers[name].terminate()
            case KillWorkers(workers):
                for name in workers:
                    self._workers[name].kill(within_s=0)  # their ends are events
            case _:
                assert_never(effect)

    def _start(self, specs: Sequence[WorkerSpec]) -> None:
        if self._supervision.ending:
            return
        try:
            handles = self._launcher.start(
                [self._with_faults(spec) for spec in specs],
                self._plan.generation,
                on_line=self._on_line,
                on_exit=self._on_exit,
            )
        except CannotStart as error:
            self._step(StartFailed(error.worker, f"cannot be started: {error.reason}"))
            return
        for handle in handles:
            self._workers[handle.name] = handle
            self._step(Started(handle.name))

    def _with_faults(self, spec: WorkerSpec) -> WorkerSpec:
        faults = [fault.model_dump(mode="json") for fault in self._faults(self._plan.generation, spec.name)]
        return replace(spec, config={**spec.config, "faults": faults}) if faults else spec

    def _on_exit(self, worker: str, code: int) -> None:
        self._events.put(Exited(worker, code))

    def _start_workers(self) -> None:
        """Start the shards once the launcher can run all workers; the trainers once the shards are up."""
        if self._supervision.ending or self._plan.chief.name in self._workers:
            return
        if self._start_by is None:
            if self._waits_for_launcher():
                return
            self._start_by = Deadline.after(START_S)
            self._start(self._plan.shards)
        self._start_trainers_when_shards_are_up(self._start_by)

    def _waits_for_launcher(self) -> bool:
        """Whether places to run are missing; says so when that changes."""
        waits = self._launcher.waits_for()
        if waits is not None and waits != self._waits:
            self._on_line(LAUNCHER, waits)
        self._waits = waits
        return waits is not None

    def _start_trainers_when_shards_are_up(self, start_by: Deadline) -> None:
        if self._supervision.ending:
            return
        addresses = {shard.name: self._launcher.rendezvous.address(shard) for shard in self._plan.shards}
        late = [name for name, address in addresses.items() if address is None]
        if late and start_by.passed():
            self._step(StartFailed(late[0], f"did not come up within {START_S:g} s"))
        elif not late:
            shards = list(addresses.values())
            self._start([replace(spec, config={**spec.config, "shards": shards}) for spec in self._plan.trainers])

    def _kill_all(self) -> None:
        """No worker outlives the generation, even where the launcher itself fails."""
        for worker in self._workers.values():
            worker.kill(within_s=0)  # all at once
        deadline = Deadline.after(KILL_S)
        for worker in self._workers.values():
            worker.kill(deadline.left_s())
