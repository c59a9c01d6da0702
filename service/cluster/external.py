"""The external launcher: somebody else starts `millrace worker --join` as often as there are workers.

Each such agent joins here, runs a worker of each generation as its child, and reports. service.cluster.places decides
which worker it gets; service.cluster.agent is the agent's side.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from millrace.deadline import Deadline
from millrace.errors import Refused
from millrace.rpc.joining import AgentFacts, Answer, JobEnd, Order, WorkerOffer, WorkerReport
from millrace.rpc.rendezvous import RendezvousServer
from service.cluster.machine import machine_id
from service.cluster.meeting import Meeting
from service.cluster.places import Places
from service.cluster.remote_worker import RemoteWorker
from service.cluster.runtime import CannotStart, OnExit, OnLine, WorkerHandle, WorkerRole, WorkerSpec
from service.cluster.worker_plan import PYTHON

START_S = 120.0
"""Longest time until all agents have started their workers."""
END_S = 10.0
"""Longest time until all agents have heard that the job has ended."""
MAX_HELD = 64
"""Most trainers that wait at the rendezvous at once: as many as a job can have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinPoint:
    """Where agents join, and what they show there."""

    port: int
    """A port of loopback; 0: a free one."""
    token_file: Path
    """File with the join token."""
    secret: str
    """The secret of the join token."""
    node_timeout_s: float


