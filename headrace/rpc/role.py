"""The Role service over gRPC: a worker's status, requests to drain and to commit, and operations of rank 0.

Every worker serves it; the launcher, the API and commands call it. The worker decides what its status holds.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from headrace import documents
from headrace.codec import plain
from headrace.deadline import Deadline
from headrace.errors import HeadraceError, NotYet, SpecError
from headrace.proto import role_pb2
from headrace.rpc import channels
from headrace.rpc.channels import RenewedChannel, TlsPeer
from headrace.rpc.rpc_server import RpcServer
from headrace.rpc.tls_listener import TlsEndpoint

CLOSE_S = 1.0
"""Longest wait for a call in flight when its server closes; then it is cut off."""
MAX_WORKERS = 4
"""Calls answered at a time. An answer to `Operate` may wait for the shards; a status must not wait for it."""

SERVICE = role_pb2.DESCRIPTOR.services_by_name["Role"]

Reply = TypeVar("Reply", bound=Message)
Answer = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Takes an operation and returns its answer, both as JSON. Raises HeadraceError."""
Exchange = Callable[[bytes], bytes]
"""Takes the launcher's message and returns the one for it; empty: none. Returns at once."""


def no_messages(_: bytes) -> bytes:
    """The exchange of a worker that has no messages for the launcher."""
    return b""


class _Servicer:
    """The calls of the service, each on a thread of the server."""

    def __init__(
        self,
        status: Callable[[], object],
        drain: Callable[[], None],
        commit: Callable[[], None] | None,
        answer: Answer | None,
        exchange: Exchange = no_messages,
    ) -> None:
        self._status, self._drain, self._commit, self._answer = status, drain, commit, answer
        self._exchange = exchange

    def Status(self, request: role_pb2.StatusRequest, _context: grpc.ServicerContext) -> role_pb2.StatusReply:
        message = self._exchange(request.message)
        status = json.dumps(finite(plain(self._status())), allow_nan=False).encode()
        return role_pb2.StatusReply(status_json=status, message=message)

    def Drain(self, _request: role_pb2.DrainRequest, _context: grpc.ServicerContext) -> role_pb2.DrainReply:
        self._drain()
        return role_pb2.DrainReply()

    def Commit(self, _request: role_pb2.CommitRequest, context: grpc.ServicerContext) -> role_pb2.CommitReply:
        if self._commit is None:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this worker leads no commits")
        self._commit()
        return role_pb2.CommitReply()

    def Operate(self, request: role_pb2.OperateRequest, context: grpc.ServicerContext) -> role_pb2.OperateReply:
        if self._answer is None:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this worker leads no job")
        try:
            reply = {"answer": finite(self._answer(documents.parse_object(request.request_json, "the request")))}
        except HeadraceError as error:
            reply = {"error": str(error), "again": error.exit_code == NotYet.exit_code}
            reply["wrong"] = isinstance(error, SpecError)
        return role_pb2.OperateReply(reply_json=json.dumps(reply, allow_nan=False).encode())


def finite(value: Any) -> Any:
    """`value` for JSON: numbers that are not finite (an AUC without positives) become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return value


class RoleServer:
    """A running server. `close` it, or use it as a context."""

    def __init__(self, server: RpcServer) -> None:
        self._server = server
        self.address = server.address
        """See RpcServer."""

    def close(self) -> None:
        """Stop serving and release the address."""
        self._server.close(CLOSE_S)

    def __enter__(self) -> "RoleServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve_role(
    status: Callable[[], object],
    drain: Callable[[], None],
    secret: str,
    socket: Path | None,
    commit: Callable[[], None] | None = None,
    answer: Answer | None = None,
    tls: TlsEndpoint | None = None,
    exchange: Exchange = no_messages,
) -> RoleServer:
    """Serve the Role on the unix socket `socket`, with `tls` also there; see RpcServer.

    The callables run on threads of the server. All but `answer` return at once; `drain` and `commit` only raise a flag.
    Only a worker that leads commits has `commit`, and only rank 0 of a job has `answer` and `exchange`.
    """
    server = RpcServer(secret, max_workers=MAX_WORKERS, socket=socket, tls=tls)
    server.add_service(SERVICE, _Servicer(status, drain, commit, answer, exchange))
    server.start()
    return RoleServer(server)


class RoleClient:
    """Calls one worker. Any thread. Raises Unavailable, DeadlineExceeded, Refused."""

    def __init__(self, address: str, secret: str, tls: TlsPeer | None = None) -> None:
        """`tls`: for an address off loopback. Raises Refused without it, Unavailable."""
        self._address, self._secret, self._tls = address, secret, tls
        self._channel = RenewedChannel(address, tls=tls)

    def status(self, deadline: Deadline) -> dict[str, Any]:
        """The worker's status."""
        return self.exchange(b"", deadline)[0]

    def exchange(self, message: bytes, deadline: Deadline) -> tuple[dict[str, Any], bytes]:
        """Of the launcher: give rank 0 a message; the worker's status, and its message."""
        reply = self._call("Status", role_pb2.StatusRequest(message=message), role_pb2.StatusReply, deadline)
        status = documents.parse_object(reply.status_json, f"the status of the worker at {self._address}")
        return status, reply.message

    def drain(self, deadline: Deadline) -> None:
        """Ask the worker to finish its pass and end."""
        self._call("Drain", role_pb2.DrainRequest(), role_pb2.DrainReply, deadline)

    def commit(self, deadline: Deadline) -> None:
        """Ask rank 0 for a commit after its pass. Raises Refused where the worker leads no commits."""
        self._call("Commit", role_pb2.CommitRequest(), role_pb2.CommitReply, deadline)

    def operate(self, request: Mapping[str, Any], deadline: Deadline) -> dict[str, Any]:
        """Send rank 0 an operation; its answer.

        Raises NotYet where the call should be repeated, SpecError for a wrong request, else HeadraceError.
        """
        asked = role_pb2.OperateRequest(request_json=json.dumps(request).encode())
        told = self._call("Operate", asked, role_pb2.OperateReply, deadline).reply_json
        reply = documents.parse_object(told, f"the answer of the worker at {self._address}")
        if "error" in reply:
            refusal = SpecError if reply.get("wrong") else HeadraceError
            raise (NotYet if reply["again"] else refusal)(reply["error"])
        answer: dict[str, Any] = reply["answer"]
        return answer

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def _call(self, method: str, request: Message, reply: type[Reply], deadline: Deadline) -> Reply:
        deadline.check(f"asking the worker at {self._address}")
        try:
            with self._channel.for_call() as channel:
                call = channel.unary_unary(channels.path_of(SERVICE, method), channels.serialize, reply.FromString)
                return call(request, timeout=deadline.left_s(), metadata=channels.metadata(self._secret))
        except grpc.RpcError as error:
            raise channels.error_of_rpc(error, f"the worker at {self._address}", self._tls) from error
