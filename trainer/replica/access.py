"""Authorization and limits of a replica: tokens, host names, sizes of bodies, number of requests at a time.

An ASGI application around another. trainer.replica.http_api answers the requests.
"""

import hmac
import json
from collections.abc import Mapping
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.http.connections import AdmitAtOnce, AnswerAtOnce, HeldAnswer
from headrace.http.front_door import bounded, is_cross_site, is_known_host, is_too_long, served_names
from headrace.http.listening import prove

BODY_S = 10.0
"""Longest time for a request's body to arrive: a slow client must not keep others out."""
OPEN = ("/v2/health/live", "/v2/health/ready")
"""Open without a token, for process supervisors."""
JSON_CONTENT: Mapping[str, str] = {"content-type": "application/json"}
LOCAL_NAMES = served_names()
"""Host names under which a replica without a token answers on loopback: a web page cannot use a name of its own."""


class RequestGate:
    """Passes requests on, or refuses them."""

    def __init__(
        self,
        app: ASGIApp,
        token: str | None,
        max_body: int,
        max_requests: int,
        *,
        local: bool,
        at_once: AdmitAtOnce = lambda _: None,
    ) -> None:
        """`at_once`: what answers the short requests with a head at once; None where `app` answers them."""
        self._at_once = at_once
        self._app, self._max_body, self._max_requests = app, max_body, max_requests
        self._token = None if token is None else f"Bearer {token}".encode()
        self._is_local = local and token is None
        self._under_way = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if (refusal := self._refusal(scope)) is not None:
            await send_error(send, *refusal)
            return
        self._under_way += 1
        try:
            await self._app(scope, bounded(receive, self._max_body, BODY_S, HTTPException, self._too_long()), send)
        finally:
            self._under_way -= 1

    def at_once(self, scope: Scope) -> AnswerAtOnce | None:
        """Answers the short requests with this head at once, within the limits; None where `__call__` is to."""
        if self._stranger(Headers(scope=scope)) is not None or (answer := self._at_once(scope)) is None:
            return None
        if self._token is not None:
            prove(scope)

        def answered(body: bytes, head_length: str | None) -> HeldAnswer | None:
            if len(body) > self._max_body or self._under_way >= self._max_requests:
                return None
            return answer(body, head_length)

        return answered

    def _refusal(self, scope: Scope) -> tuple[HTTPStatus, str] | None:
        headers = Headers(scope=scope)
        if scope["path"] in OPEN:
            return None
        if (stranger := self._stranger(headers)) is not None:
            return stranger
        if self._token is not None:
            prove(scope)
        if is_too_long(headers, self._max_body):
            return HTTPStatus.REQUEST_ENTITY_TOO_LARGE, self._too_long()
        if self._under_way >= self._max_requests:
            return HTTPStatus.SERVICE_UNAVAILABLE, f"{self._max_requests} requests are in progress; try again"
        return None

    def _stranger(self, headers: Headers) -> tuple[HTTPStatus, str] | None:
        """The refusal of a client without permission; None where it has permission."""
        if self._token is not None:
            if hmac.compare_digest(headers.get("authorization", "").encode("latin-1"), self._token):
                return None
            return HTTPStatus.UNAUTHORIZED, "send the header Authorization: Bearer with this replica's token"
        if self._is_local and not is_known_host(headers, LOCAL_NAMES):
            names = ", ".join(headers.getlist("host"))
            return HTTPStatus.BAD_REQUEST, f"this replica does not answer under the name {names!r}"
        if is_cross_site(headers):
            return HTTPStatus.FORBIDDEN, "pages of other sites may not send requests here"
        return None

    def _too_long(self) -> str:
        return f"a request is at most {self._max_body:,} bytes long"


async def send_error(send: Send, status: HTTPStatus, why: str) -> None:
    """Send an error of the protocol."""
    await send_answer(send, status, json.dumps({"error": why}).encode())


async def send_answer(send: Send, status: int, body: bytes, headers: Mapping[str, str] = JSON_CONTENT) -> None:
    """Send an answer."""
    sent = headers_sent(body, headers)
    if status == HTTPStatus.UNAUTHORIZED:
        sent.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": int(status), "headers": sent})
    await send({"type": "http.response.body", "body": body})


def headers_sent(body: bytes, headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """The headers of an answer, with the length of its body."""
    sent = [(name.encode(), value.encode()) for name, value in headers.items()]
    sent.append((b"content-length", b"%d" % len(body)))
    return sent
