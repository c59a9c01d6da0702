"""ZeroMQ sockets between processes of a job: private, bounded, and told when their peer is gone.

On one machine a listener is a unix socket in a folder of mode 0700, and a peer shows a ticket at the handshake. Between
machines, and where no socket can be, it is a TCP port with CURVE: encrypted, and a peer proves that it has an admitted
key. Tickets and public keys travel over gRPC, which checks the job's secret, and between machines certificates; nobody
else gets as far as sending a message. Strangers are counted.
"""

import fcntl
import hmac
import logging
import math
import mmap
import os
import secrets
import socket as system_sockets
import stat
import struct
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from numpy.typing import NDArray
from zmq.utils import monitor, z85

from headrace.address import LOOPBACK, format_address, format_host, is_ipv6, parse_address
from headrace.rpc import refusals, unix_sockets
from headrace.rpc.refusals import RefusalReason, Refusals

# Memory shared by two processes of one machine: the arrays of a message lie in it, and the message tells where.
#
# The memory has no name, so nothing of it outlives both processes. Its owner offers it by the number of its process and
# of its descriptor; it is sealed, so it cannot shrink under the peer. Each process writes to a half of its own, one
# message at a time, and checks every place that the other one tells.

HALF_BYTES = 64 << 20
"""Room for the arrays of one message. Pages count once they are used. Arrays of larger messages are in the message."""
HEAD_BYTES = mmap.PAGESIZE
"""Before the halves: the number of the memory."""
ALIGNMENT = 64
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
MAX_PLACES = 4096
"""Most arrays of a message."""

_NUMBER = struct.Struct("<Q")
_PLACE = struct.Struct("<QQ")


@dataclass(frozen=True, slots=True)
class MemoryOffer:
    """Where a peer finds a memory."""

    process: int
    descriptor: int
    number: int
    """Random; it is also at the beginning of the memory."""


class SharedMemory:
    """One end of a memory. One thread at a time."""

    def __init__(self, descriptor: int, number: int, *, owner: bool) -> None:
        """Use `create` or `open`."""
        self._bytes = np.frombuffer(mmap.mmap(descriptor, HEAD_BYTES + 2 * HALF_BYTES), np.uint8)
        self._address = self._bytes.ctypes.data
        self._offered: int | None = None
        self.number = number
        halves = HEAD_BYTES, HEAD_BYTES + HALF_BYTES
        self._mine, self._theirs = halves if owner else halves[::-1]
        self._next = self._mine

    @classmethod
    def create(cls) -> "SharedMemory":
        """A memory of this process. Raises OSError."""
        descriptor = os.memfd_create("headrace", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, HEAD_BYTES + 2 * HALF_BYTES)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
            memory = cls(descriptor, secrets.randbits(64), owner=True)
        except OSError:
            os.close(descriptor)
            raise
        memory._offered = descriptor
        _NUMBER.pack_into(memory._bytes.data, 0, memory.number)
        return memory

    @classmethod
    def open(cls, offer: MemoryOffer) -> "SharedMemory":
        """The peer's end of a memory that another process offers. Raises OSError."""
        path = f"/proc/{offer.process}/fd/{offer.descriptor}"
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            found = os.fstat(descriptor)
            whole = stat.S_ISREG(found.st_mode) and found.st_size == HEAD_BYTES + 2 * HALF_BYTES
            if not whole or fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS != SEALS:
                raise OSError(f"{path} is no memory to share")
            memory = cls(descriptor, offer.number, owner=False)
        finally:
            os.close(descriptor)
        if _NUMBER.unpack_from(memory._bytes.data, 0) != (offer.number,):
            raise OSError(f"{path} is another memory")
        return memory

    @property
    def offer(self) -> MemoryOffer:
        """Where a peer finds the memory, until `offered`."""
        assert self._offered is not None, "by the owner, before `offered`"
        return MemoryOffer(os.getpid(), self._offered, self.number)

    def offered(self) -> None:
        """The peer has opened the memory, or will not."""
        if self._offered is not None:
            os.close(self._offered)
            self._offered = None

    def clear(self) -> None:
        """Begin a message: its arrays take the place of those of the last one."""
        self._next = self._mine

    def empty(self, *shape: int) -> NDArray[np.float32]:
        """An array of floats for the present message; one of this process alone where there is no room."""
        num_bytes = 4 * int(np.prod(shape))
        begin, end = self._next, self._next + num_bytes
        if end > self._mine + HALF_BYTES:
            return np.empty(shape, np.float32)
        self._next = -(-end // ALIGNMENT) * ALIGNMENT
        return self._bytes[begin:end].view(np.float32).reshape(shape)

    def places_of(self, frames: Sequence[memoryview]) -> bytes | None:
        """Where the arrays of a message are; None if not all are in this memory."""
        places = [_NUMBER.pack(self.number)]
        for frame in frames:
            begin = np.frombuffer(frame, np.uint8).ctypes.data - self._address if frame.nbytes else self._mine
            if not self._mine <= begin <= self._mine + HALF_BYTES - frame.nbytes:
                return None
            places.append(_PLACE.pack(begin, frame.nbytes))
        return b"".join(places)

    def frames_at(self, places: memoryview) -> list[memoryview]:
        """The arrays of a peer's message, read-only; its next message overwrites them. Raises ValueError."""
        if number_of(places) != self.number:
            raise ValueError("arrays in another memory than this one")
        found, limit = [], self._theirs + HALF_BYTES
        for begin, num_bytes in _PLACE.iter_unpack(places[_NUMBER.size :]):
            if begin < self._theirs or begin + num_bytes > limit:
                raise ValueError(f"an array of {num_bytes} bytes at {begin}, outside of the sender's half")
            found.append(self._bytes[begin : begin + num_bytes].data.toreadonly())
        return found


def number_of(places: memoryview) -> int | None:
    """The memory in which the arrays of a message lie; None for bytes that tell no places."""
    rest = len(places) - _NUMBER.size
    if rest < 0 or rest % _PLACE.size or rest > _PLACE.size * MAX_PLACES:
        return None
    return int(_NUMBER.unpack_from(places)[0])


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
