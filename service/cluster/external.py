"""The external launcher: somebody else starts `headrace worker --join` as often as there are workers.

Each such agent joins here with the join token, gets a worker of each generation and its certificate, runs it as its
child, and reports. service.cluster.places decides which worker it gets; service.cluster.agent is the agent's side.
"""

import secrets
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from headrace.address import address_of, format_address, is_wildcard, parse_address
from headrace.deadline import Deadline
from headrace.errors import Refused
from headrace.identity import certificates
from headrace.identity.authority import Authority, open_authority
from headrace.identity.credentials import Credentials, Identity
from headrace.identity.join_token import FILE as TOKEN
from headrace.identity.join_token import check_token, open_token
from headrace.identity.peers import PeerRole, PeerRule
from headrace.lifecycle import ExitCode
from headrace.printable import printable
from headrace.rpc import refusals
from headrace.rpc.feed_joining import FeedAnswer
from headrace.rpc.joining import AgentFacts, Answer, JobEnd, Order, WorkerOffer, WorkerReport
from headrace.rpc.refusals import Refusals
from headrace.rpc.rendezvous import RendezvousServer
from headrace.rpc.tls_listener import TlsEndpoint
from headrace.service.cluster.elastic import Attendance
from headrace.service.cluster.machine import machine_id
from headrace.service.cluster.meeting import Meeting
from headrace.service.cluster.places import RANK_0, Places
from headrace.service.cluster.replica_joining import feed_answer
from headrace.service.cluster.runtime import (
    KILL_S,
    LAUNCHER,
    PYTHON,
    TAIL_LINES,
    UNREACHABLE,
    CannotStart,
    OnExit,
    OnLine,
    WorkerHandle,
    WorkerRole,
    WorkerSpec,
)
from headrace.service.cluster.stand_ins import StandIns
from headrace.service.cluster.store import IDENTITY
from headrace.service.spec.config import ClusterSection
from headrace.service.spec.job import LoadedJob
from headrace.service.spec.launchers import JobLauncher

# A worker that an agent runs, as the external launcher holds it.
#
# The agent's reports come on threads of the rendezvous.


