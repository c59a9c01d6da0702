"""Asks the API of this process as a visitor may: every rule of its routes holds, and there are no others.

No socket: the application is called as a server would call it. One Visitor for each page that is open.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol
from urllib.parse import quote
from uuid import uuid4

import httpx
from fastapi import FastAPI

from service.access.guard import Guard, Refusal
from service.access.roles import Caller, Role
from service.api.answers import MAX_LIMIT
from service.api.doors import ACT, ROLE
from service.api.repeats import HEADER as REPEAT_KEY
from service.ui.gate import Visit

ASK_S = 30.0
"""How long an answer may take."""
MAX_LISTED, MAX_PAGES = 1_000, 20
"""Of a list: entries that are shown, and pages of the API that are asked for."""
INSIDE = "http://127.0.0.1"
"""The name that the application is called by here."""


class Refused(Exception):
    """The API answered with a problem."""

    def __init__(self, status: int, detail: str, path: str | None = None) -> None:
        super().__init__(detail)
        self.status, self.detail, self.path = status, detail, path


@dataclass(frozen=True, slots=True)
class Route:
    """What the OpenAPI document says of one operation."""

    method: str
    path: str
    """With the names of its parameters in braces."""
    role: Role
    act: str
    """Whoever was granted this may call it, too; empty: nobody."""


class Asker(Protocol):
    """What pages ask. On the event loop."""

    async def get(self, path: str, **query: Any) -> Any:
        """The content of GET /v1`path`. Raises Refused."""
        ...

    async def call(self, operation: str, names: Mapping[str, str], body: Any = None, etag: str | None = None) -> Any:
        """Call an operation by its id, once; what it answers. Raises Refused."""
        ...

    def may(self, operation: str) -> bool:
        """Whether the visitor's role may do that."""
        ...


def routes_of(document: Mapping[str, Any]) -> dict[str, Route]:
    """The operations of an OpenAPI document that somebody in a role may call, by id."""
    return {
        told["operationId"]: Route(method.upper(), path, Role.of(told[ROLE]), told.get(ACT, ""))
        for path, methods in document["paths"].items()
        for method, told in methods.items()
        if told.get(ROLE, "none") != "none"
    }


class Visitor:
    """See module docstring, and Asker."""

    def __init__(self, api: FastAPI, visit: Visit) -> None:
        self._visit = visit
        self._guard: Guard = api.state.guard
        self._has_tokens = api.state.tokens is not None
        self._routes = routes_of(api.openapi())
        transport = httpx.ASGITransport(api, raise_app_exceptions=False, client=(visit.address, 0))
        self._http = httpx.AsyncClient(transport=transport, base_url=INSIDE, auth=self._sign, timeout=ASK_S)

    @property
    def caller(self) -> Caller:
        """Who this was when they came."""
        return self._visit.caller

    @property
    def signed_in(self) -> bool:
        """Whether they gave a token."""
        return self._visit.token() is not None

    @property
    def can_sign_in(self) -> bool:
        """Whether there are tokens here at all: a foreground run has none."""
        return self._has_tokens

    def may(self, operation: str) -> bool:
        """See Asker."""
        route = self._routes[operation]
        try:
            self._guard.admit(self.caller, route.role, route.act)
        except Refusal:
            return False
        return True

    async def get(self, path: str, **query: Any) -> Any:
        """See Asker."""
        params = {name: value for name, value in query.items() if value is not None}
        return _content(await self._http.get(f"/v1{path}", params=params))

    async def call(self, operation: str, names: Mapping[str, str], body: Any = None, etag: str | None = None) -> Any:
        """See Asker."""
        route = self._routes[operation]
        headers = {REPEAT_KEY: str(uuid4())} if route.method == "POST" else {}
        if etag is not None:
            headers["If-Match"] = etag
        path = route.path.format_map({name: quote(each, safe="") for name, each in names.items()})
        return _content(await self._http.request(route.method, path, json=body, headers=headers))

    async def leave(self) -> None:
        """The visitor has gone."""
        await self._http.aclose()

    def _sign(self, request: httpx.Request) -> httpx.Request:
        if token := self._visit.token():
            request.headers["Authorization"] = f"Bearer {token}"
        return request


async def listed(asker: Asker, path: str, most: int = MAX_LISTED) -> list[dict[str, Any]]:
    """All entries of a list of the API, page by page; beyond `most` the first are left out. Raises Refused."""
    entries: list[dict[str, Any]] = []
    after = None
    for _ in range(MAX_PAGES):
        page = await asker.get(path, limit=MAX_LIMIT, after=after)
        entries, after = [*entries, *page["items"]][-most:], page["next"]
        if after is None:
            break
    return entries


def _content(answer: httpx.Response) -> Any:
    """What an answer holds. Raises Refused where it is a problem."""
    if answer.is_success:
        return answer.json() if answer.content else None
    try:
        told = answer.json()
    except ValueError:
        told = {}
    detail = told.get("detail") or HTTPStatus(answer.status_code).phrase
    raise Refused(answer.status_code, str(detail), told.get("path"))
