"""The launcher's rendezvous over gRPC: its server, and the client of a worker process.

A worker comes there by its name and generation, says where it listens, and learns where the others do. The launcher
decides who may come (service.cluster.meeting).
"""

import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import grpc
from google.protobuf.message import Message

from headrace.deadline import Deadline
from headrace.errors import DeadlineExceeded, HeadraceError, Refused
from headrace.identity.credentials import Credentials, Identity
from headrace.identity.peers import PeerName, PeerRole, PeerRule
from headrace.identity.renewal import RenewedIdentity
from headrace.launcher_contact import LauncherContact
from headrace.proto import rendezvous_pb2 as pb
from headrace.rpc import channels, refusals
from headrace.rpc.channels import TlsPeer
from headrace.rpc.feed_joining import FeedAnswer, serve_feed_address
from headrace.rpc.joining import (
    MAX_MESSAGE_BYTES,
    SERVICE,
    Dispatcher,
    answer_join,
    answer_report,
    error_of_refusal,
    reason_of,
    refusal_of,
)
from headrace.rpc.refusals import Refusals
from headrace.rpc.rpc_server import RpcServer, TokenCheck
from headrace.rpc.tls_listener import TlsEndpoint

CLOSE_S = 1.0
"""Longest wait for a call in flight when the server closes; then it is cut off."""
HOLD_S = 1.0
"""Longest time for which the launcher holds a call that waits for somebody; the worker then calls again."""
MAX_CONNECTIONS = 512
"""Most connections of a launcher; each of up to 128 workers has one, and its agent another one."""
CALL_S = 10.0
"""Longest time for one call."""

FIND_S = 2.0
"""Longest time for a call of a trainer that looks for a reader: its part goes to another one meanwhile."""

Reply = TypeVar("Reply", pb.MeetReply, pb.AnnounceReply, pb.FindReply, pb.RenewReply)


@dataclass(frozen=True, slots=True)
class Member:
    """A worker process that comes to the rendezvous."""

    worker: str
    generation: int
    incarnation: str
    """Differs for each process."""


@dataclass(frozen=True, slots=True)
class ServingWorker:
    """A worker that serves."""

    address: str
    times: int
    """How many processes of its name have come in the generation."""


class RendezvousHost(Protocol):
    """The launcher's side. Calls come on threads of the server, and may raise HeadraceError."""

    def meet(self, member: Member, collectives: str, inputs: Mapping[str, str], within: Deadline) -> str | None:
        """Take a trainer that has come: the address of rank 0's store, or None if rank 0 has not come `within`."""
        ...

    def announce(self, member: Member, address: str) -> None:
        """Take the address at which a worker serves."""
        ...

    def find(self, member: Member, worker: str) -> ServingWorker | None:
        """Where another worker serves now; None while it does not."""
        ...

    def renew(self, member: Member, signing_request: str, *, proved: bool) -> str:
        """Another certificate, as PEM, for the name of a worker; `proved`: its present certificate shows that name."""
        ...


