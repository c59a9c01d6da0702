"""gRPC servers for every role of a job: bounded, with the job's secret, and mutual TLS off loopback.

Each service defines its own messages and calls; `headrace.rpc.role` and `pserver` use this module.
"""

import hmac
import logging
import os
import weakref
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from headrace.address import LOOPBACK, format_address
from headrace.errors import Unavailable
from headrace.http.listening import ConnectionBounds
from headrace.identity.credentials import Identity
from headrace.identity.join_token import StaleToken
from headrace.identity.peers import PeerName, PeerRule
from headrace.private_folder import private_folder
from headrace.rpc import refusals, unix_sockets
from headrace.rpc.channels import MAX_MESSAGE_BYTES, SECRET_KEY, keepalive_options, options, path_of, serialize
from headrace.rpc.refusals import RefusalReason, Refusals
from headrace.rpc.tls_listener import Peer, TlsEndpoint, TlsListener

MAX_CONNECTIONS = 128
"""Most connections of a server, if the process has enough descriptors; a further one is closed at once.

A shard has one for each trainer, a worker's Role one for the launcher and one for each command."""
MAX_CALLS = 32
"""Most concurrent calls of one connection; the next one waits at the client."""
HANDSHAKE_MS = 10_000
"""How long a connection may take for its handshake."""
IDLE_MS = 30_000
"""How long a connection to a port may be idle; a client reconnects by itself."""

TokenCheck = Callable[[str], None]
"""Takes a secret; raises StaleToken unless it is that of the join token."""
_Call = Callable[[Any, grpc.ServicerContext], Any]
Request = TypeVar("Request")
Reply = TypeVar("Reply")

log = logging.getLogger(__name__)


class RpcServer:
    """A server of gRPC. Add services, then `start` it; `close` it at the end."""

    def __init__(
        self,
        secret: str,
        *,
        max_workers: int,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        max_connections: int = MAX_CONNECTIONS,
        socket: Path | None = None,
        tls: TlsEndpoint | None = None,
        check_token: TokenCheck | None = None,
        keepalive: bool = False,
        noted: Refusals = refusals.PROCESS,
    ) -> None:
        """Bind the unix socket `socket`, or without it a free port of loopback. With `tls` listen there instead, and
        serve at the socket too.

        Only its owner can connect to the socket. If the socket cannot be bound, a port is used, and the log says so.
        A call waits while all `max_workers` threads are busy, until its own deadline. Instead of
        `secret`, a call of a process that joins may carry the secret of the token that `check_token` knows.
        `keepalive`: see channels.keepalive_options. Raises SpecError where `tls` names no address of this machine, and
        Unavailable for a port that is taken.
        """
        self._callers = _Callers(noted)
        self._held = ExitStack()
        if tls is not None and socket is None:
            socket = self._held.enter_context(private_folder("rpc")) / "rpc.socket"
        bound = bounds_of_callers(max_connections, is_port=socket is None or tls is not None)
        self._secrets = _SecretCheck(secret, check_token, self._callers)
        self._server = grpc.server(
            ThreadPoolExecutor(max_workers, thread_name_prefix="rpc"),
            interceptors=[self._secrets],
            options=[*options(max_message_bytes), *bound, *(keepalive_options() if keepalive else [])],
        )
        try:
            self.address = self._bind(socket, tls)
            """unix:PATH, or host:port."""
        except BaseException:
            self._held.close()  # else the folder of the socket would stay
            raise
        self.peer_of, self.source_of = self._callers.peer_of, self._callers.source_of
        """See _Callers."""

    def _bind(self, socket: Path | None, tls: TlsEndpoint | None) -> str:
        if socket is not None:
            try:
                address = _bind_socket(self._server, socket)
            except (OSError, RuntimeError) as error:
                if tls is not None:
                    raise
                log.warning("%s cannot be a unix socket (%s); listening on %s instead", socket, error, LOOPBACK)
            else:
                if tls is None:
                    return address
                self._callers.tls = TlsListener(tls, socket, self._callers.noted)
                return self._callers.tls.address
        try:
            return format_address(LOOPBACK, self._server.add_insecure_port(format_address(LOOPBACK, 0)))
        except RuntimeError as error:
            raise Unavailable(f"no port of {LOOPBACK} can be bound") from error

    def add_service(
        self,
        service: ServiceDescriptor,
        servicer: object,
        encode: Callable[[Any], bytes] = serialize,
        joining: Collection[str] = (),
    ) -> None:
        """Answer each call of `service` with the method of `servicer` that has its name.

        `encode` gives the bytes of each reply; `joining` are the methods for processes that join: without a
        certificate, and by the join token.
        """
        self._secrets.joining |= {path_of(service, method) for method in joining}
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        for method in service.methods:
            streams = method.server_streaming
            kind = grpc.unary_stream_rpc_method_handler if streams else grpc.unary_unary_rpc_method_handler
            call = self._callers.checked(getattr(servicer, method.name), joins=method.name in joining)
            handlers[method.name] = kind(call, GetMessageClass(method.input_type).FromString, encode)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))

    def start(self) -> None:
        """Answer calls."""
        self._server.start()

    def change(self, identity: Identity, accepts: PeerRule) -> None:
        """Without effect where there is no TLS."""
        if self._callers.tls is not None:
            self._callers.tls.change(identity, accepts)

    def close(self, grace_s: float) -> None:
        """Stop serving and free the address. Calls in flight have `grace_s` to end."""
        self._server.stop(grace_s).wait()
        if self._callers.tls is not None:
            self._callers.tls.close()
        self._held.close()


