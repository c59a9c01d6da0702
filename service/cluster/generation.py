"""One generation of a job's workers: started in order, supervised, ended together.

Shards and readers start first, then trainers. service.cluster.supervision decides; this module acts, and
service.cluster.job_runner hands it its events.
"""

import queue
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Self, assert_never

from headrace.deadline import Deadline
from headrace.errors import Unwritable
from headrace.failpoints import ArmedFailpoint
from headrace.service.cluster.rank0_connection import RankZeroConnection
from headrace.service.cluster.run_folder import run_folder
from headrace.service.cluster.runtime import (
    KILL_S,
    LAUNCHER,
    CannotStart,
    Launcher,
    OnLine,
    WorkerHandle,
    WorkerSpec,
)
from headrace.service.cluster.supervision import (
    DrainRankZero,
    Effect,
    EndingLimits,
    Event,
    Exited,
    KillWorkers,
    NotStarted,
    RunOutcome,
    Started,
    StartFailed,
    StartReaders,
    Supervision,
    TerminateWorkers,
)
from headrace.service.cluster.worker_plan import JobPlan

TICK_S = 0.1
"""Interval at which limits of time are checked. A death or a signal is noticed at once."""
START_S = 120.0
"""Longest time until all shards and readers have their addresses: at the first start they compile their kernels."""

Faults = Callable[[int, str], Sequence[ArmedFailpoint]]
"""Takes a generation and a worker's name; the failpoints at which that worker dies. For fault runs."""


Events = queue.SimpleQueue[tuple[int, Event]]
"""Events of generations, each with the number of its generation; 0: of the one that trains. `put` is safe in a signal
handler."""


