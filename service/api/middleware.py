"""Middleware for every request: checks the Host header and the length of the body, and adds headers to answers."""

from collections.abc import Sequence
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.http.front_door import bounded, is_known_host, is_too_long, served_names
from headrace.service.api.problems import answer, http_error, problem

OURS = ("/v1", "/metrics")
"""Paths whose answers are data, which a browser must not show as a page."""
HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}
DATA_HEADERS = {"content-security-policy": "default-src 'none'; frame-ancestors 'none'", "cache-control": "no-store"}
BODY_S = 30.0
"""How long a request's body may take to arrive."""
HSTS = "max-age=31536000"


class RequestChecks:
    """The middleware."""

    def __init__(self, app: ASGIApp, names: Sequence[str], max_body: int) -> None:
        """Answer under `names` and those of this machine; read no body of more than `max_body` bytes."""
        self._app, self._names, self._max_body = app, served_names(names), max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "websocket":
            if is_known_host(Headers(scope=scope), self._names):
                await self._app(scope, receive, send)
            else:
                await send({"type": "websocket.close", "code": 1008, "reason": "see access.hosts"})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = _with_headers(scope, send)
        headers = Headers(scope=scope)
        if not is_known_host(headers, self._names):
            detail = f"this service does not answer as {', '.join(headers.getlist('host'))!r}; see access.hosts"
            await answer(problem(HTTPStatus.BAD_REQUEST, detail))(scope, receive, sent)
            return
        if is_too_long(headers, self._max_body):
            await answer(problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, self._too_large()))(scope, receive, sent)
            return
        await self._app(scope, bounded(receive, self._max_body, BODY_S, http_error, self._too_large()), sent)

    def _too_large(self) -> str:
        return f"a request may have {self._max_body:,} bytes; see limits.max_body"


def _with_headers(scope: Scope, send: Send) -> Send:
    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
            if scope["path"].startswith(OURS):
                for name, value in DATA_HEADERS.items():
                    headers.setdefault(name, value)
            if scope.get("scheme") == "https":
                headers.setdefault("strict-transport-security", HSTS)
        await send(message)

    return sent
