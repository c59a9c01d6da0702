"""ZeroMQ sockets between processes of a job: private, bounded, and told when their peer is gone.

On one machine a listener is a unix socket in a folder of mode 0700, and a peer shows a ticket at the handshake. Between
machines, and where no socket can be, it is a TCP port with CURVE: encrypted, and a peer proves that it has an admitted
key. Tickets and public keys travel over gRPC, which checks the job's secret, and between machines certificates; nobody
else gets as far as sending a message. Strangers are counted.
"""

import hmac
import logging
import math
import os
import secrets
import socket as system_sockets
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import monitor, z85

from headrace.address import LOOPBACK, format_address, format_host, is_ipv6, parse_address
from headrace.rpc import refusals, unix_sockets
from headrace.rpc.refusals import RefusalReason, Refusals

MAX_QUEUED = 64
"""Most messages that wait for one peer, and most of its messages that wait here. Sending more is an error."""
HANDSHAKE_MS = 10_000
"""How long a connection may take for its handshake."""
SILENT_S = 30.0
"""Default of `silent_s`: over TCP, the silence of the peer's machine after which a connection counts as broken. The
kernel probes idle connections meanwhile. At a unix socket it closes one when the peer's process ends. ZeroMQ's own
heartbeats would do for neither: they count a peer as silent while one long message of it is on its way."""
MAX_PROBES = 100
"""Most probes of a silent connection; Linux allows 127."""
PRIVATE = 0o700
"""Mode of the folder of a unix socket."""
SEND_BUFFER_BYTES = 4 << 20
"""Wanted for a unix socket; the kernel may allow less (net.core.wmem_max). Its reader then wakes once a message."""
MAX_KEYS = 256
"""Most keys admitted at a port; beyond it the oldest is forgotten."""

_LOST = {
    zmq.Event.DISCONNECTED: "the connection was closed",
    zmq.Event.CLOSED: "nobody listens there",
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "the handshake failed",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "the handshake failed",
    zmq.Event.HANDSHAKE_FAILED_AUTH: "the peer refused the connection",
}
_USER = b"headrace"
_STRANGE = {
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: (RefusalReason.SILENT, "it finished no handshake: a port scan?"),
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: (
        RefusalReason.PLAIN_TEXT,
        "it does not speak CURVE, which this port requires",
    ),
}
"""Handshakes that fail before a peer shows its key or ticket."""

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DataAddress:
    """Where a listener is, and what its peers need."""

    address: str
    """unix:PATH, or host:port."""
    ticket: str = ""
    """At a unix socket: what a peer must show."""
    key: str = ""
    """At a port: the public key of the listener."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A pair of CURVE keys, as text (Z85)."""

    public: str
    secret: str

    @classmethod
    def make(cls) -> "KeyPair":
        """A new pair."""
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())


class DataListener:
    """A ROUTER socket. One thread uses `router` and `admission` and calls `admit`; any thread calls `allow`."""

    def __init__(
        self,
        socket: Path | None,
        max_message_bytes: int,
        host: str = LOOPBACK,
        noted: Refusals = refusals.PROCESS,
        silent_s: float = SILENT_S,
    ) -> None:
        """Listen at the unix socket `socket`, in a folder of its own; without one at a free port of `host`.

        If the socket cannot be bound, a port is used, and the log says so.
        """
        self._host, self._noted, self._silent_s = host, noted, silent_s
        self._context: Context = zmq.Context()
        self._max_message_bytes = max_message_bytes
        self._ticket = secrets.token_hex(32)
        self._keys: deque[bytes] = deque(maxlen=MAX_KEYS)
        self._path: Path | None = None
        self._descriptor: int | None = None
        self.admission = self._context.socket(zmq.REP)
        """Readable while a peer waits to be admitted."""
        self.admission.bind("inproc://zeromq.zap.01")
        try:
            self.router, self.address = self._at_port() if socket is None else self._at_socket(socket)
        except (OSError, zmq.ZMQError) as error:
            if socket is None:
                raise
            log.warning("%s cannot be a unix socket (%s); data goes over 127.0.0.1 instead", socket, error)
            self.router, self.address = self._at_port()
        self.events = self.router.get_monitor_socket(sum(_STRANGE) | zmq.Event.ACCEPTED)
        """Readable once a peer has connected, or its handshake has failed: call `note_peers`."""

    def _open(self) -> Socket:
        router = _bounded(self._context.socket(zmq.ROUTER), self._max_message_bytes, self._silent_s)
        router.router_mandatory = True
        router.zap_domain = _USER
        return router

    def _at_socket(self, path: Path) -> tuple[Socket, DataAddress]:
        path.parent.mkdir(mode=PRIVATE, exist_ok=True)
        path.parent.chmod(PRIVATE)
        address = unix_sockets.address_of(path)
        target, self._descriptor = unix_sockets.target_of(address)
        router = self._open()
        router.plain_server = True
        try:
            router.bind(_ipc(target))
        except zmq.ZMQError:
            router.close(0)
            raise
        self._path = path
        return router, DataAddress(address, ticket=self._ticket)

    def _at_port(self) -> tuple[Socket, DataAddress]:
        keys, router = KeyPair.make(), self._open()
        router.curve_server = True
        router.curve_publickey, router.curve_secretkey = keys.public.encode(), keys.secret.encode()
        router.ipv6 = is_ipv6(self._host)
        port = router.bind_to_random_port(f"tcp://{format_host(self._host)}")
        return router, DataAddress(format_address(self._host, port), key=keys.public)

    def allow(self, key: str) -> None:
        """Admit peers with this public key. Raises ValueError for text that is no key."""
        try:
            raw = z85.decode(key.encode())
        except (ValueError, KeyError, OverflowError) as error:
            raise ValueError(f"{key!r} is no public key") from error
        if len(raw) != 32:
            raise ValueError(f"{key!r} is no public key")
        if raw not in self._keys:
            self._keys.append(raw)

    def admit(self) -> None:
        """Answer a peer that waits to be admitted (ZeroMQ's RFC 27)."""
        version, request, _domain, peer, _identity, mechanism, *given = self.admission.recv_multipart()
        admitted = False
        if mechanism == b"PLAIN" and len(given) == 2:
            admitted = hmac.compare_digest(given[1], self._ticket.encode())
        elif mechanism == b"CURVE" and len(given) == 1:
            admitted = given[0] in self._keys
        if not admitted:
            source = peer.decode(errors="replace") or "a process of this machine"
            self._noted.note(RefusalReason.WRONG_DATA_KEY, source, "its key was not delivered by gRPC: who is it?")
        self.admission.send_multipart([version, request, b"200" if admitted else b"400", b"", b"", b""])

    def note_peers(self) -> None:
        """Give new connections buffers, count failed handshakes. By the thread of the sockets, as `events` say."""
        while (event := _event_of(self.events)) is not None:
            if event in _STRANGE:
                reason, why = _STRANGE[event]
                self._noted.note(reason, f"a connection to the data plane at {self.address.address}", why)

    def close(self, linger_ms: int) -> None:
        """Stop listening; messages on their way have `linger_ms`. By the thread of the sockets, or after it."""
        self.router.disable_monitor()
        self.events.close(0)
        self.router.close(linger_ms)
        self.admission.close(0)
        self._context.term()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            with suppress(OSError):  # a successor at the same path may already be there
                self._path.parent.rmdir()
        if self._descriptor is not None:
            os.close(self._descriptor)