class RemoteWorker:
    """`take_*` and `lose` belong to the launcher. Any thread.

    Nothing is told to `on_line` and `on_exit` before `release`, and nothing at all of a worker that was not released.
    """

    def __init__(self, assignment: WorkerOffer, agent: str, on_line: OnLine, on_exit: OnExit) -> None:
        self.name, self.assignment, self.agent = assignment.worker, assignment, agent
        self._on_line, self._on_exit = on_line, on_exit
        self._changed = threading.Condition()
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.order = Order.GO_ON
        self._fetched = self._started = self._over = False
        self._trouble = ""
        self._code: int | None = None
        self._telling = threading.Lock()  # held while `on_line` and `on_exit` are called, so that their order is kept
        self._untold: list[str] | None = []  # lines before `release`; None after it
        self._told_exit = False

    def poll(self) -> int | None:
        return self._code

    def terminate(self) -> None:
        self.order = max(self.order, Order.TERMINATE)

    def kill(self, within_s: float = KILL_S) -> bool:
        with self._changed:
            self.order = Order.KILL
            never_fetched = not self._fetched and not self._over
        if never_fetched:
            self.take_exit(-signal.SIGKILL)
            self.take_end()
        with self._changed:
            return self._changed.wait_for(lambda: self._over, within_s)

    def last_lines(self) -> list[str]:
        with self._changed:
            return list(self._tail)

    @property
    def over(self) -> bool:
        """Whether nothing more is reported of it."""
        return self._over

    def fetch(self) -> WorkerOffer | None:
        """The worker to run, for its agent, which asks again where an answer was lost; None once it has begun."""
        with self._changed:
            if self._started or self._over or self.order is Order.KILL:
                return None
            self._fetched = True
            return self.assignment

    def await_start(self, deadline: Deadline) -> str:
        """Wait until its agent has started it: nothing, or why it cannot be started."""
        with self._changed:
            known = self._changed.wait_for(lambda: self._started or self._over, deadline.left_s())
        return self._trouble if known else "its agent has not started it in time"

    def release(self) -> None:
        """Its start has succeeded: tell what was reported, and from now on at once."""
        with self._telling:
            lines, self._untold = self._untold or [], None
            for text in lines:
                self._on_line(self.name, text)
            self._tell_exit()

    def take_lines(self, lines: Sequence[str]) -> Order:
        """The agent runs it, and it wrote `lines`; the answer is what to do with it."""
        texts = [printable(line) for line in lines]
        with self._changed:
            self._started = True
            self._tail.extend(texts)
            self._changed.notify_all()
        with self._telling:
            if self._untold is not None:
                self._untold.extend(texts)
            else:
                for text in texts:
                    self._on_line(self.name, text)
        return self.order

    def take_trouble(self, reason: str) -> None:
        """The agent cannot start it: this is its end, told of one that is released."""
        with self._changed:
            self._trouble = reason
            self._tail.append(reason)
        self.take_exit(ExitCode.RETRY)
        self.take_end()

    def take_exit(self, code: int) -> None:
        """It is gone. A repeat changes nothing."""
        with self._telling:
            if self._code is None:
                self._code = code
                self._tell_exit()

    def take_end(self) -> None:
        """Nothing more is reported."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def lose(self, reason: str, code: int) -> None:
        """Its agent is gone or unreachable: it counts as ended with `code`."""
        with self._changed:
            if self._over:
                return
            self._tail.append(reason)
            self._trouble = reason
        self.take_exit(code)
        self.take_end()

    def _tell_exit(self) -> None:
        """Call `on_exit` once, when it is gone and was released. Holds `_telling`."""
        if self._code is not None and self._untold is None and not self._told_exit:
            self._told_exit = True
            self._on_exit(self.name, self._code)


START_S = 120.0
"""Longest time until all agents have started their workers."""
END_S = 10.0
"""Longest time until all agents have heard that the job has ended."""
MAX_HELD = 64
"""Most trainers that wait at the rendezvous at once: as many as a job can have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinPoint:
    """Where agents join, and what they show there."""

    listen: str
    """HOST:PORT; port 0: a free one. With TLS, by which the launcher proves that it is the job's."""
    token_file: Path
    """File with the join token, which an operator may replace at any time."""
    node_timeout_s: float
    authority: Authority
    """The job's, by which agents know the launcher."""
    certifies: bool
    """Whether it signs certificates for the workers, too; not where all of them are on this machine."""
    shown_host: str = ""
    """The host that people are told to join at, where `listen` has the one for all interfaces."""
    feed: FeedAnswer | None = None
    """Answers replicas, which join there, too."""
    rank0_here: bool = False
    """Whether rank 0 must be on this machine, since no other one has the job's log."""
    elastic: bool = False
    """Whether the number of trainers changes with that of agents."""
    readers: int = 0
    """The readers of the job, which have no work in predictions."""
    group_size: Callable[[int], int] | None = None
    """How many neighbouring trainers should share a machine, of so many; None where it makes no difference."""

    @classmethod
    def of_job(cls, job: LoadedJob) -> "JoinPoint":
        """Where agents of a job join, with its authority and token, which are made where they are missing."""
        cluster, folder = job.spec.cluster, job.store / IDENTITY
        authority = open_authority(folder, job.spec.name)
        open_token(folder, authority)
        hierarchy = job.spec.dense.hierarchy
        return cls(
            listen=cluster.listen,
            token_file=folder / TOKEN,
            node_timeout_s=cluster.node_timeout,
            authority=authority,
            certifies=cluster.leaves_machine,
            shown_host=address_of(cluster.interface),
            feed=feed_answer(job.store),
            rank0_here=job.spec.store.parts == "object",
            elastic=cluster.elastic is not None,
            readers=cluster.readers,
            group_size=None if hierarchy is None else hierarchy.size,
        )

    def head(self, generation: int) -> Identity:
        """The launcher itself, for the workers of a generation."""
        return self.authority.identity(self.authority.name(generation, PeerRole.HEAD, 0))

    def endpoint(self) -> TlsEndpoint:
        """Where agents join. Generation 0 has no workers."""
        host, port = parse_address(self.listen)
        accepts = PeerRule(self.authority.job, 0, {})
        return TlsEndpoint(host, self.head(0), accepts, port, "cluster.listen", joins=True, certifies=self.certifies)

    def certified(self, offer: WorkerOffer, signing_request: str) -> WorkerOffer:
        """The offer, with a certificate for its worker where workers have one."""
        if not self.certifies:
            return offer
        role, _, number = offer.worker.partition("-")
        name = self.authority.name(offer.generation, PeerRole(role), int(number))
        signed = self.authority.sign(signing_request, name)
        return replace(offer, credentials=Credentials(authority=self.authority.pem, certificate=signed))