class _Callers:
    """The callers of a server. Handlers keep this, and not the server: gRPC's thread may keep them for a while."""

    def __init__(self, noted: Refusals) -> None:
        self.noted = noted
        self.tls: TlsListener | None = None

    def _peer(self, context: grpc.ServicerContext) -> Peer | None:
        return None if self.tls is None else self.tls.peer(context.peer())

    def peer_of(self, context: grpc.ServicerContext) -> PeerName | None:
        """The name of the caller, proved by its certificate; None for a caller on this machine."""
        peer = self._peer(context)
        return None if peer is None else peer.name

    def source_of(self, context: grpc.ServicerContext) -> str:
        """The name of the caller, or else its machine, for people."""
        peer = self._peer(context)
        return _machine_of(context.peer()) if peer is None else str(peer.name or peer.source)

    def checked(self, call: _Call, *, joins: bool) -> _Call:
        """`call` for peers that are accepted; others are refused with the reason."""

        def answer(request: Any, context: grpc.ServicerContext) -> Any:
            peer = self._peer(context)
            if peer is not None and peer.objection:
                if not peer.counted:  # it was accepted when it connected
                    self.noted.note(peer.reason, peer.source, peer.objection)
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"your certificate is refused: {peer.objection}")
            if self.tls is not None:
                self.tls.prove(context.peer())
            if peer is not None and peer.name is None and not joins and self.tls is not None and self.tls.certifies:
                self.noted.note(RefusalReason.NO_CERTIFICATE, peer.source, "it calls before it has joined")
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this call needs a certificate: join first")
            return call(request, context)

        return answer


def bounds_of_callers(max_connections: int, *, is_port: bool) -> list[tuple[str, int]]:
    """Options of a server that bound what unauthenticated clients can use."""
    return [
        ("grpc.max_allowed_incoming_connections", min(max_connections, ConnectionBounds.here().open)),
        ("grpc.max_concurrent_streams", MAX_CALLS),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        *([("grpc.max_connection_idle_ms", IDLE_MS)] if is_port else []),
    ]


class _SecretCheck(grpc.ServerInterceptor):
    """Refuses every call that does not carry the job's secret, or the join token, before its message is read.

    gRPC gives a call with one message a thread, which waits for the whole message. So a refusal is declared as a call
    with a stream of messages, of which it reads none, and runs on its own thread.
    """

    def __init__(self, secret: str, check_token: TokenCheck | None, callers: _Callers) -> None:
        self._secret, self._check_token = secret.encode(), check_token
        self.joining: frozenset[str] = frozenset()
        """Paths of the methods for processes that join."""
        thread = ThreadPoolExecutor(1, "refusals")
        why = "its call has another secret than this generation"
        told = "wrong secret: this process belongs to another job"
        self._wrong_secret = _refusal(callers, RefusalReason.WRONG_SECRET, why, told, thread)
        stale = str(StaleToken())
        self._stale_token = _refusal(callers, RefusalReason.STALE_TOKEN, stale, stale, thread)

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "grpc.RpcMethodHandler[Request, Reply] | None"],
        details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Request, Reply] | None":
        """Go on only with the right secret, compared in constant time."""
        given = str(dict(details.invocation_metadata).get(SECRET_KEY, ""))
        if hmac.compare_digest(given.encode(), self._secret):
            return continuation(details)
        if self._check_token is None or details.method not in self.joining:
            return self._wrong_secret
        try:
            self._check_token(given)
        except StaleToken:
            return self._stale_token
        return continuation(details)


def _refusal(
    callers: _Callers, reason: RefusalReason, why: str, told: str, thread: ThreadPoolExecutor
) -> "grpc.RpcMethodHandler[Any, Any]":
    """Refuses a call, counts it, and logs `why`; the caller is `told`."""

    def refuse(_unread: object, context: grpc.ServicerContext) -> None:
        callers.noted.note(reason, callers.source_of(context), why)
        context.abort(grpc.StatusCode.UNAUTHENTICATED, told)

    refuse.experimental_thread_pool = thread  # type: ignore[attr-defined]
    return grpc.stream_unary_rpc_method_handler(refuse)


def _machine_of(connection: str) -> str:
    """The machine of a caller; not its port, which differs with each connection."""
    kind, _, rest = connection.partition(":")
    return unquote(rest.rpartition(":")[0]) if kind.startswith("ip") else "a process of this machine"


def _bind_socket(server: grpc.Server, socket: Path) -> str:
    """Bind a server that is not started to a unix socket; returns its address. Raises OSError, RuntimeError."""
    address = unix_sockets.address_of(socket)
    target, descriptor = unix_sockets.target_of(address)
    if descriptor is not None:
        weakref.finalize(server, os.close, descriptor)
    server.add_insecure_port(target)
    socket.chmod(unix_sockets.OWNER_ONLY)
    return address
