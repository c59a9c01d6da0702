"""The way to the live page: whoever comes by a browser is known before anything of it is made for them.

A session's token is asked for its role at each page and each connection; each later request asks again by itself.
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

from service.access.guard import SAFE_METHODS, Guard, Refusal, address_of, check_site
from service.access.limiting import sharer
from service.access.roles import Caller
from service.ui.sessions import COOKIE, Sessions

ROOT = "/ui"
"""Where the pages are."""
STATIC = "/_nicegui/"
"""What has nothing of anybody: scripts and styles that NiceGUI brings."""
SOCKET = "/_nicegui_ws/"
VISIT = "millrace.visit"
"""Where a page's scope has who came."""
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; font-src 'self' data:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'self'; object-src 'none'"
)
"""Of pages: nothing from elsewhere. NiceGUI's own scripts stand in its pages, and compile its templates."""
PAGE_HEADERS = {"content-security-policy": POLICY, "referrer-policy": "same-origin"}
"""Without a referrer a browser would not say which site a form of ours is from."""


@dataclass(frozen=True, slots=True)
class Visit:
    """Who came, and from where."""

    token: Callable[[], str | None]
    """The token they signed in with, until they sign out."""
    address: str
    caller: Caller

    @property
    def sharer(self) -> str:
        """Whose share their pages are of."""
        return sharer(self.caller, self.address)


class Door:
    """Tells who a browser's request is from."""

    def __init__(self, api: FastAPI, sessions: Sessions) -> None:
        self._api, self._sessions = api, sessions

    async def visit(self, connection: HTTPConnection) -> Visit:
        """Who asks. A session whose token opens nothing any more is over. Raises Refusal (403, 429)."""
        if connection.scope["type"] == "websocket" or connection.scope.get("method") not in SAFE_METHODS:
            check_site(connection.headers)
        name = connection.cookies.get(COOKIE)
        token = self._sessions.token(name)
        address = address_of(connection)
        try:
            return Visit(lambda: self._sessions.token(name), address, await self.caller(token, address))
        except Refusal as refusal:
            if refusal.status != HTTPStatus.UNAUTHORIZED:
                raise
            self._sessions.end(name)
            return Visit(lambda: None, address, await self.caller(None, address))

    async def caller(self, token: str | None, address: str) -> Caller:
        """Whose token this is. Raises Refusal (401, 429)."""
        guard: Guard = self._api.state.guard
        return await run_in_threadpool(guard.caller, [f"Bearer {token}"] if token else [], address)


class Gate:
    """In front of NiceGUI's application: see module docstring."""

    def __init__(
        self, pages: ASGIApp, door: Door, max_pages: int, max_each: int, open_pages: Callable[[], Sequence[str]]
    ) -> None:
        """No page is made beyond `max_pages` that are open, nor `max_each` of one visitor; `open_pages` says whose."""
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
        """What is answered to who may not; None: they may, and the scope says who they are."""
        try:
            visit = await self._door.visit(HTTPConnection(scope))
        except Refusal as refusal:
            return PlainTextResponse(refusal.detail, refusal.status, refusal.headers)
        if visit.caller.role is None:
            return RedirectResponse(f"{ROOT}/login?to={quote(ROOT + path)}", HTTPStatus.SEE_OTHER)
        if not path.startswith(SOCKET) and scope["type"] == "http" and (told := self._no_room(visit)):
            return PlainTextResponse(told, HTTPStatus.TOO_MANY_REQUESTS)
        scope[VISIT] = visit
        return None

    def _no_room(self, visit: Visit) -> str:
        """Why no page can be made for them now; empty where one can."""
        pages = self._open_pages()
        if len(pages) >= self._max_pages:
            return f"{len(pages)} pages are open, which is limits.max_streams; close one, and try again in a minute"
        if (theirs := pages.count(visit.sharer)) >= self._max_each:
            return f"{theirs} pages of yours are open, which is limits.max_streams_each; close one, and try again"
        return ""


def _with_headers(send: Send) -> Send:
    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in PAGE_HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return sent
