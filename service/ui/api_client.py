"""Calls the API of this process with the rights of a visitor: the same routes, roles and audit log as over HTTP.

It uses no socket: it calls the application as a server would. Each open page has its own Visitor.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol
from urllib.parse import quote
from uuid import uuid4

import httpx
from fastapi import FastAPI

from headrace.service.api.authorization import ACT, ROLE
from headrace.service.api.idempotency import HEADER as REPEAT_KEY
from headrace.service.api.schemas import MAX_LIMIT
from headrace.service.auth.guard import Guard, Refusal
from headrace.service.auth.roles import Caller, Role
from headrace.service.ui.page_access import Visit

ASK_S = 30.0
"""How long an answer may take."""
MAX_LISTED, MAX_PAGES = 1_000, 20
"""Most entries of a list that are shown, and most pages of the API that are read for it."""
INSIDE = "http://127.0.0.1"
"""The address under which this process calls the application."""


class RequestRefused(Exception):
    """The API answered with a problem."""

    def __init__(self, status: int, detail: str, path: str | None = None) -> None:
        super().__init__(detail)
        self.status, self.detail, self.path = status, detail, path


@dataclass(frozen=True, slots=True)
class Route:
    """One operation of the OpenAPI document."""

    method: str
    path: str
    """With the names of its parameters in braces."""
    role: Role
    act: str
    """Callers that were granted this action may also call it; empty: none."""


class ApiCaller(Protocol):
    """The API as pages use it. On the event loop."""

    async def get(self, path: str, **query: Any) -> Any:
        """The content of GET /v1`path`. Raises Refused."""
        ...

    async def call(self, operation: str, names: Mapping[str, str], body: Any = None, etag: str | None = None) -> Any:
        """Call an operation by its id, once; return its answer. Raises Refused."""
        ...

    def may(self, operation: str) -> bool:
        """Whether the visitor has the right to call the operation."""
        ...


def routes_of(document: Mapping[str, Any]) -> dict[str, Route]:
    """The operations of an OpenAPI document that need a role, by id."""
    return {
        found["operationId"]: Route(method.upper(), path, Role.of(found[ROLE]), found.get(ACT, ""))
        for path, methods in document["paths"].items()
        for method, found in methods.items()
        if found.get(ROLE, "none") != "none"
    }


class Visitor:
    """The page's calls of the API, as the visitor's."""

    def __init__(self, api: FastAPI, visit: Visit) -> None:
        self._visit = visit
        self._guard: Guard = api.state.guard
        self._has_tokens = api.state.tokens is not None
        self._routes = routes_of(api.openapi())
        transport = httpx.ASGITransport(api, raise_app_exceptions=False, client=(visit.address, 0))
        self._http = httpx.AsyncClient(transport=transport, base_url=INSIDE, auth=self._sign, timeout=ASK_S)

    @property
    def caller(self) -> Caller:
        """The caller at the time the page was opened."""
        return self._visit.caller

    @property
    def signed_in(self) -> bool:
        """Whether the visitor has signed in with a token."""
        return self._visit.token() is not None

    @property
    def can_sign_in(self) -> bool:
        """Whether there are tokens; a foreground run has none."""
        return self._has_tokens

    def may(self, operation: str) -> bool:
        route = self._routes[operation]
        try:
            self._guard.admit(self.caller, route.role, route.act)
        except Refusal:
            return False
        return True

    async def get(self, path: str, **query: Any) -> Any:
        params = {name: value for name, value in query.items() if value is not None}
        return _content(await self._http.get(f"/v1{path}", params=params))

    async def call(self, operation: str, names: Mapping[str, str], body: Any = None, etag: str | None = None) -> Any:
        route = self._routes[operation]
        headers = {REPEAT_KEY: str(uuid4())} if route.method == "POST" else {}
        if etag is not None:
            headers["If-Match"] = etag
        path = route.path.format_map({name: quote(each, safe="") for name, each in names.items()})
        return _content(await self._http.request(route.method, path, json=body, headers=headers))

    async def leave(self) -> None:
        """Release the connection once the page is closed."""
        await self._http.aclose()

    def _sign(self, request: httpx.Request) -> httpx.Request:
        if token := self._visit.token():
            request.headers["Authorization"] = f"Bearer {token}"
        return request


async def list_all(asker: ApiCaller, path: str, most: int = MAX_LISTED) -> list[dict[str, Any]]:
    """All entries of a list of the API, read page by page; of more than `most`, the last ones. Raises Refused."""
    entries: list[dict[str, Any]] = []
    after = None
    for _ in range(MAX_PAGES):
        page = await asker.get(path, limit=MAX_LIMIT, after=after)
        entries, after = [*entries, *page["items"]][-most:], page["next"]
        if after is None:
            break
    return entries


def _content(answer: httpx.Response) -> Any:
    """The content of an answer. Raises Refused where it is a problem."""
    if answer.is_success:
        return answer.json() if answer.content else None
    try:
        problem = answer.json()
    except ValueError:
        problem = {}
    detail = problem.get("detail") or HTTPStatus(answer.status_code).phrase
    raise RequestRefused(answer.status_code, str(detail), problem.get("path"))
