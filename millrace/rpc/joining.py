"""The messages of an agent (`millrace worker`) and its launcher, and the agent's client.

The launcher answers by service.cluster.external, the agent acts by service.cluster.agent.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol, TypeVar

import grpc
from google.protobuf.message import Message

from millrace import documents
from millrace.errors import MillraceError, Refused
from millrace.proto import rendezvous_pb2 as pb
from millrace.rpc import channels
from millrace.rpc.rendezvous_errors import error_of_refusal, refusal_of

SERVICE = pb.DESCRIPTOR.services_by_name["Rendezvous"]
CALL_S = 5.0
"""Longest time for one call; after it the call is repeated."""
MAX_MESSAGE_BYTES = 64 << 20
"""Longest message: the configuration of a worker."""

Reply = TypeVar("Reply", pb.JoinReply, pb.ReportReply)


class WrongToken(Refused):
    """The launcher knows another join token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFacts:
    """An agent, and the place that it asks for."""

    id: str
    machine: str
    """The same for all agents of one machine."""
    role: str | None = None
    """None: any."""
    rank: int | None = None
    """Its rank among `world` agents, of its role if it has one; None: by order of joining."""
    world: int = 0
    local_rank: int | None = None
    """Its rank at its machine; None: by order of joining."""
    cores: int = 1
    """Processors that it may use."""
    last: str | None = None
    """The worker that it ran last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOffer:
    """A worker for an agent to run."""

    worker: str
    generation: int
    command: tuple[str, ...]
    is_module: bool
    """Whether `command` is a module of Millrace with its arguments, rather than a program."""
    folder: str
    config: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True)
class JobEnd:
    """The job has ended."""

    code: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to an agent that asks for a worker."""

    node_timeout_s: float
    pause_s: float
    """Until the next call."""
    waits: str = ""
    """For people: the workers that are missing."""
    what: WorkerOffer | JobEnd | None = None
    """None: there is no worker to run yet."""


class Order(IntEnum):
    """An order for a running worker."""

    GO_ON = 0
    TERMINATE = 1
    KILL = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """An agent's report about its worker."""

    agent: str
    worker: str
    generation: int
    starting: bool = False
    """The worker is being started."""
    cannot_start: str = ""
    lines: Sequence[str] = ()
    exit_code: int | None = None
    over: bool = False
    """Nothing follows."""


class Dispatcher(Protocol):
    """The launcher's side, for agents. Calls come on threads of the server, and may raise MillraceError."""

    def join(self, agent: AgentFacts) -> Answer:
        """An agent asks for a worker."""
        ...

    def leave(self, agent: AgentFacts) -> None:
        """An agent ends."""
        ...

    def report(self, report: WorkerReport) -> Order:
        """An agent reports."""
        ...


class JoinClient:
    """An agent at its launcher. Any thread. Raises Unavailable, DeadlineExceeded, Refused, SpecError."""

    def __init__(self, address: str, secret: str) -> None:
        self._address, self._secret = address, secret
        self._channel = self._open()

    def join(self, agent: AgentFacts) -> Answer:
        """Ask for a worker."""
        return answer_of(self._call("Join", pb.JoinRequest(agent=_agent(agent)), pb.JoinReply.FromString))

    def leave(self, agent: AgentFacts) -> None:
        """Give the place back."""
        self._call("Join", pb.JoinRequest(agent=_agent(agent), leaves=True), pb.JoinReply.FromString)

    def report(self, report: WorkerReport) -> Order:
        """Report, and hear what to do with the worker."""
        request = pb.ReportRequest(
            agent=report.agent,
            worker=report.worker,
            generation=report.generation,
            starting=report.starting,
            cannot_start=report.cannot_start,
            lines=report.lines,
            exit_code=report.exit_code,
            over=report.over,
        )
        return Order(self._call("Report", request, pb.ReportReply.FromString).order)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def _open(self) -> grpc.Channel:
        return channels.open_channel(self._address, max_message_bytes=MAX_MESSAGE_BYTES)

    def _call(self, method: str, request: Message, decode: Callable[[bytes], Reply]) -> Reply:
        peer = f"the launcher at {self._address}"
        call = self._channel.unary_unary(channels.path_of(SERVICE, method), channels.serialize, decode)
        try:
            reply = call(request, timeout=CALL_S, metadata=channels.metadata(self._secret))
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                raise WrongToken(f"{peer} refused the join token") from error
            self._channel.close()
            self._channel = self._open()  # by itself a channel would wait ever longer until it tries to connect again
            raise channels.error_of_rpc(error, peer) from error
        if reply.HasField("refusal"):
            raise error_of_refusal(reply.refusal, peer)
        return reply


