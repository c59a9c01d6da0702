"""Downloads for a browser session: passes on the API's answer to the same caller."""

from http import HTTPStatus

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from headrace.service.auth.guard import Refusal
from headrace.service.ui.page_access import ROOT, BrowserAuth

DOWNLOADS = {
    "/trace/{job}": "/v1/jobs/{job}/trace",
    "/deadletters/{job}/{file}": "/v1/jobs/{job}/deadletters/{file}",
    "/exports/{job}/{stream}/{timeline}/{name}/{file}": (
        "/v1/jobs/{job}/exports/{stream}/{timeline}/{name}/files/{file}"
    ),
}
"""By the path below the root of all pages: the path of the API."""


def download_routes(api: FastAPI, door: BrowserAuth) -> list[Route]:
    """The routes, to be placed before the pages."""
    return [
        Route(f"{ROOT}{path}", Download(api, door, of_api), methods=["GET"], include_in_schema=False)
        for path, of_api in DOWNLOADS.items()
    ]


class Download:
    """Passes on one path of the API."""

    def __init__(self, api: FastAPI, door: BrowserAuth, path: str) -> None:
        self._api, self._door, self._path = api, door, path

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
        path = self._path.format_map(request.path_params)
        headers = [(b"host", b"127.0.0.1"), *([(b"authorization", f"Bearer {token}".encode())] if token else [])]
        kept = {name: scope[name] for name in ("type", "asgi", "http_version", "scheme", "server", "client")}
        asked = {"method": "GET", "path": path, "raw_path": None, "query_string": b"", "root_path": ""}
        await self._api({**kept, **asked, "headers": headers}, receive, send)
