"""What a connection may take before it is a request: how many there are, how long a request's head may take and be."""

import asyncio

from h11 import Request
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 512
"""Beyond it the answer is 503: 200 clients that poll, and all streams, are fewer."""
SPARE_CONNECTIONS = 64
"""So many more are open while they are told that; one more is closed at once."""
MAX_HEAD = 32 << 10
"""Bytes of a request's line and headers."""
HEAD_S = 15.0
"""How long a connection may be open without a whole head of a request: who is slow must not keep others out."""


class Connection(H11Protocol):
    """One of them; see module docstring. The event loop's."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """See asyncio.Protocol."""
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS + SPARE_CONNECTIONS:
            transport.abort()
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        super().data_received(data)
        self._expect()

    def handle_websocket_upgrade(self, event: Request) -> None:
        """From here on it is another protocol's."""
        super().handle_websocket_upgrade(event)
        self._stop()

    def on_response_complete(self) -> None:
        """The next request may come; uvicorn closes sooner where none begins."""
        super().on_response_complete()
        self._expect()

    def _expect(self) -> None:
        """Close in a while, unless a request is under way."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()
        elif self._timer is None and self.transport.get_protocol() is self:
            self._timer = self.loop.call_later(HEAD_S, self.transport.close)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
