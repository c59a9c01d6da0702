"""The messages of an agent (`headrace worker`) and its launcher, and the agent's client.

An agent shows the join token, and once it has a worker the worker's certificate. The launcher answers by
service.cluster.external, the agent acts by service.cluster.agent.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol, TypeVar

import grpc
from google.protobuf.message import Message

from headrace import documents
from headrace.deadline import Deadline
from headrace.errors import DeadlineExceeded, HeadraceError, Refused, SpecError, Unavailable
from headrace.identity.credentials import Credentials, Identity
from headrace.identity.join_token import JoinToken, StaleToken
from headrace.identity.peers import PeerName, PeerRole
from headrace.proto import rendezvous_pb2 as pb
from headrace.rpc import channels
from headrace.rpc.authority_contact import error_of_call, find_head
from headrace.rpc.channels import TlsPeer
from headrace.rpc.refusals import RefusalReason

# Refusals of the rendezvous: as messages, as counts, and as errors of the process that was refused.


class NoRoomNow(Refused):
    """There is no place for this process now; there may be one later."""

    exit_code = 75


class OtherGeneration(Refused):
    """A process is of another generation than the one that runs."""


def reason_of(error: HeadraceError) -> RefusalReason:
    """The count for an error of the launcher's side."""
    return RefusalReason.OTHER_GENERATION if isinstance(error, OtherGeneration) else RefusalReason.OTHER_PEER


def refusal_of(error: HeadraceError) -> pb.Refusal:
    """The message for an error of the launcher's side."""
    match error:
        case SpecError():
            kind = pb.Refusal.WRONG
        case Unavailable() | DeadlineExceeded():
            kind = pb.Refusal.LATER
        case _:
            kind = pb.Refusal.NEVER
    return pb.Refusal(reason=str(error), kind=kind)


def error_of_refusal(refusal: pb.Refusal, peer: str) -> HeadraceError:
    """The error for a message: SpecError, NoRoomNow or Refused. `peer` names the callee."""
    text = f"{peer} refused the call: {refusal.reason}"
    match refusal.kind:
        case pb.Refusal.WRONG:
            return SpecError(refusal.reason)
        case pb.Refusal.LATER:
            return NoRoomNow(text)
        case _:
            return Refused(text)


SERVICE = pb.DESCRIPTOR.services_by_name["Rendezvous"]
CALL_S = 5.0
"""Longest time for one call; after it the call is repeated."""
MAX_MESSAGE_BYTES = 64 << 20
"""Longest message: the configuration of a worker."""

Reply = TypeVar("Reply", pb.JoinReply, pb.ReportReply, pb.RenewReply)


class LauncherReplaced(Refused):
    """Another launcher has the address now, which does not know this agent yet."""


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
    """Whether `command` is a module of Headrace with its arguments, rather than a program."""
    folder: str
    config: Mapping[str, Any] = field(repr=False)
    credentials: Credentials | None = None
    """The worker's certificate, without a key; None where all workers are on one machine."""


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
    secret: str = field(default="", repr=False)
    """The secret of the agent's further calls."""
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
    """The launcher's side, for agents. Calls come on threads of the server, and may raise HeadraceError."""

    def join(self, agent: AgentFacts, signing_request: str) -> Answer:
        """An agent asks for a worker, whose certificate is for the key of the signing request."""
        ...

    def leave(self, agent: AgentFacts) -> None:
        """An agent ends."""
        ...

    def report(self, report: WorkerReport) -> Order:
        """An agent reports."""
        ...