class ExternalLauncher:
    """See Launcher. A context; `join`, `leave` and `report` are for agents (millrace.rpc.joining.Dispatcher)."""

    def __init__(self, point: JoinPoint) -> None:
        """Raises Unavailable where the port is taken."""
        self._node_timeout_s = point.node_timeout_s
        self._places = Places(machine_id(), point.node_timeout_s)
        self._workers: dict[str, RemoteWorker] = {}
        self._newest = 0
        self._end: JobEnd | None = None
        self._lock = threading.Condition()
        self._closing = threading.Event()
        self.rendezvous = Meeting()
        self._server = RendezvousServer(self.rendezvous, point.secret, MAX_HELD, port=point.port, dispatcher=self)
        self.address = self._server.address
        self._hint = f"`millrace worker --join {self.address} --token-file {point.token_file}` starts one"
        self._watcher = threading.Thread(target=self._watch, name="agents", daemon=True)

    def __enter__(self) -> "ExternalLauncher":
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._watcher.join()
        self._server.close()

    def prepare(self, specs: Sequence[WorkerSpec], generation: int) -> None:
        """See Launcher.prepare."""
        with self._lock:
            if generation < self._newest:
                raise ValueError(f"generation {generation} is older than {self._newest}, which was started before")
            if generation > self._newest:
                self._newest, self._workers = generation, {}
            self._places.open([spec.name for spec in specs], generation)
        self.rendezvous.begin(specs, generation)

    def waits_for(self) -> str | None:
        """See Launcher.waits_for."""
        with self._lock:
            missing = self._places.waits_for()
        return None if missing is None else f"{missing}; {self._hint}"

    def start(
        self, specs: Sequence[WorkerSpec], generation: int, *, on_line: OnLine, on_exit: OnExit
    ) -> list[WorkerHandle]:
        """See Launcher.start."""
        with self._lock:
            if generation != self._newest:
                raise ValueError(f"generation {generation} is not in preparation; the newest is {self._newest}")
            workers = [self._assign(spec, generation, on_line, self._noting(on_exit, generation)) for spec in specs]
            self._workers |= {worker.name: worker for worker in workers}
        deadline = Deadline.after(START_S)
        for worker in workers:
            if trouble := worker.await_start(deadline):
                self._undo(workers)
                raise CannotStart(worker.name, trouble)
        for worker in workers:
            worker.release()
        return list(workers)

    def end(self, code: int, reason: str) -> None:
        """See Launcher.end. Returns when all agents have heard it, or are silent."""
        with self._lock:
            self._end = JobEnd(code, reason)
            self._lock.wait_for(lambda: not self._places.known, END_S)

    def join(self, agent: AgentFacts) -> Answer:
        """See Dispatcher.join."""
        with self._lock:
            if self._end is not None:
                self._places.leave(agent.id)
                self._lock.notify_all()
                return self._answer(what=self._end)
            name = self._places.ask(agent, time.monotonic())
            worker = self._workers.get(name) if name is not None else None
            waits = self._places.waits_for() or ""
        offered = worker.fetch() if worker is not None and worker.agent == agent.id else None
        return self._answer(what=offered, waits=waits)

    def leave(self, agent: AgentFacts) -> None:
        """See Dispatcher.leave."""
        with self._lock:
            self._places.leave(agent.id)
            self._lock.notify_all()

    def report(self, report: WorkerReport) -> Order:
        """See Dispatcher.report."""
        with self._lock:
            worker = self._workers.get(report.worker)
            if worker is None or worker.agent != report.agent or report.generation != self._newest or worker.over:
                raise Refused(
                    f"{report.worker} of generation {report.generation} was given up, and the launcher is at "
                    f"generation {self._newest}; that worker must end"
                )
            self._places.heard(report.agent, time.monotonic())
        if report.cannot_start:
            worker.take_trouble(report.cannot_start)
            return Order.GO_ON
        if report.starting:
            return worker.order
        order = worker.take_lines(report.lines)
        if report.exit_code is not None:
            worker.take_exit(report.exit_code)
        if report.over:
            worker.take_end()
        return order

    def _answer(self, what: WorkerOffer | JobEnd | None, waits: str = "") -> Answer:
        pause_s = min(0.2 + 0.01 * len(self._places.known), self._node_timeout_s / 8)
        return Answer(node_timeout_s=self._node_timeout_s, pause_s=pause_s, waits=waits, what=what)

    def _assign(self, spec: WorkerSpec, generation: int, on_line: OnLine, on_exit: OnExit) -> RemoteWorker:
        """The worker for the agent that has its place."""
        agent = self._places.agents.get(spec.name)
        if agent is None:
            raise CannotStart(spec.name, "its agent has left")
        is_module = spec.command[: len(PYTHON)] == PYTHON
        assignment = WorkerOffer(
            worker=spec.name,
            generation=generation,
            command=spec.command[len(PYTHON) :] if is_module else spec.command,
            is_module=is_module,
            folder=str(spec.folder),
            config={**spec.config, **self._of_machine(spec, agent)},
        )
        return RemoteWorker(assignment, agent.id, on_line, on_exit)

    def _of_machine(self, spec: WorkerSpec, agent: AgentFacts) -> dict[str, int]:
        """The part of a trainer's configuration that depends on its machine."""
        if spec.role is not WorkerRole.TRAINER:
            return {}
        local_rank, num_here = self._places.local_rank(spec.name)
        return {"local_rank": local_rank, "cores": max(1, agent.cores // num_here)}

    def _noting(self, on_exit: OnExit, generation: int) -> OnExit:
        """`on_exit`, which also closes the places of `generation`: the first end of a worker ends it."""

        def note(worker: str, code: int) -> None:
            with self._lock:
                if generation == self._newest:
                    self._places.close(worker)
            on_exit(worker, code)

        return note

    def _undo(self, workers: Sequence[RemoteWorker]) -> None:
        """End the workers of a start that failed."""
        for worker in workers:
            worker.kill(within_s=0)
        deadline = Deadline.after(START_S)
        for worker in workers:
            worker.kill(deadline.left_s())

    def _watch(self) -> None:
        """Give up agents that are silent for too long."""
        while not self._closing.wait(min(0.2, self._node_timeout_s / 10)):
            with self._lock:
                silent = self._places.silent(time.monotonic())
                lost = [worker for worker in self._workers.values() if worker.agent in silent]
                if silent:
                    self._lock.notify_all()
            for worker in lost:
                worker.lose(f"(nothing was heard of its agent for {self._node_timeout_s:g} s)")
