"""Downloads for a browser session: passes on the API's answer to the same caller."""

from http import HTTPStatus

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from headrace.service.auth.guard import Refusal
from headrace.service.ui.page_access import ROOT, BrowserAuth


class Download:
    """Dead letters at /ui/deadletters/{job}/{file}."""

    def __init__(self, api: FastAPI, door: BrowserAuth) -> None:
        self._api, self._door = api, door

    def route(self) -> Route:
        """The route, to be placed before the pages."""
        return Route(f"{ROOT}/deadletters/{{job}}/{{file}}", self, methods=["GET"], include_in_schema=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        request = Request(scope)
        try:
            visit = await self._door.visit(request)
        except Refusal as refusal:
            await PlainTextResponse(refusal.detail, refusal.status, refusal.headers)(scope, receive, send)
            return
        if visit.caller.role is None:
            await RedirectResponse(f"{ROOT}/login", HTTPStatus.SEE_OTHER)(scope, receive, send)
            return
        token = visit.token()
        path = f"/v1/jobs/{request.path_params['job']}/deadletters/{request.path_params['file']}"
        headers = [(b"host", b"127.0.0.1"), *([(b"authorization", f"Bearer {token}".encode())] if token else [])]
        kept = {name: scope[name] for name in ("type", "asgi", "http_version", "scheme", "server", "client")}
        asked = {"method": "GET", "path": path, "raw_path": None, "query_string": b"", "root_path": ""}
        await self._api({**kept, **asked, "headers": headers}, receive, send)
