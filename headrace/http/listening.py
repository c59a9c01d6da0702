"""Listening sockets, with a bound on their connections that depends on the descriptors of the process.

A process without free descriptors can open no file. So connections use half of them at most, and a further connection
is closed at once. Connections are counted when they are accepted, so one that never begins its TLS handshake counts.
"""

import resource
import socket
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from headrace.errors import SpecError

MAX_CONNECTIONS = 512
"""Most connections with an answer; beyond it the answer is 503. 200 polling clients and all streams are fewer."""


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


class Listener(socket.socket):
    """A listening socket with a bound on connections. For asyncio, whose event loop calls `accept`."""

    def __init__(self, family: int, room: ConnectionBounds) -> None:
        super().__init__(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self.room = room
        self._accepted: WeakSet[socket.socket] = WeakSet()

    def accept(self) -> tuple[socket.socket, Any]:
        """See socket.socket. Raises ConnectionAbortedError beyond the bound; asyncio then goes on."""
        connection, address = super().accept()
        if len(self._accepted) >= self.room.open:  # closed ones may not be collected yet
            self._accepted = WeakSet(each for each in self._accepted if each.fileno() >= 0)
        if len(self._accepted) >= self.room.open:
            connection.close()
            raise ConnectionAbortedError(f"{self.room.open} connections are open already")
        self._accepted.add(connection)
        return connection, address


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
        listener.listen(room.open)
    except OSError as error:
        listener.close()
        raise SpecError(f"{host}:{port} is not available: {error.strerror}; choose another port", at) from error
    return listener
