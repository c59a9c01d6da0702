"""Connections of our HTTP servers: how long a request's head may take and be, and heads that two servers read apart.

A connection tells its listener whether it waits for its client, which then may give way to others.
How many there are is headrace.http.listening's work; bodies are that of headrace.http.front_door.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import h11
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headrace.http.listening import Listener

MAX_HEAD = 32 << 10
"""Most bytes of a request that are not its body: its line and headers. One read may exceed it."""
HEAD_S = 15.0
"""How long a connection may be open without a complete head: a slow client must not block others."""
INVALID = "Invalid HTTP request received."

Headers = Sequence[tuple[bytes, bytes]]


class InvalidRequestHead(ValueError):
    """A head that is answered with 400, after which the connection is closed."""


def check_head(headers: Headers, http_version: str) -> None:
    """Raise InvalidRequestHead for headers that are too long, or that do not define the end of the body (RFC 9112, 6.1
    and 6.3).

    A proxy in front could see another end, and take a part of the body for a request of another client.
    """
    if sum(len(name) + len(value) + 4 for name, value in headers) > MAX_HEAD:
        raise InvalidRequestHead(f"a head is at most {MAX_HEAD} bytes long")
    codings = [value.strip().lower() for name, value in headers if name.lower() == b"transfer-encoding"]
    if not codings:
        return
    if codings != [b"chunked"] or http_version != "1.1":
        raise InvalidRequestHead("a body is sent whole, or chunked once in HTTP/1.1")
    if any(name.lower() == b"content-length" for name, _ in headers):
        raise InvalidRequestHead("Content-Length and Transfer-Encoding exclude each other")


class _Timed(asyncio.Protocol):
    """Closes a connection without a request for HEAD_S. Runs on the event loop."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    client: tuple[str, int] | None
    flow: FlowControl
    cycle: Any
    _timer: asyncio.TimerHandle | None = None

    def __init__(self, listener: Listener, *args: Any, **kwargs: Any) -> None:
        """`listener` has accepted the connection."""
        super().__init__(*args, **kwargs)
        self._listener = listener

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        if (place := self._listener.place(self.client)) is not None:
            place.waits, place.end = self._waits, transport.abort
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._expect()

    def _expect(self) -> None:
        """Close after HEAD_S, unless a request is under way."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()
        elif self._timer is None and self.transport.get_protocol() is self:
            self._timer = self.loop.call_later(HEAD_S, self.transport.close)

    def _waits(self) -> bool:
        """Whether the client is to act next: to send a request or the rest of it, or to take the answer. That of a page
        always is: its websocket has the token of a session."""
        cycle = self.cycle
        return cycle is None or cycle.response_complete or cycle.more_body or self.flow.write_paused

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _CheckedH11(h11.Connection):
    """As h11.Connection, but refuses ambiguous heads."""

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            try:
                check_head(list(event.headers), event.http_version.decode("ascii"))
            except InvalidRequestHead as error:
                raise h11.RemoteProtocolError(str(error)) from None
        return event


class PagesConnection(_Timed, H11Protocol):
    """A connection that may become a websocket; for the service."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _CheckedH11(h11.SERVER, MAX_HEAD)

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Hand the connection over to the websocket protocol."""
        super().handle_websocket_upgrade(event)
        self._stop()

    def on_response_complete(self) -> None:
        """Expect the next request; uvicorn closes sooner if none begins."""
        super().on_response_complete()
        self._expect()


class InferenceConnection(_Timed, HttpToolsProtocol):
    """A connection whose requests are parsed in C; for a replica, where parsing costs as much as answering."""

    _num_read = 0
    """Bytes of the present read."""
    _num_since = 0
    """Bytes since the last complete head or piece of a body."""

    def data_received(self, data: bytes) -> None:
        """Called by asyncio with the bytes that came."""
        self._num_read = len(data)
        super().data_received(data)
        self._num_since += len(data)
        if self._num_since > MAX_HEAD and not self.transport.is_closing():
            self.send_400_response(INVALID)

    def on_headers_complete(self) -> None:
        """An exception ends the connection with 400."""
        check_head(self.headers, self.parser.get_http_version())
        super().on_headers_complete()
        self._advance()

    def on_body(self, body: bytes) -> None:
        """Called by httptools with a piece of the body."""
        super().on_body(body)
        self._advance()

    def on_message_complete(self) -> None:
        """Called by httptools at the end of a request."""
        super().on_message_complete()
        self._advance()

    def on_response_complete(self) -> None:
        """Expect the next request; uvicorn closes sooner if none begins."""
        super().on_response_complete()
        self._expect()

    def _advance(self) -> None:
        self._num_since = -self._num_read
