"""A channel that is opened again when the credentials of this process are renewed.

A channel of gRPC shows one certificate for ever, also where it connects again after that one has ended.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from headrace.rpc import channels
from headrace.rpc.channels import TlsPeer


class RenewedChannel:
    """See module docstring. Any thread."""

    def __init__(
        self, address: str, *, max_message_bytes: int = channels.MAX_MESSAGE_BYTES, tls: TlsPeer | None = None
    ) -> None:
        """See channels.open_channel."""
        self._address, self._max_message_bytes, self._tls = address, max_message_bytes, tls
        self._lock = threading.Lock()
        self._open = self._opened()

    @contextmanager
    def for_call(self) -> Iterator[grpc.Channel]:
        """The channel for one call, which a renewal does not disturb: the old one ends with its last call."""
        with self._lock:
            if self._tls is not None and self._tls.identity.current is not self._open.shown:
                before, self._open = self._open, self._opened()
                before.release()
            used = self._open
            used.num_users += 1
        try:
            yield used.channel
        finally:
            with self._lock:
                used.release()

    def close(self) -> None:
        """Close the connection. Calls in flight fail."""
        self._open.channel.close()

    def _opened(self) -> "_OpenChannel":
        shown = None if self._tls is None else self._tls.identity.current
        tls = None if shown is None or self._tls is None else TlsPeer(shown, self._tls.name)
        return _OpenChannel(
            channels.open_channel(self._address, max_message_bytes=self._max_message_bytes, tls=tls), shown
        )


class _OpenChannel:
    """A channel, the credentials that it shows, and its users: the one who opened it, and calls."""

    def __init__(self, channel: grpc.Channel, shown: object) -> None:
        self.channel, self.shown, self.num_users = channel, shown, 1

    def release(self) -> None:
        """One user less; the last one closes it."""
        self.num_users -= 1
        if self.num_users == 0:
            self.channel.close()
