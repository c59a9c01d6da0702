"""Access to the live pages: authenticates a browser by its session before anything of a page is built.

The role of the session's token is checked for each page and each connection, and again for each later request.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import quote

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.service.auth.guard import SAFE_METHODS, Guard, Refusal, address_of, check_site, proved
from headrace.service.auth.limits import share_key
from headrace.service.auth.roles import Caller
from headrace.service.ui.sessions import COOKIE, Sessions

ROOT = "/ui"
"""Path of the pages."""
STATIC = "/_nicegui/"
"""Path of NiceGUI's scripts and styles, which contain no data."""
SOCKET = "/_nicegui_ws/"
VISIT = "headrace.visit"
"""Key of the Visit in the ASGI scope of a page."""
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; font-src 'self' data:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'self'; object-src 'none'"
)
"""Policy of pages: nothing from other sites. NiceGUI's scripts are inline and compile templates."""
PAGE_HEADERS = {"content-security-policy": POLICY, "referrer-policy": "same-origin"}
"""Without a referrer, a browser would not send the origin of our forms."""


@dataclass(frozen=True, slots=True)
class Visit:
    """An authenticated visit of a browser."""

    token: Callable[[], str | None]
    """The token of the session, until the visitor signs out."""
    address: str
    caller: Caller

    @property
    def sharer(self) -> str:
        """The client that the visitor's pages count for."""
        return share_key(self.caller, self.address)


class BrowserAuth:
    """Authenticates the requests of browsers."""

    def __init__(self, api: FastAPI, sessions: Sessions) -> None:
        self._api, self._sessions = api, sessions

    async def visit(self, connection: HTTPConnection) -> Visit:
        """Authenticate a request. A session whose token is not valid any more ends. Raises Refusal (403, 429)."""
        if connection.scope["type"] == "websocket" or connection.scope.get("method") not in SAFE_METHODS:
            check_site(connection.headers)
        name = connection.cookies.get(COOKIE)
        token = self._sessions.token(name)
        address = address_of(connection)
        try:
            caller = proved(connection, await self.caller(token, address))
            return Visit(lambda: self._sessions.token(name), address, caller)
        except Refusal as refusal:
            if refusal.status != HTTPStatus.UNAUTHORIZED:
                raise
            self._sessions.end(name)
            return Visit(lambda: None, address, await self.caller(None, address))

    async def caller(self, token: str | None, address: str) -> Caller:
        """The caller with this token. Raises Refusal (401, 429)."""
        guard: Guard = self._api.state.guard
        return await run_in_threadpool(guard.caller, [f"Bearer {token}"] if token else [], address)


class PageGate:
    """The middleware before NiceGUI's application."""

    def __init__(
        self, pages: ASGIApp, door: BrowserAuth, max_pages: int, max_each: int, open_pages: Callable[[], Sequence[str]]
    ) -> None:
        """Allow `max_pages` open pages, and `max_each` of one visitor. `open_pages` lists whom each counts for."""
        self._pages, self._door, self._max_pages, self._max_each = pages, door, max_pages, max_each
        self._open_pages = open_pages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        sent = _with_headers(send) if scope["type"] == "http" else send
        if scope["type"] == "http" and path.startswith(STATIC):
            await self._pages(scope, receive, sent)
            return
        refusal = await self._refusal(scope, path)
        if refusal is None:
            await self._pages(scope, receive, sent)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "not signed in"})
        else:
            await refusal(scope, receive, sent)

    async def _refusal(self, scope: Scope, path: str) -> Response | None:
        """The answer that refuses a request; None: it is allowed, and the scope has its Visit."""
        try:
            visit = await self._door.visit(HTTPConnection(scope))
        except Refusal as refusal:
            return PlainTextResponse(refusal.detail, refusal.status, refusal.headers)
        if visit.caller.role is None:
            return RedirectResponse(f"{ROOT}/login?to={quote(ROOT + path)}", HTTPStatus.SEE_OTHER)
        if not path.startswith(SOCKET) and scope["type"] == "http" and (reason := self._no_room(visit)):
            return PlainTextResponse(reason, HTTPStatus.TOO_MANY_REQUESTS)
        scope[VISIT] = visit
        return None

    def _no_room(self, visit: Visit) -> str:
        """Why the visitor can open no page now; empty if they can."""
        pages = self._open_pages()
        if len(pages) >= self._max_pages:
            return (
                f"{len(pages)} pages are open, as many as limits.max_streams allows; close one, and retry in a minute"
            )
        if (theirs := pages.count(visit.sharer)) >= self._max_each:
            return f"you have {theirs} open pages, as many as limits.max_streams_each allows; close one, and retry"
        return ""


def _with_headers(send: Send) -> Send:
    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in PAGE_HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return sent