class JoinClient:
    """An agent at its launcher. One thread at a time. Raises Unavailable, DeadlineExceeded, Refused, SpecError.

    The launcher must have the authority that the token names, on loopback, too; nothing is sent to another process.
    """

    def __init__(self, address: str, token: JoinToken) -> None:
        self._address, self._token = address, token
        self._peer = f"the launcher at {address}"
        self.secret = token.secret
        """The secret of its calls: that of the token until it has joined."""
        self._identity: Identity | None = None
        self._shown: Credentials | None = None  # at the open channel
        self._tls: TlsPeer | None = None
        self._channel: grpc.Channel | None = None

    def join(self, agent: AgentFacts, signing_request: str) -> Answer:
        """Ask for a worker. Raises StaleToken where the launcher knows another token."""
        return self._joined(pb.JoinRequest(agent=_agent(agent), signing_request=signing_request))

    def leave(self, agent: AgentFacts) -> None:
        """Give the place back."""
        self._joined(pb.JoinRequest(agent=_agent(agent), leaves=True))

    def show(self, identity: Identity | None) -> None:
        """Be a worker to the launcher from now on; None: nobody."""
        self.close()
        self._identity = identity

    def renew(self, worker: str, generation: int, signing_request: str) -> str:
        """Another certificate, as PEM, for the worker whose certificate is shown."""
        request = pb.RenewRequest(
            member=pb.Member(worker=worker, generation=generation), signing_request=signing_request
        )
        return self._call("Renew", request, pb.RenewReply.FromString).certificate

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

    def trust(self, generation: int) -> Mapping[str, str]:
        """The fields of a LauncherContact by which a worker of this agent knows the launcher."""
        assert self._tls is not None, "it has called the launcher"
        head = PeerName(self._tls.name.job, generation, PeerRole.HEAD, 0)
        return {"authority": self._tls.identity.current.authority, "head": head.dns}

    def close(self) -> None:
        """Close the connection; the next call opens another one."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _joined(self, request: pb.JoinRequest) -> Answer:
        try:
            answer = answer_of(self._call("Join", request, pb.JoinReply.FromString))
        except LauncherReplaced:  # it knows the token
            answer = answer_of(self._call("Join", request, pb.JoinReply.FromString))
        self.secret = answer.secret or self.secret
        return answer

    def _open(self) -> grpc.Channel:
        """Raises Refused where another job's launcher has the address, Unavailable where nobody has."""
        mine = self._shown = None if self._identity is None else self._identity.current
        if mine is None:
            self._tls = find_head(self._address, self._token, Deadline.after(CALL_S))
        else:
            self._tls = TlsPeer(mine, mine.peer(PeerRole.HEAD, 0))
        return channels.open_channel(self._address, max_message_bytes=MAX_MESSAGE_BYTES, tls=self._tls)

    def _call(self, method: str, request: Message, decode: Callable[[bytes], Reply]) -> Reply:
        if self._identity is not None and self._identity.current is not self._shown:
            self.close()  # renewed
        if self._channel is None:
            self._channel = self._open()
        call = self._channel.unary_unary(channels.path_of(SERVICE, method), channels.serialize, decode)
        try:
            reply = call(request, timeout=CALL_S, metadata=channels.metadata(self.secret))
        except grpc.RpcError as error:
            raise self._error_of(error) from error
        if reply.HasField("refusal"):
            raise error_of_refusal(reply.refusal, self._peer)
        return reply

    def _error_of(self, error: grpc.RpcError) -> HeadraceError:
        """The error for a call that failed; the next call does not wait for the old connection."""
        self.close()  # by itself a channel would wait ever longer until it tries to connect again
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            if self.secret == self._token.secret:
                return StaleToken()
            self.secret = self._token.secret
            return LauncherReplaced(f"{self._peer} was started again")
        if self._identity is None and self._tls is not None:
            return error_of_call(error, self._peer, self._tls)
        return channels.error_of_rpc(error, self._peer, self._tls)


def answer_join(dispatcher: Dispatcher, request: pb.JoinRequest) -> pb.JoinReply:
    """The reply of `dispatcher` to an agent. Raises what it raises."""
    agent = facts_of(request.agent)
    if request.leaves:
        dispatcher.leave(agent)
        return pb.JoinReply()
    answer = dispatcher.join(agent, request.signing_request)
    reply = pb.JoinReply(
        node_timeout_s=answer.node_timeout_s, pause_s=answer.pause_s, waits=answer.waits, secret=answer.secret
    )
    match answer.what:
        case WorkerOffer() as given:
            reply.assignment.CopyFrom(_offer_message(given))
        case JobEnd(code, reason):
            reply.end.CopyFrom(pb.End(code=code, reason=reason))
    return reply


def answer_report(dispatcher: Dispatcher, request: pb.ReportRequest) -> pb.ReportReply:
    """The reply of `dispatcher` to a report. Raises what it raises."""
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
    return pb.ReportReply(order=pb.ReportReply.Order.Name(dispatcher.report(report)))


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
        authority="" if given.credentials is None else given.credentials.authority,
        certificate="" if given.credentials is None else given.credentials.certificate,
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
            credentials=Credentials(authority=given.authority, certificate=given.certificate)
            if given.certificate
            else None,
        )
    elif reply.HasField("end"):
        what = JobEnd(reply.end.code, reply.end.reason)
    return Answer(
        node_timeout_s=reply.node_timeout_s, pause_s=reply.pause_s, secret=reply.secret, waits=reply.waits, what=what
    )