class _Servicer:
    """The calls of the service, each on a thread of the server. What is refused is counted and logged."""

    def __init__(
        self, host: RendezvousHost, dispatcher: Dispatcher | None, callers: RpcServer, noted: Refusals
    ) -> None:
        self._host, self._dispatcher, self._noted = host, dispatcher, noted
        self._peer_of, self._source_of = callers.peer_of, callers.source_of

    def Meet(self, request: pb.MeetRequest, context: grpc.ServicerContext) -> pb.MeetReply:
        try:
            self._check_name(request.member.worker, context)
            found = self._host.meet(
                _member(request.member), request.collectives, dict(request.inputs), Deadline.after(HOLD_S)
            )
        except HeadraceError as error:
            return pb.MeetReply(refusal=self._refused(error, context))
        return pb.MeetReply(complete=found is not None, collectives=found or "")

    def Announce(self, request: pb.AnnounceRequest, context: grpc.ServicerContext) -> pb.AnnounceReply:
        try:
            self._check_name(request.member.worker, context)
            self._host.announce(_member(request.member), request.address)
        except HeadraceError as error:
            return pb.AnnounceReply(refusal=self._refused(error, context))
        return pb.AnnounceReply()

    def Find(self, request: pb.FindRequest, context: grpc.ServicerContext) -> pb.FindReply:
        try:
            self._check_name(request.member.worker, context)
            found = self._host.find(_member(request.member), request.worker)
        except HeadraceError as error:
            return pb.FindReply(refusal=self._refused(error, context))
        return pb.FindReply() if found is None else pb.FindReply(address=found.address, times=found.times)

    def Renew(self, request: pb.RenewRequest, context: grpc.ServicerContext) -> pb.RenewReply:
        try:
            self._check_name(request.member.worker, context)
            proved = self._peer_of(context) is not None
            signed = self._host.renew(_member(request.member), request.signing_request, proved=proved)
        except HeadraceError as error:
            return pb.RenewReply(refusal=self._refused(error, context))
        return pb.RenewReply(certificate=signed)

    def Join(self, request: pb.JoinRequest, context: grpc.ServicerContext) -> pb.JoinReply:
        try:
            return answer_join(self._agents(context), request)
        except HeadraceError as error:
            return pb.JoinReply(refusal=self._refused(error, context))

    def Report(self, request: pb.ReportRequest, context: grpc.ServicerContext) -> pb.ReportReply:
        try:
            self._check_name(request.worker, context)
            return answer_report(self._agents(context), request)
        except HeadraceError as error:
            return pb.ReportReply(refusal=self._refused(error, context))

    def _check_name(self, worker: str, context: grpc.ServicerContext) -> None:
        """Raise Refused where a worker of another machine claims to be another one."""
        peer = self._peer_of(context)
        if peer is not None and f"{peer.role}-{peer.number}" != worker:
            raise Refused(f"the caller is {peer} by its certificate, and it claims to be {worker}")

    def _refused(self, error: HeadraceError, context: grpc.ServicerContext) -> pb.Refusal:
        self._noted.note(reason_of(error), self._source_of(context), str(error))
        return refusal_of(error)

    def _agents(self, context: grpc.ServicerContext) -> Dispatcher:
        if self._dispatcher is None:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this launcher starts its workers itself")
        return self._dispatcher


class RendezvousServer:
    """A running server."""

    def __init__(
        self,
        host: RendezvousHost,
        secret: str,
        max_held: int,
        *,
        socket: Path | None = None,
        tls: TlsEndpoint | None = None,
        dispatcher: Dispatcher | None = None,
        check_token: TokenCheck | None = None,
        feed: FeedAnswer | None = None,
        noted: Refusals = refusals.PROCESS,
    ) -> None:
        """Serve at the unix socket `socket`, or else at a free port of loopback. With `tls`: there.

        `max_held`: most workers that wait there at once. `dispatcher` answers agents, which join by the token that
        `check_token` knows; `feed` answers replicas, which join likewise. Raises Unavailable and SpecError as RpcServer
        does.
        """
        self._server = RpcServer(
            secret,
            max_workers=max_held + 4,
            max_message_bytes=MAX_MESSAGE_BYTES,
            max_connections=MAX_CONNECTIONS,
            socket=socket,
            tls=tls,
            check_token=check_token,
            noted=noted,
        )
        self.address = self._server.address
        self._server.add_service(SERVICE, _Servicer(host, dispatcher, self._server, noted), joining=("Join",))
        if feed is not None:
            serve_feed_address(self._server, feed, noted)
        self._server.start()

    def change(self, identity: Identity, accepts: PeerRule) -> None:
        """Another generation begins: be its head, accept its workers; see TlsListener.change."""
        self._server.change(identity, accepts)

    def close(self) -> None:
        """Stop serving and release the address. Calls in flight have a moment to end."""
        self._server.close(CLOSE_S)


