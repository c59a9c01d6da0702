"""Sockets that listen, and how many connections they have at a time: as many as there are descriptors for.

A process that has used up its descriptors can open no file. So connections have half of them at most, and a further one
is closed as it comes. They are counted when they are accepted: with TLS, one that never begins its handshake counts.
"""

import resource
import socket
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from millrace.errors import SpecError

MAX_CONNECTIONS = 512
"""Beyond it the answer is 503, however many descriptors there are: 200 clients that poll and all streams are fewer."""


@dataclass(frozen=True, slots=True)
class Room:
    """Connections of one listener."""

    answered: int
    """Beyond it a request is told 503."""
    open: int
    """Beyond it a connection is closed at once."""

    @classmethod
    def of(cls, descriptors: int) -> "Room":
        """With so many descriptors for the whole process: half of them, and an eighth of the connections to say 503."""
        answered = min(MAX_CONNECTIONS, descriptors * 4 // 9)
        return cls(max(1, answered), max(1, answered) + answered // 8)

    @classmethod
    def here(cls) -> "Room":
        """In this process, as `ulimit -n` is now."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return cls.of(1 << 20 if soft == resource.RLIM_INFINITY else soft)


class Listener(socket.socket):
    """A socket that listens with room for so many connections. For asyncio, whose own loop asks it to accept."""

    def __init__(self, family: int, room: Room) -> None:
        super().__init__(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self.room = room
        self._accepted: WeakSet[socket.socket] = WeakSet()

    def accept(self) -> tuple[socket.socket, Any]:
        """See socket.socket. Raises ConnectionAbortedError, too, where there is no room: asyncio then goes on."""
        connection, address = super().accept()
        if len(self._accepted) >= self.room.open:  # closed ones may not be collected yet
            self._accepted = WeakSet(each for each in self._accepted if each.fileno() >= 0)
        if len(self._accepted) >= self.room.open:
            connection.close()
            raise ConnectionAbortedError(f"{self.room.open} connections are open already")
        self._accepted.add(connection)
        return connection, address


def listen(host: str, port: int, at: str) -> Listener:
    """A socket that listens there; port 0 takes a free one. Raises SpecError at the option or key `at`."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise SpecError(f"{host}:{port} is no address: {error}", at) from error
    room = Room.here()
    listener = Listener(family, room)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Head and body of an answer are two writes: without this the second waits 40 ms for the first to be acknowledged.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listener.bind(address)
        listener.listen(room.open)
    except OSError as error:
        listener.close()
        raise SpecError(f"{host}:{port} cannot be listened on: {error.strerror}; choose another port", at) from error
    return listener
