"""A broker that asks whoever connects for a password, and keeps all that it is sent. It answers nothing else."""

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator

HANDSHAKE, VERSIONS, AUTHENTICATE, METADATA = 17, 18, 36, 3
"""Calls of Kafka's protocol."""
UNSUPPORTED = 35


class SaslBroker:
    """`sent` grows while it listens."""

    def __init__(self) -> None:
        self.sent = b""
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.servers = f"127.0.0.1:{self._socket.getsockname()[1]}"

    def listen(self) -> None:
        """Take connections until `close`."""
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError, struct.error):
                self._answer(connection)

    def close(self) -> None:
        """Listen no more."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(10)
        while True:
            (size,) = struct.unpack(">i", connection.recv(4, socket.MSG_WAITALL))
            frame = connection.recv(size, socket.MSG_WAITALL)
            self.sent += frame
            call, version, number = struct.unpack(">hhi", frame[:8])
            answer = _answer_to(call, version)
            connection.sendall(struct.pack(">ii", 4 + len(answer), number) + answer)


def _answer_to(call: int, version: int) -> bytes:
    if call == VERSIONS:
        known = [(METADATA, 1, 1), (HANDSHAKE, 1, 1), (VERSIONS, 0, 0), (AUTHENTICATE, 0, 0)]
        told = b"".join(struct.pack(">hhh", *each) for each in known)
        return struct.pack(">hi", UNSUPPORTED if version else 0, len(known)) + told
    if call == HANDSHAKE:
        return struct.pack(">hih", 0, 1, 5) + b"PLAIN"
    raise OSError("it has what it wanted")


@contextlib.contextmanager
def sasl_broker() -> Iterator[SaslBroker]:
    """One that listens as long as the context lasts."""
    broker = SaslBroker()
    thread = threading.Thread(target=broker.listen, daemon=True)
    thread.start()
    try:
        yield broker
    finally:
        broker.close()
        thread.join(10)