class DataConnection:
    """A connection to a listener, which is not made again once it breaks. One thread at a time."""

    def __init__(
        self, context: Context, to: DataAddress, keys: KeyPair, max_message_bytes: int, silent_s: float = SILENT_S
    ) -> None:
        """Connect in the background; `keys` are those of this peer. Raises OSError if the socket's folder is gone."""
        target, self._descriptor = unix_sockets.target_of(to.address)
        self.socket = _bounded(context.socket(zmq.DEALER), max_message_bytes, silent_s)
        self.socket.reconnect_ivl = -1
        self.events = self.socket.get_monitor_socket(sum(_LOST) | zmq.Event.CONNECTED)
        """Readable once the connection is made, or may be broken: call `broken`."""
        if to.key:
            self.socket.curve_serverkey = to.key.encode()
            self.socket.curve_publickey, self.socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
            self.socket.ipv6 = is_ipv6(parse_address(to.address)[0])
            self.socket.connect(f"tcp://{to.address}")
        else:
            self.socket.plain_username, self.socket.plain_password = _USER, to.ticket.encode()
            self.socket.connect(_ipc(target))

    def broken(self) -> str:
        """The reason in words why the connection is of no use any more, or nothing."""
        while (event := _event_of(self.events)) is not None:
            if event in _LOST:
                return _LOST[event]
        return ""

    def close(self) -> None:
        """Give up the connection and all that it has not sent."""
        self.socket.disable_monitor()
        self.events.close(0)
        self.socket.close(0)
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def send(socket: Socket, frames: Sequence[Any]) -> None:
    """Send a message without waiting. Large arrays are not copied: they must not change until the peer has answered.

    Raises zmq.ZMQError if the peer is gone, or too many messages wait for it.
    """
    socket.send_multipart(frames, zmq.NOBLOCK, copy=False)


def receive(socket: Socket) -> list[memoryview] | None:
    """The parts of the next message, which are not copied, or None if none is there."""
    try:
        return [frame.buffer for frame in socket.recv_multipart(zmq.NOBLOCK, copy=False)]
    except zmq.Again:
        return None


def _event_of(events: Socket) -> zmq.Event | None:
    """The next event of a monitor, if there is one. A new connection gets its buffer."""
    try:
        message = monitor.recv_monitor_message(events, zmq.NOBLOCK)
    except zmq.Again:
        return None
    event = zmq.Event(message["event"])
    if event in (zmq.Event.CONNECTED, zmq.Event.ACCEPTED):
        _enlarge(message["value"])
    return event


def _enlarge(descriptor: int) -> None:
    """Give a unix socket its buffer; ZeroMQ, which owns it, has an option for TCP alone. It may be closed by now."""
    with suppress(OSError):
        connection = system_sockets.socket(fileno=descriptor)
        try:
            if connection.family == system_sockets.AF_UNIX:
                connection.setsockopt(system_sockets.SOL_SOCKET, system_sockets.SO_SNDBUF, SEND_BUFFER_BYTES)
        finally:
            connection.detach()


def _bounded(socket: Socket, max_message_bytes: int, silent_s: float) -> Socket:
    socket.sndhwm = socket.rcvhwm = MAX_QUEUED
    socket.maxmsgsize = max_message_bytes
    socket.handshake_ivl = HANDSHAKE_MS
    socket.linger = 0
    between_s = math.ceil(silent_s / MAX_PROBES)
    socket.tcp_keepalive, socket.tcp_keepalive_cnt = 1, math.ceil(silent_s / between_s)
    socket.tcp_keepalive_idle = socket.tcp_keepalive_intvl = between_s
    socket.tcp_maxrt = math.ceil(silent_s * 1000)
    return socket


def _ipc(target: str) -> str:
    return f"ipc://{target.removeprefix(unix_sockets.SCHEME)}"