class ExternalLauncher(JobLauncher):
    """A context; `join`, `leave` and `report` are for agents (headrace.rpc.joining.Dispatcher)."""

    elastic = True

    @classmethod
    def check(cls, cluster: ClusterSection) -> None:
        """Workers come from elsewhere, and refuse for themselves."""

    @classmethod
    def of_job(cls, job: LoadedJob) -> "ExternalLauncher":
        return cls(JoinPoint.of_job(job))

    def __init__(self, point: JoinPoint, noted: Refusals = refusals.PROCESS) -> None:
        """Raises Unavailable or SpecError where the address is not available."""
        self._point, self._node_timeout_s = point, point.node_timeout_s
        self._secret = secrets.token_hex(32)  # of agents that have joined
        since_s = time.monotonic() if point.elastic else None
        self._places = Places(machine_id(), point.node_timeout_s, rank0_here=point.rank0_here, elastic_since_s=since_s)
        self._stand_ins = StandIns(point.token_file)
        self._workers: dict[str, RemoteWorker] = {}
        self._newest = 0
        self._has_warned = False
        self._end: JobEnd | None = None
        self._lock = threading.Condition()
        self._closing = threading.Event()
        self.rendezvous = Meeting(point.authority if point.certifies else None)
        host, port = parse_address(point.listen)
        self._server = RendezvousServer(
            self.rendezvous,
            self._secret,
            MAX_HELD,
            tls=point.endpoint(),
            dispatcher=self,
            check_token=lambda given: check_token(point.token_file, given),
            feed=point.feed,
            noted=noted,
        )
        self.address = self._server.address
        if is_wildcard(host):
            self.address = format_address(point.shown_host, parse_address(self.address)[1])
        self._hint = f"`headrace worker --join {self.address} --token-file {point.token_file}` starts one"
        self._watcher = threading.Thread(target=self._watch, name="agents", daemon=True)

    def __enter__(self) -> Self:
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stand_ins.end()
        self._closing.set()
        self._watcher.join()
        self._server.close()

    def prepare(self, specs: Sequence[WorkerSpec], generation: int) -> None:
        self._stand_ins.end()
        with self._lock:
            if generation < self._newest:
                raise ValueError(f"generation {generation} is older than {self._newest}, which was started before")
            if generation > self._newest:
                self._newest, self._workers = generation, {}
            predicts = any(spec.role is WorkerRole.PREDICTOR for spec in specs)
            idle = [f"{WorkerRole.READER}-{number}" for number in range(self._point.readers if predicts else 0)]
            self._places.open([spec.name for spec in specs], generation, idle)
        self.rendezvous.begin(specs, generation)
        counts = Counter(PeerRole(spec.role.value) for spec in specs)
        accepts = PeerRule(self._point.authority.job, generation, {role: range(n) for role, n in counts.items()})
        self._server.change(self._point.head(generation), accepts)

    def waits_for(self) -> str | None:
        missing = self._missing()
        return None if missing is None else f"{missing}; {self._hint}"

    def start(
        self, specs: Sequence[WorkerSpec], generation: int, *, on_line: OnLine, on_exit: OnExit
    ) -> list[WorkerHandle]:
        with self._lock:
            if generation != self._newest:
                raise ValueError(f"generation {generation} is not in preparation; the newest is {self._newest}")
            runs = RANK_0 in self._workers and all(spec.role is WorkerRole.READER for spec in specs)
            if not runs:
                self._places.bring_together()
            self.rendezvous.expect_again(spec.name for spec in specs)
            workers = [self._assign(spec, generation, on_line, self._noting(on_exit, generation)) for spec in specs]
            self._workers |= {worker.name: worker for worker in workers}
            self._warn_of_groups(specs, on_line)
        deadline = Deadline.after(START_S)
        for worker in () if runs else workers:  # of one that is started later, trouble is its end
            if trouble := worker.await_start(deadline):
                _end(workers)
                raise CannotStart(worker.name, trouble)
        for worker in workers:
            worker.release()
        return list(workers)

    def has_place(self, spec: WorkerSpec) -> bool:
        with self._lock:
            return spec.name in self._places.agents

    def attendance(self) -> Attendance:
        with self._lock:
            return self._places.attendance(time.monotonic(), self._stand_ins.ids)

    def stand_in(self, number: int) -> None:
        self._stand_ins.begin(number, self.address)

    def end(self, code: int, reason: str) -> None:
        """Returns when all agents have heard it, or are silent."""
        with self._lock:
            self._end = JobEnd(code, reason)
            self._lock.wait_for(lambda: not self._places.known, END_S)

    def join(self, agent: AgentFacts, signing_request: str) -> Answer:
        if self._point.certifies:
            certificates.public_key_of(signing_request)  # it can be signed
        with self._lock:
            if self._end is not None:
                self._places.leave(agent.id)
                self._lock.notify_all()
                return self._answer(what=self._end)
            name = self._places.ask(agent, time.monotonic())
            worker = self._workers.get(name) if name is not None else None
            waits = self._places.waits_for() or ""
        offered = worker.fetch() if worker is not None and worker.agent == agent.id else None
        if offered is not None:
            offered = self._point.certified(offered, signing_request)
        return self._answer(what=offered, waits=waits)

    def leave(self, agent: AgentFacts) -> None:
        with self._lock:
            self._places.leave(agent.id, for_good=agent.id in self._stand_ins.ids)
        self._lose([agent.id], "its agent has left", ExitCode.RETRY)  # one that it was offered and did not begin

    def report(self, report: WorkerReport) -> Order:
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

    def _missing(self) -> str | None:
        """The workers without an agent, in words; None if each has one that is waited for."""
        with self._lock:
            return None if self._places.starts_without(time.monotonic()) else self._places.waits_for()

    def _answer(self, what: WorkerOffer | JobEnd | None, waits: str = "") -> Answer:
        pause_s = min(0.2 + 0.01 * len(self._places.known), self._node_timeout_s / 8)
        return Answer(node_timeout_s=self._node_timeout_s, pause_s=pause_s, secret=self._secret, waits=waits, what=what)

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

    def _warn_of_groups(self, specs: Sequence[WorkerSpec], on_line: OnLine) -> None:
        """Say once that trainers whose sums should stay within a machine are on several ones."""
        size_of = self._point.group_size
        num_trainers = sum(spec.role is WorkerRole.TRAINER for spec in specs)
        if size_of is None or self._has_warned or not num_trainers:  # shards start first
            return
        if group := self._places.divided_group(size_of(num_trainers)):
            self._has_warned = True
            on_line(
                LAUNCHER,
                f"warning: dense.hierarchy sums over {', '.join(group)} first, as if they shared a machine, but they "
                "are on several ones, so more travels between machines than without it. Start workers such that "
                "neighbours share a machine, each with its RANK and WORLD_SIZE, or remove dense.hierarchy",
            )

    def _of_machine(self, spec: WorkerSpec, agent: AgentFacts) -> dict[str, int]:
        """The part of a trainer's configuration that depends on its machine."""
        if spec.role is not WorkerRole.TRAINER:
            return {}
        local_rank, num_here = self._places.local_rank(spec.name)
        return {"local_rank": local_rank, "cores": max(1, agent.cores // num_here)}

    def _noting(self, on_exit: OnExit, generation: int) -> OnExit:
        """`on_exit`, which also closes the places of `generation`: the first end of a worker but a reader ends it."""

        def note(worker: str, code: int) -> None:
            with self._lock:
                if generation == self._newest and worker.startswith(WorkerRole.READER):
                    self._places.free(worker, self._workers[worker].agent)
                elif generation == self._newest:
                    self._places.close(worker)
            on_exit(worker, code)

        return note

    def _watch(self) -> None:
        """Give up agents that are silent for too long."""
        while not self._closing.wait(min(0.2, self._node_timeout_s / 10)):
            with self._lock:
                silent = self._places.silent(time.monotonic())
            if silent:
                self._lose(silent, f"(nothing was heard of its agent for {self._node_timeout_s:g} s)", UNREACHABLE)

    def _lose(self, agents: Collection[str], reason: str, code: int) -> None:
        """Give up these agents and the workers that they run, which count as ended with `code`."""
        with self._lock:
            for agent in agents:
                self._places.leave(agent)
            lost = [worker for worker in self._workers.values() if worker.agent in agents]
            self._lock.notify_all()
        for worker in lost:
            worker.lose(reason, code)


def _end(workers: Sequence[RemoteWorker]) -> None:
    """End the workers of a start that failed."""
    for worker in workers:
        worker.kill(within_s=0)
    deadline = Deadline.after(START_S)
    for worker in workers:
        worker.kill(deadline.left_s())
