"""Connections of our HTTP servers: how long a request's head may take and be, and heads that two servers read apart.

A connection tells its listener whether it waits for its client, which then may give way to others.
How many there are is headrace.http.listening's work; bodies are that of headrace.http.front_door.
"""

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import h11
from starlette.types import Scope
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from headrace.http.listening import Listener, with_place

MAX_HEAD = 32 << 10
"""Most bytes of a request that are not its body: its line and headers. One read may exceed it."""
HEAD_S = 15.0
"""How long a connection may be open without a complete head: a slow client must not block others."""
INVALID = "Invalid HTTP request received."

Headers = Sequence[tuple[bytes, bytes]]


HeldAnswer = tuple[int, Sequence[tuple[bytes, bytes]], bytes]
"""Status, headers and body of an answer."""
AnswerAtOnce = Callable[[bytes, str | None], HeldAnswer | None]
"""Answers requests that have one head, by body and `LENGTH_OF_HEAD`; None for what the application is to answer."""
AdmitAtOnce = Callable[[Scope], AnswerAtOnce | None]
"""Gives what answers the requests with a head; None where the application is to answer them."""
LENGTH_OF_HEAD = b"inference-header-content-length"
OF_BODY = frozenset({b"content-length", LENGTH_OF_HEAD})
"""Headers that differ between requests of one client."""
SLOW = frozenset({b"expect", b"upgrade", b"transfer-encoding", b"content-encoding", b"connection", b"proxy-connection"})
"""Headers of requests that only the application answers."""
KEEP_ALIVE = b"connection", b"keep-alive"
"""The exception: it says what is so anyway."""
_LENGTH = re.compile(rb"\r\ncontent-length: *([0-9]{1,18})\r\n", re.IGNORECASE)
MAX_AT_ONCE = 16
"""Most requests of one read that are answered at once; those after them wait for other connections' requests."""


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
    _answered_s = 0.0
    """When the last request was answered that left the timers as they were (`loop.time`)."""

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
            self._timer = self.loop.call_later(HEAD_S, self._on_late)

    def _on_late(self) -> None:
        left_s = self._answered_s + HEAD_S - self.loop.time()
        if left_s > 0:
            self._timer = self.loop.call_later(left_s, self._on_late)
        else:
            self.transport.close()

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


class _KnownHead(NamedTuple):
    """The head of a request that was answered at once and was a read of its own, but for its Content-Length."""

    before: bytes
    """Its bytes before the digits of Content-Length."""
    behind: bytes
    """Those behind them, up to the body."""
    answer: AnswerAtOnce
    head_length: str | None
    """`LENGTH_OF_HEAD`."""

    def body_of(self, data: bytes) -> bytes | None:
        """The body of a read, where that is one whole request with this head."""
        begin = len(self.before)
        end = data.find(b"\r", begin, begin + 19)
        body = end + len(self.behind)
        if end < 0 or not data.startswith(self.before) or not data.startswith(self.behind, end):
            return None
        digits = data[begin:end]
        return data[body:] if digits.isdigit() and int(digits) == len(data) - body else None