class Generation:
    """The workers of one plan; none is left when its context ends. Their ends come to `events`, which outlives it."""

    def __init__(
        self,
        plan: JobPlan,
        events: Events,
        rank0: RankZeroConnection,
        on_line: OnLine,
        limits: EndingLimits,
        faults: Faults,
        launcher: Launcher,
    ) -> None:
        self._launcher = launcher
        self.plan, self.rank0 = plan, rank0
        self._events, self._on_line, self._faults = events, on_line, faults
        self._held = ExitStack()
        shards, trainers, readers = ([each.name for each in p] for p in (plan.shards, plan.trainers, plan.readers))
        self._supervision = Supervision(shards, trainers, limits, readers)
        self._workers: dict[str, WorkerHandle] = {}
        self._start_by: Deadline | None = None
        self._waits: str | None = None

    @property
    def stop_asked(self) -> bool:
        """True if a stop of the job was requested while these workers ran."""
        return self._supervision.stop_asked

    @property
    def begun(self) -> bool:
        """Whether its workers were started."""
        return self._start_by is not None

    @property
    def waits(self) -> str | None:
        """The workers that the launcher waits for before it starts any, in words. Any thread."""
        return self._waits

    @property
    def start_step(self) -> str:
        """The step that the start of these workers is in, as a sentence. Any thread."""
        if self._waits is not None:
            return f"The launcher waits: {self._waits}."
        if self.plan.rank0.name in self._workers:
            return "The trainers are up: they build the model, and read rows and positions of the newest commit."
        if not self.begun:
            return "The launcher looks for places where the workers can run."
        names = ", ".join(each.name for each in self.plan.servers)
        return f"Shards and readers start: {names}. At the very first start they compile their kernels."

    @property
    def unrenewed(self) -> dict[str, str]:
        """The workers whose certificates were not renewed in time, and when they last were. Any thread."""
        found = self._launcher.rendezvous.unrenewed()
        return {worker: f"{since:%Y-%m-%d %H:%M:%S} UTC" for worker, since in found.items()}

    @property
    def lost(self) -> dict[str, str]:
        """The readers that the generation goes on without, with the reason. Any thread."""
        return self._supervision.lost

    def last_lines(self, worker: str) -> list[str]:
        """The last lines of output of a worker."""
        return self._workers[worker].last_lines() if worker in self._workers else []

    @property
    def outcome(self) -> RunOutcome | None:
        """The outcome, once every worker has ended."""
        return self._supervision.outcome

    def __enter__(self) -> Self:
        with ExitStack() as held:
            held.enter_context(run_folder(self.plan.run_folder))
            held.callback(self._end)
            # Before rank 0 is asked for, or the rendezvous might still tell the address of the generation before.
            self._launcher.prepare([*self.plan.servers, *self.plan.trainers], self.plan.generation)
            self.rank0.start()
            self._held = held.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def _end(self) -> None:
        self._waits = None
        try:
            self._kill_all()
        finally:
            self.rank0.close()

    def step(self, event: Event) -> None:
        """Act on an event. Call it often: TICK_S after the last one, with a Tick."""
        self._step(event)
        if self.outcome is None:
            self._start_workers()

    def _step(self, event: Event) -> None:
        before = self.lost
        effects = self._supervision.step(event, time.monotonic())
        for worker in sorted(name for name, why in self.lost.items() if before.get(name) != why):
            self._on_line(
                LAUNCHER, f"{worker} does not run ({self.lost[worker]}): the others take over until it is started"
            )
        for worker in sorted(before.keys() - self.lost.keys()):
            self._on_line(LAUNCHER, f"{worker} is started")
        for effect in effects:
            self._act(effect)

    def _act(self, effect: Effect) -> None:
        match effect:
            case DrainRankZero():
                self.rank0.drain()
            case TerminateWorkers(workers):
                for name in workers:
                    self._workers[name].terminate()
            case KillWorkers(workers):
                for name in workers:
                    self._workers[name].kill(within_s=0)  # their ends are events
            case StartReaders(workers):
                for spec in self.plan.readers:
                    if spec.name in workers and self._launcher.has_place(spec):
                        self._start_reader(spec)
            case _:
                assert_never(effect)

    def _start(self, specs: Sequence[WorkerSpec]) -> None:
        if self._supervision.ending:
            return
        try:
            handles = self._launcher.start(
                [self._with_faults(spec) for spec in specs],
                self.plan.generation,
                on_line=self._on_line,
                on_exit=self._on_exit,
            )
        except CannotStart as error:
            self._step(StartFailed(error.worker, f"cannot be started: {error.reason}"))
            return
        for handle in handles:
            self._workers[handle.name] = handle
            self._step(Started(handle.name))

    def _start_reader(self, spec: WorkerSpec) -> None:
        """Start a reader while the trainers run, who ask where it is."""
        try:
            (handle,) = self._launcher.start([spec], self.plan.generation, on_line=self._on_line, on_exit=self._on_exit)
        except (CannotStart, Unwritable) as error:
            reason = error.reason if isinstance(error, CannotStart) else str(error)
            self._step(NotStarted(spec.name, f"cannot be started: {reason}"))
            return
        self._workers[spec.name] = handle
        self._step(Started(spec.name))

    def _with_faults(self, spec: WorkerSpec) -> WorkerSpec:
        faults = [fault.model_dump(mode="json") for fault in self._faults(self.plan.generation, spec.name)]
        return replace(spec, config={**spec.config, "faults": faults}) if faults else spec

    def _on_exit(self, worker: str, code: int) -> None:
        self._events.put((self.plan.generation, Exited(worker, code)))

    def _start_workers(self) -> None:
        """Start shards and readers once the launcher can run all workers; the trainers once those are up."""
        if self._supervision.ending or self.plan.rank0.name in self._workers:
            return
        if self._start_by is None:
            if self._waits_for_launcher():
                return
            self._start_by = Deadline.after(START_S)
            absent = {each.name for each in self.plan.readers if not self._launcher.has_place(each)}
            self._start([each for each in self.plan.servers if each.name not in absent])
            for name in sorted(absent):
                self._step(NotStarted(name, "no worker has come for it"))
        self._start_trainers_when_servers_are_up(self._start_by)

    def _waits_for_launcher(self) -> bool:
        """Whether places to run are missing; says so when that changes."""
        waits = self._launcher.waits_for()
        if waits is not None and waits != self._waits:
            self._on_line(LAUNCHER, waits)
        self._waits = waits
        return waits is not None

    def _start_trainers_when_servers_are_up(self, start_by: Deadline) -> None:
        if self._supervision.ending:
            return
        addresses = {each.name: self._launcher.rendezvous.address(each) for each in self.plan.servers}
        late = [name for name, address in addresses.items() if address is None and name not in self.lost]
        if late and start_by.passed():
            self._step(StartFailed(late[0], f"did not come up within {START_S:g} s"))
        elif not late:
            found: dict[str, object] = {"readers": [addresses[each.name] or "" for each in self.plan.readers]}
            if self.plan.shards:  # else they are in the trainers
                found["shards"] = [addresses[each.name] for each in self.plan.shards]
            self._start([replace(spec, config={**spec.config, **found}) for spec in self.plan.trainers])

    def _kill_all(self) -> None:
        """No worker outlives the generation, even where the launcher itself fails."""
        for worker in self._workers.values():
            worker.kill(within_s=0)  # all at once
        deadline = Deadline.after(KILL_S)
        for worker in self._workers.values():
            worker.kill(deadline.left_s())
