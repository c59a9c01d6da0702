"""The launcher's rendezvous over gRPC: its server, and the client of a worker process.

A worker comes there by its name and generation, says where it listens, and learns where the others do. The launcher
decides who may come (service.cluster.meeting).
"""

import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol, TypeVar

import grpc
from google.protobuf.message import Message

from millrace.deadline import Deadline
from millrace.errors import DeadlineExceeded, MillraceError
from millrace.launcher_contact import LauncherContact
from millrace.proto import rendezvous_pb2 as pb
from millrace.rpc import channels
from millrace.rpc.joining import MAX_MESSAGE_BYTES, SERVICE, Dispatcher, answer_join, answer_report
from millrace.rpc.rendezvous_errors import error_of_refusal, refusal_of
from millrace.rpc.rpc_server import RpcServer

CLOSE_S = 1.0
"""Longest wait for a call in flight when the server closes; then it is cut off."""
HOLD_S = 1.0
"""Longest time for which the launcher holds a call that waits for somebody; the worker then calls again."""
CALL_S = 10.0
"""Longest time for one call."""

Reply = TypeVar("Reply", pb.MeetReply, pb.AnnounceReply)


@dataclass(frozen=True, slots=True)
class Member:
    """A worker process that comes to the rendezvous."""

    worker: str
    generation: int
    incarnation: str
    """Differs for each process."""


class RendezvousHost(Protocol):
    """The launcher's side. Calls come on threads of the server, and may raise MillraceError."""

    def meet(self, member: Member, collectives: str, inputs: Mapping[str, str], within: Deadline) -> str | None:
        """Take a trainer that has come: the address of rank 0's store, or None if rank 0 has not come `within`."""
        ...

    def announce(self, member: Member, address: str) -> None:
        """Take the address at which a worker serves."""
        ...


class _Servicer:
    """The calls of the service, each on a thread of the server."""

    def __init__(self, host: RendezvousHost, dispatcher: Dispatcher | None) -> None:
        self._host, self._dispatcher = host, dispatcher

    def Meet(self, request: pb.MeetRequest, _context: grpc.ServicerContext) -> pb.MeetReply:
        try:
            found = self._host.meet(
                _member(request.member), request.collectives, dict(request.inputs), Deadline.after(HOLD_S)
            )
        except MillraceError as error:
            return pb.MeetReply(refusal=refusal_of(error))
        return pb.MeetReply(complete=found is not None, collectives=found or "")

    def Announce(self, request: pb.AnnounceRequest, _context: grpc.ServicerContext) -> pb.AnnounceReply:
        try:
            self._host.announce(_member(request.member), request.address)
        except MillraceError as error:
            return pb.AnnounceReply(refusal=refusal_of(error))
        return pb.AnnounceReply()

    def Join(self, request: pb.JoinRequest, context: grpc.ServicerContext) -> pb.JoinReply:
        return answer_join(self._agents(context), request)

    def Report(self, request: pb.ReportRequest, context: grpc.ServicerContext) -> pb.ReportReply:
        return answer_report(self._agents(context), request)

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
        port: int = 0,
        dispatcher: Dispatcher | None = None,
    ) -> None:
        """Serve at the unix socket `socket`, or else at `port` of loopback; 0: a free one.

        `max_held`: most workers that wait there at once. `dispatcher` answers agents. Raises Unavailable for a port
        that is taken.
        """
        self._server = RpcServer(
            secret, max_workers=max_held + 4, max_message_bytes=MAX_MESSAGE_BYTES, socket=socket, port=port
        )
        self.address = self._server.address
        self._server.add_service(SERVICE, _Servicer(host, dispatcher))
        self._server.start()

    def close(self) -> None:
        """Stop serving and release the address. Calls in flight have a moment to end."""
        self._server.close(CLOSE_S)


class RendezvousClient:
    """A worker process at its launcher. Raises Unavailable, DeadlineExceeded, Refused, SpecError."""

    def __init__(self, contact: LauncherContact) -> None:
        self._contact = contact
        self._peer = f"the launcher at {contact.address}"

    def meet(self, collectives: str, inputs: Mapping[str, str], deadline: Deadline) -> str:
        """Come to the rendezvous, and wait for rank 0: the address of its store."""
        request = pb.MeetRequest(member=self._member(), collectives=collectives, inputs=inputs)
        with channels.open_channel(self._contact.address) as channel:
            while not (reply := self._call(channel, "Meet", request, pb.MeetReply.FromString, deadline)).complete:
                if deadline.passed():
                    raise DeadlineExceeded(f"{self._contact.worker} has come to {self._peer}, and trainer-0 has not")
        return reply.collectives

    def announce(self, address: str) -> None:
        """Say where this process serves."""
        request = pb.AnnounceRequest(member=self._member(), address=address)
        with channels.open_channel(self._contact.address) as channel:
            self._call(channel, "Announce", request, pb.AnnounceReply.FromString, Deadline.after(CALL_S))

    def _member(self) -> pb.Member:
        contact = self._contact
        return pb.Member(worker=contact.worker, generation=contact.generation, incarnation=_incarnation_of(os.getpid()))

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
            raise channels.error_of_rpc(error, self._peer) from error
        if reply.HasField("refusal"):
            raise error_of_refusal(reply.refusal, self._peer)
        return reply


@cache
def _incarnation_of(_pid: int) -> str:
    """Drawn once for each process: a forked one draws its own."""
    return secrets.token_hex(8)


def _member(member: pb.Member) -> Member:
    return Member(member.worker, member.generation, member.incarnation)
