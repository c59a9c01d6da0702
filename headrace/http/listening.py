"""Listening sockets, with a bound on their connections that depends on the descriptors of the process.

A process without free descriptors can open no file. So connections use half of them at most. Connections are counted
when they are accepted, so one that never begins its TLS handshake counts. Where the places are taken, a new connection
gets that of one without a request (headrace.connection_places); if there is none, it is answered 503 or closed.
"""

import os
import resource
import socket
import ssl
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.types import Scope

from headrace.connection_places import Place, yielding
from headrace.errors import SpecError

MAX_CONNECTIONS = 512
"""Most connections with an answer; beyond it the answer is 503. 200 polling clients and all streams are fewer."""
BACKLOG = 1024
"""Most connections that the kernel holds until they are accepted; a client that comes then tries again after 1 s."""
_PLACE = "headrace.place"


@dataclass(frozen=True, slots=True)
class ConnectionBounds:
    """Bounds on the connections of one listener."""

    answered: int
    """Beyond it a request is answered 503."""
    open: int
    """Beyond it a connection is closed at once."""

    @classmethod
    def of(cls, descriptors: int) -> "ConnectionBounds":
        """The bounds for a process with this many descriptors: half of them, an eighth more for answers of 503."""
        answered = min(MAX_CONNECTIONS, descriptors * 4 // 9)
        return cls(max(1, answered), max(1, answered) + answered // 8)

    @classmethod
    def here(cls) -> "ConnectionBounds":
        """The bounds of this process, by its present `ulimit -n`."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return cls.of(1 << 20 if soft == resource.RLIM_INFINITY else soft)

    @property
    def reserve(self) -> int:
        """Of the answered ones, places that no connection without a request keeps."""
        return max(1, self.answered // 8)


class Listener(socket.socket):
    """A listening socket with a bound on connections. For asyncio, whose event loop calls `accept`."""

    def __init__(self, family: int, room: ConnectionBounds) -> None:
        super().__init__(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self.room = room
        self._open: dict[tuple[str, int], tuple[socket.socket, Place]] = {}
        """By host and port of the client, in the order of their beginning. Closed ones may still be there."""
        self._ended: list[socket.socket] = []
        """Those that gave way and may not be closed yet."""

    def accept(self) -> tuple[socket.socket, Any]:
        """Raises ConnectionAbortedError beyond the bound, and BlockingIOError while connections that
        gave way are closed; asyncio then goes on."""
        self._ended = [each for each in self._ended if each.fileno() >= 0]
        if len(self._ended) >= self.room.reserve:
            raise BlockingIOError("connections that gave way are being closed")
        connection, address = super().accept()
        if len(self._open) >= self.room.answered - self.room.reserve:
            self._make_room(address[0])
        if len(self._open) >= self.room.open:
            connection.close()
            raise ConnectionAbortedError(f"{self.room.open} connections are open already")
        self._open[address[:2]] = connection, Place.of(address[0], lambda: _end(connection))
        return connection, address

    def place(self, client: tuple[str, int] | None) -> Place | None:
        """The place of the connection of a client, by its host and port."""
        _, place = self._open.get(client, (None, None)) if client else (None, None)
        return place

    def _make_room(self, client: str) -> None:
        """Forget connections that are closed; if they are too few, end one that gives way to the client's."""
        self._open = {client: each for client, each in self._open.items() if each[0].fileno() >= 0}
        if len(self._open) < self.room.answered - self.room.reserve:
            return
        places = {place: client for client, (_, place) in self._open.items()}
        if (ended := yielding(places.keys(), client)) is not None:
            connection, _ = self._open.pop(places[ended])
            self._ended.append(connection)
            ended.end()


def _end(connection: socket.socket) -> None:
    """End a connection without a protocol yet: who reads it sees its end."""
    with suppress(OSError):  # the client has ended it
        connection.shutdown(socket.SHUT_RDWR)


def with_place(scope: Scope, place: Place | None) -> None:
    """Note the place of the connection that a request comes by; for `prove`."""
    scope[_PLACE] = place


def prove(scope: Scope) -> None:
    """The request of `scope` has a valid token: its connection gives way after those of strangers."""
    if (place := scope.get(_PLACE)) is not None:
        place.proven = True


def listen(host: str, port: int, at: str, room: ConnectionBounds | None = None) -> Listener:
    """Listen at host and port; port 0 takes a free one. `room`: None is `ConnectionBounds.here()`.

    Raises SpecError at the option or key `at`.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise SpecError(f"{host}:{port} is not an address: {error}", at) from error
    room = room or ConnectionBounds.here()
    listener = Listener(family, room)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Head and body of an answer are two writes; without this the second waits 40 ms for an acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise SpecError(f"{host}:{port} is not available: {error.strerror}; choose another port", at) from error
    return listener


# Checks certificate files before a server uses them.


def check_tls(cert: Path, key: Path, at: tuple[str, str] = ("tls.cert", "tls.key")) -> None:
    """Raise SpecError if the files cannot be read, do not belong together, or the key is readable by everybody.

    `at`: the keys or options that name the two files.
    """
    for path, name in zip((cert, key), at, strict=True):
        if not path.is_file() or not os.access(path, os.R_OK):
            raise SpecError(f"{path}: no such file, or it is not readable", name)
    if key.stat().st_mode & (stat.S_IROTH | stat.S_IWOTH):
        raise SpecError(f"{key} may be read or written by everybody on this machine: chmod 600 {key}", at[1])
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key, password=lambda: b"")  # never asks a terminal
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise SpecError(f"{cert} and {key} are not a certificate and its key: {reason}", at[0]) from None