class InferenceConnection(_Timed, HttpToolsProtocol):
    """A connection whose requests are parsed in C; for a replica, where parsing costs as much as answering.

    A short request that arrives in one read is answered before the next one is read, without a task and messages of
    ASGI, which cost more than the answer. If its head has the bytes of the one before, it is not even parsed. The bytes
    of the answer are the same.
    """

    _num_read = 0
    """Bytes of the present read."""
    _num_since = 0
    """Bytes since the last complete head or piece of a body."""
    _held: list[bytes] | None = None
    """The body so far of a request that may be answered at once; None for another one."""
    _head: tuple[bytes, Headers] | None = None
    """URL and headers, without those of the body, that `_answer` is for."""
    _answer: AnswerAtOnce | None = None
    _num_answered = 0
    """Requests of the present read that were answered at once."""
    _num_begun = 0
    """Requests that began in the present read."""
    _is_within = False
    """Whether a request has begun whose end is not here yet."""
    _known: _KnownHead | None = None

    def __init__(self, listener: Listener, *args: Any, at_once: AdmitAtOnce | None = None, **kwargs: Any) -> None:
        """`at_once`: None leaves all requests to the application."""
        super().__init__(listener, *args, **kwargs)
        self._at_once = at_once

    def data_received(self, data: bytes) -> None:
        """Called by asyncio with the bytes that came."""
        if self._known is not None and self._answered_again(self._known, data):
            return
        self._num_read, self._num_begun, self._num_answered = len(data), 0, 0
        whole = not self._is_within
        super().data_received(data)
        if whole and self._num_answered == self._num_begun == 1 and not self._is_within:
            self._known = self._head_of(data)
        if self._held is not None and not self.transport.is_closing():
            self._hand_over(self._held)  # the rest of its body may take long
            self._expect()
        self._num_since += len(data)
        if self._num_since > MAX_HEAD and not self.transport.is_closing():
            self.send_400_response(INVALID)

    def on_message_begin(self) -> None:
        """Called by httptools with the first byte of a request."""
        self._num_begun += 1
        self._is_within = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """An exception ends the connection with 400."""
        check_head(self.headers, self.parser.get_http_version())
        self._unset_keepalive_if_required()  # that of a request before it in the same read, answered at once
        if self._at_once is not None and self._may_be_answered_at_once():
            self._held = []
        else:
            super().on_headers_complete()
        self._advance()

    def on_body(self, body: bytes) -> None:
        """Called by httptools with a piece of the body."""
        if self._held is not None:
            self._held.append(body)
        else:
            super().on_body(body)
        self._advance()

    def on_message_complete(self) -> None:
        """Called by httptools at the end of a request."""
        self._is_within = False
        if (held := self._held) is not None and not self._answered(b"".join(held)):
            self._hand_over(held)
            held = None
        if held is None:
            super().on_message_complete()
        self._held = None
        self._advance()

    def on_response_complete(self) -> None:
        """Expect the next request; uvicorn closes sooner if none begins."""
        super().on_response_complete()
        self._expect()

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection, unless a request was answered that left this timer as it was."""
        left_s = self._answered_s + self.timeout_keep_alive - self.loop.time()
        if left_s > 0:
            self.timeout_keep_alive_task = self.loop.call_later(left_s, self.timeout_keep_alive_handler)
        else:
            super().timeout_keep_alive_handler()

    def _is_free(self) -> bool:
        """Whether a request may be answered at once: nothing is in progress that comes before it."""
        if (self.cycle is not None and not self.cycle.response_complete) or self.flow.write_paused:
            return False
        limit = self.limit_concurrency
        return limit is None or (len(self.connections) < limit and len(self.tasks) < limit)

    def _may_be_answered_at_once(self) -> bool:
        """Whether the application has admitted this head, and the request's turn has come."""
        if self._num_answered >= MAX_AT_ONCE or not self._is_free():
            return False
        if self.parser.get_method() != b"POST" or self.parser.get_http_version() != "1.1":
            return False
        head = self.url, [each for each in self.headers if each[0] not in OF_BODY]
        if head != self._head:
            self._head, self._answer = head, self._admitted(*head)
        return self._answer is not None

    def _admitted(self, url: bytes, headers: Headers) -> AnswerAtOnce | None:
        assert self._at_once is not None
        if not url.startswith(b"/") or not url.isascii() or not set(url).isdisjoint(b"%?#"):
            return None
        if any(each[0] in SLOW and (each[0], each[1].lower()) != KEEP_ALIVE for each in headers):
            return None
        scope: Scope = {**self.scope, "method": "POST", "path": url.decode("ascii")}
        with_place(scope, self._listener.place(self.client))
        return self._at_once(scope)

    def _answered(self, body: bytes) -> bool:
        """Write the answer to a request whose head is admitted; False where the application is to answer."""
        assert self._answer is not None
        given = self._head_lengths()
        if len(given) > 1 or not self._written(self._answer(body, given[0] if given else None)):
            return False
        self._num_answered += 1
        self._stop()
        self.on_response_complete()
        return True

    def _answered_again(self, known: _KnownHead, data: bytes) -> bool:
        """Write the answer to a read that is one whole request with a known head; False for another read."""
        if self._is_within or not self._is_free() or (body := known.body_of(data)) is None:
            return False
        if not self._written(known.answer(body, known.head_length)):
            self._known = None
            return False
        self.server_state.total_requests += 1
        self._answered_s = self.loop.time()
        return True

    def _head_of(self, data: bytes) -> _KnownHead | None:
        """The head of a read that was one request, answered at once by `_answer`; None if it was a little more."""
        assert self._answer is not None
        end = data.index(b"\r\n\r\n") + 4
        found = _LENGTH.search(data, 0, end)
        if found is None or end + int(found[1]) != len(data):
            return None
        given = self._head_lengths()
        return _KnownHead(data[: found.start(1)], data[found.end(1) : end], self._answer, given[0] if given else None)

    def _head_lengths(self) -> list[str]:
        return [value.decode("latin-1") for name, value in self.headers if name == LENGTH_OF_HEAD]

    def _written(self, answer: HeldAnswer | None) -> bool:
        if answer is None:
            return False
        status, headers, content = answer
        lines = [STATUS_LINE[status]]
        for name, value in (*self.server_state.default_headers, *headers):
            lines += (name, b": ", value, b"\r\n")
        self.transport.write(b"".join((*lines, b"\r\n", content)))
        return True

    def _hand_over(self, held: list[bytes]) -> None:
        """Leave the request to the application, as far as it is here."""
        self._held = None
        super().on_headers_complete()
        for body in held:
            super().on_body(body)

    def _advance(self) -> None:
        self._num_since = -self._num_read