class RendezvousClient:
    """A worker process at its launcher. Any thread. Raises Unavailable, DeadlineExceeded, Refused, SpecError."""

    def __init__(self, contact: LauncherContact, identity: Identity | None = None) -> None:
        """`identity`: of this worker, for a launcher on another machine."""
        self._contact = contact
        self._peer = f"the launcher at {contact.address}"
        self._tls: TlsPeer | None = None
        if identity is not None and channels.needs_tls(contact.address):
            self._tls = TlsPeer(identity, identity.current.peer(PeerRole.HEAD, 0))
        elif contact.authority:
            self._tls = TlsPeer(Credentials(authority=contact.authority), PeerName.parse(contact.head))

    def meet(self, collectives: str, inputs: Mapping[str, str], deadline: Deadline) -> str:
        """Come to the rendezvous, and wait for rank 0: the address of its store."""
        request = pb.MeetRequest(member=self._member(), collectives=collectives, inputs=inputs)
        with channels.open_channel(self._contact.address, tls=self._tls) as channel:
            while not (reply := self._call(channel, "Meet", request, pb.MeetReply.FromString, deadline)).complete:
                if deadline.passed():
                    raise DeadlineExceeded(f"{self._contact.worker} has come to {self._peer}, and trainer-0 has not")
        return reply.collectives

    def announce(self, address: str) -> None:
        """Say where this process serves."""
        request = pb.AnnounceRequest(member=self._member(), address=address)
        with channels.open_channel(self._contact.address, tls=self._tls) as channel:
            self._call(channel, "Announce", request, pb.AnnounceReply.FromString, Deadline.after(CALL_S))

    def find(self, worker: str) -> ServingWorker | None:
        """Where another worker serves now; None while it does not."""
        request = pb.FindRequest(member=self._member(), worker=worker)
        with channels.open_channel(self._contact.address, tls=self._tls) as channel:
            reply = self._call(channel, "Find", request, pb.FindReply.FromString, Deadline.after(FIND_S))
        return ServingWorker(reply.address, reply.times) if reply.address else None

    def renew(self, signing_request: str) -> str:
        """Another certificate, as PEM, for the name of this worker."""
        request = pb.RenewRequest(member=self._member(), signing_request=signing_request)
        with channels.open_channel(self._contact.address, tls=self._tls) as channel:
            return self._call(channel, "Renew", request, pb.RenewReply.FromString, Deadline.after(CALL_S)).certificate

    def _member(self) -> pb.Member:
        contact = self._contact
        return pb.Member(worker=contact.worker, generation=contact.generation, incarnation=_incarnation())

    def _call(
        self,
        channel: grpc.Channel,
        method: str,
        request: Message,
        decode: Callable[[bytes], Reply],
        deadline: Deadline,
    ) -> Reply:
        call = channel.unary_unary(channels.path_of(SERVICE, method), channels.serialize, decode)
        timeout_s = HOLD_S + min(CALL_S, deadline.left_s())
        try:
            reply = call(request, timeout=timeout_s, metadata=channels.metadata(self._contact.secret))
        except grpc.RpcError as error:
            raise channels.error_of_rpc(error, self._peer, self._tls) from error
        if reply.HasField("refusal"):
            raise error_of_refusal(reply.refusal, self._peer)
        return reply


@contextmanager
def renewed_identity(contact: LauncherContact | None, credentials: Credentials | None) -> Iterator[Identity | None]:
    """The identity of a worker, which its launcher renews while the context lasts; None where it has none."""
    if credentials is None or contact is None:
        yield credentials
        return
    identity = RenewedIdentity(credentials, lambda request: RendezvousClient(contact, identity).renew(request))
    with identity.attended():
        yield identity


_INCARNATIONS: dict[int, str] = {}
"""By process: a forked one draws its own."""


def _incarnation() -> str:
    """Drawn once for each process, the same for all of its threads: `setdefault` is one step."""
    return _INCARNATIONS.setdefault(os.getpid(), secrets.token_hex(8))


def _member(member: pb.Member) -> Member:
    return Member(member.worker, member.generation, member.incarnation)
