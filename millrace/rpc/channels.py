"""gRPC for every role of a job: local, bounded, with the job's secret, and our errors for status codes.

Each service defines its own messages and calls; `millrace.rpc.role` and `pserver` use this module.
millrace.rpc.unix_sockets names unix sockets.
"""

import hmac
import logging
import os
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from millrace.deadline import Deadline
from millrace.durable import writing
from millrace.errors import DeadlineExceeded, MillraceError, Refused, Unavailable
from millrace.http.listening import ConnectionBounds
from millrace.rpc import unix_sockets

SECRET_KEY = "millrace-secret"
"""Metadata key of the job's secret, in every call: clients of other jobs are refused."""
MAX_MESSAGE_BYTES = 4 << 20
"""Default bound of a message; a larger one fails the call with RESOURCE_EXHAUSTED."""


MAX_CONNECTIONS = 128
"""Most connections of a server, if the process has enough descriptors; a further one is closed at once.

A shard has one for each trainer, a worker's Role one for the launcher and one for each command."""
MAX_CALLS = 32
"""Most concurrent calls of one connection; the next one waits at the client."""
HANDSHAKE_MS = 10_000
"""How long a connection may take for its handshake."""
IDLE_MS = 30_000
"""How long a connection to a port may be idle; a client reconnects by itself."""

Request = TypeVar("Request")
Reply = TypeVar("Reply")

log = logging.getLogger(__name__)


def options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Options of a channel or server: bounded messages; a taken port is an error; no proxies on this machine."""
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.so_reuseport", 0),
        ("grpc.enable_http_proxy", 0),
    ]


def _bounds_of_callers(*, is_port: bool) -> list[tuple[str, int]]:
    """Options of a server that bound what unauthenticated clients can use."""
    return [
        ("grpc.max_allowed_incoming_connections", min(MAX_CONNECTIONS, ConnectionBounds.here().open)),
        ("grpc.max_concurrent_streams", MAX_CALLS),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        *([("grpc.max_connection_idle_ms", IDLE_MS)] if is_port else []),
    ]


class _SecretCheck(grpc.ServerInterceptor):
    """Refuses every call that does not carry the job's secret, before its message is read.

    gRPC gives a call with one message a thread, which waits for the whole message. So a refusal is declared as a call
    with a stream of messages, of which it reads none, and runs on its own thread.
    """

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

        def refuse(_unread: object, context: grpc.ServicerContext) -> None:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong secret: this process belongs to another job")

        refuse.experimental_thread_pool = ThreadPoolExecutor(1, "refusals")  # type: ignore[attr-defined]
        self._refusal: grpc.RpcMethodHandler[Any, Any] = grpc.stream_unary_rpc_method_handler(refuse)

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "grpc.RpcMethodHandler[Request, Reply] | None"],
        details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Request, Reply] | None":
        """Go on only with the right secret, compared in constant time."""
        given = str(dict(details.invocation_metadata).get(SECRET_KEY, ""))
        return continuation(details) if hmac.compare_digest(given.encode(), self._secret) else self._refusal


def local_server(
    secret: str, *, max_workers: int, max_message_bytes: int = MAX_MESSAGE_BYTES, socket: Path | None = None
) -> tuple[grpc.Server, str]:
    """A server that is not started yet, and its address: the unix socket `socket`, or a free port of 127.0.0.1.

    Only its owner can connect to the socket. If the socket cannot be bound, a port is used, and the log says so.
    A call waits while all `max_workers` threads are busy, until its own deadline.
    """
    if socket is not None:
        server = _server(secret, max_workers, max_message_bytes, is_port=False)
        try:
            return server, _bind(server, socket)
        except (OSError, RuntimeError) as error:
            log.warning("%s cannot be a unix socket (%s); listening on 127.0.0.1 instead", socket, error)
    server = _server(secret, max_workers, max_message_bytes, is_port=True)
    return server, f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"


def _server(secret: str, max_workers: int, max_message_bytes: int, *, is_port: bool) -> grpc.Server:
    return grpc.server(
        ThreadPoolExecutor(max_workers, thread_name_prefix="rpc"),
        interceptors=[_SecretCheck(secret)],
        options=[*options(max_message_bytes), *_bounds_of_callers(is_port=is_port)],
    )


def _bind(server: grpc.Server, socket: Path) -> str:
    """Bind a server that is not started to a unix socket; returns its address. Raises OSError, RuntimeError."""
    address = unix_sockets.address_of(socket)
    target, descriptor = unix_sockets.target_of(address)
    if descriptor is not None:
        weakref.finalize(server, os.close, descriptor)
    server.add_insecure_port(target)
    socket.chmod(unix_sockets.OWNER_ONLY)
    return address


def path_of(service: ServiceDescriptor, method: str) -> str:
    """The name under which gRPC calls a method of a service."""
    return f"/{service.full_name}/{method}"


def serialize(message: Message) -> bytes:
    """The bytes of a message."""
    return message.SerializeToString()


def add_service(
    server: grpc.Server, service: ServiceDescriptor, servicer: object, encode: Callable[[Any], bytes] = serialize
) -> None:
    """Have `server` answer each call of `service` with the method of `servicer` that has its name.

    `encode` gives the bytes of each reply.
    """
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for method in service.methods:
        kind = grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
        handlers[method.name] = kind(
            getattr(servicer, method.name), GetMessageClass(method.input_type).FromString, encode
        )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))


def open_channel(address: str, *, max_message_bytes: int = MAX_MESSAGE_BYTES) -> grpc.Channel:
    """A channel to a role of the job; connects at the first call. Raises Unavailable if its folder does not exist."""
    try:
        target, descriptor = unix_sockets.target_of(address)
    except OSError as error:
        raise Unavailable(f"{address} is not there: {error.strerror}; has that process ended?") from error
    channel = grpc.insecure_channel(target, options=options(max_message_bytes))
    if descriptor is not None:
        weakref.finalize(channel, os.close, descriptor)
    return channel


def metadata(secret: str) -> tuple[tuple[str, str | bytes], ...]:
    """The metadata that every call must carry."""
    return ((SECRET_KEY, secret),)


def error_of_rpc(error: grpc.RpcError, peer: str) -> MillraceError:
    """Our error for a failed call; `peer` names the callee in the message."""
    code, details = error.code(), error.details()
    match code:
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(f"{peer} did not answer in time")
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:
            return Unavailable(f"{peer} is not reachable: {details}")
        case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.FAILED_PRECONDITION:
            return Refused(f"{peer} refused the call: {details}")
        case _:
            return MillraceError(f"{peer} failed: {code.name}: {details}")


def write_address(path: Path, address: str) -> None:
    """Write the address of this process for the launcher: whole or not at all, readable by the owner only.

    Raises Unwritable.
    """
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with writing(path):
            with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                file.write(address)
            unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def await_address(path: Path, deadline: Deadline, alive: Callable[[], None]) -> str:
    """Wait for the address that another process writes to `path`; `alive` raises when that process has ended."""
    while not path.exists():
        alive()
        deadline.check(f"waiting for an address in {path}")
        time.sleep(0.02)
    return path.read_text()