def answer_join(dispatcher: Dispatcher, request: pb.JoinRequest) -> pb.JoinReply:
    """The reply of `dispatcher` to an agent."""
    agent = facts_of(request.agent)
    try:
        if request.leaves:
            dispatcher.leave(agent)
            return pb.JoinReply()
        answer = dispatcher.join(agent)
    except MillraceError as error:
        return pb.JoinReply(refusal=refusal_of(error))
    reply = pb.JoinReply(node_timeout_s=answer.node_timeout_s, pause_s=answer.pause_s, waits=answer.waits)
    match answer.what:
        case WorkerOffer() as given:
            reply.assignment.CopyFrom(_offer_message(given))
        case JobEnd(code, reason):
            reply.end.CopyFrom(pb.End(code=code, reason=reason))
    return reply


def answer_report(dispatcher: Dispatcher, request: pb.ReportRequest) -> pb.ReportReply:
    """The reply of `dispatcher` to a report."""
    report = WorkerReport(
        agent=request.agent,
        worker=request.worker,
        generation=request.generation,
        starting=request.starting,
        cannot_start=request.cannot_start,
        lines=tuple(request.lines),
        exit_code=request.exit_code if request.HasField("exit_code") else None,
        over=request.over,
    )
    try:
        return pb.ReportReply(order=pb.ReportReply.Order.Name(dispatcher.report(report)))
    except MillraceError as error:
        return pb.ReportReply(refusal=refusal_of(error))


def _agent(agent: AgentFacts) -> pb.Agent:
    return pb.Agent(
        id=agent.id,
        machine=agent.machine,
        role=agent.role or "",
        rank=agent.rank,
        world=agent.world,
        local_rank=agent.local_rank,
        cores=agent.cores,
        last=agent.last or "",
    )


def facts_of(agent: pb.Agent) -> AgentFacts:
    """The agent in a message."""
    return AgentFacts(
        id=agent.id,
        machine=agent.machine,
        role=agent.role or None,
        rank=agent.rank if agent.HasField("rank") else None,
        world=agent.world,
        local_rank=agent.local_rank if agent.HasField("local_rank") else None,
        cores=agent.cores,
        last=agent.last or None,
    )


def _offer_message(given: WorkerOffer) -> pb.Assignment:
    return pb.Assignment(
        worker=given.worker,
        generation=given.generation,
        command=given.command,
        is_module=given.is_module,
        folder=given.folder,
        config_json=json.dumps(given.config, default=str).encode(),  # str: TOML's dates
    )


def answer_of(reply: pb.JoinReply) -> Answer:
    """The answer in a message."""
    what: WorkerOffer | JobEnd | None = None
    if reply.HasField("assignment"):
        given = reply.assignment
        what = WorkerOffer(
            worker=given.worker,
            generation=given.generation,
            command=tuple(given.command),
            is_module=given.is_module,
            folder=given.folder,
            config=documents.parse_object(given.config_json, "the configuration of a worker"),
        )
    elif reply.HasField("end"):
        what = JobEnd(reply.end.code, reply.end.reason)
    return Answer(node_timeout_s=reply.node_timeout_s, pause_s=reply.pause_s, waits=reply.waits, what=what)
