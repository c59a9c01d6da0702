"""Adds the live pages to the application if NiceGUI is installed; else a note how to install it.

Only once in a process, as NiceGUI is a singleton. The first request for a page loads it: many services never show a
page, and loading it would slow their start.
"""

import asyncio
import importlib
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.extras import is_installed, missing
from headrace.service.ui import explorer
from headrace.service.ui.downloads import download_routes
from headrace.service.ui.page_access import ROOT, VISIT, BrowserAuth, PageGate, Visit
from headrace.service.ui.recorder import Recorder
from headrace.service.ui.sessions import Sessions
from headrace.service.ui.sign_in import SigningIn

if TYPE_CHECKING:
    from nicegui import Client

RECONNECT_S = 15.0
"""How long a page that lost its connection is kept."""


def mount(api: FastAPI, max_pages: int, max_each: int) -> None:
    """Add the live pages to `api`, for at most `max_pages` browser tabs at a time, `max_each` of one visitor.

    Its server must then support WebSockets and lifespan events; `api.state.live` says so.
    """
    if not is_installed("nicegui"):
        api.router.routes.append(Route("/", _missing, include_in_schema=False))
        return
    sessions, recorder = Sessions(), Recorder(api.state.statuses)
    door, pages = BrowserAuth(api, sessions), Pages(api, recorder)
    api.router.routes += [
        Route("/", _home, include_in_schema=False),
        Route(ROOT, _home, include_in_schema=False),
        *SigningIn(door, sessions).routes(),
        *explorer.routes(),
        *download_routes(api, door),
    ]
    api.mount(ROOT, PageGate(pages, door, max_pages, max_each, pages.whose))
    api.state.live = True

    @asynccontextmanager
    async def living(_: FastAPI) -> AsyncIterator[None]:
        recording = asyncio.create_task(recorder.run())
        try:
            yield
        finally:
            recording.cancel()
            await pages.end()

    api.router.lifespan_context = living


async def _missing(_request: Request) -> Response:
    return PlainTextResponse(f"{missing('nicegui', 'the live page')}. The API is at /v1/openapi.json.\n")


async def _home(_request: Request) -> Response:
    return RedirectResponse(f"{ROOT}/", HTTPStatus.TEMPORARY_REDIRECT)


def _sharer(client: "Client") -> str:
    """The client that a page counts for; empty for a page of NiceGUI itself."""
    try:
        visit: Visit = client.request.scope[VISIT]
    except (RuntimeError, KeyError):
        return ""
    return visit.sharer


class Pages:
    """NiceGUI's application, loaded at the first request. On the event loop."""

    def __init__(self, api: FastAPI, recorder: Recorder) -> None:
        self._api, self._recorder = api, recorder
        self._app: ASGIApp | None = None
        self._lock = asyncio.Lock()
        self._held = AsyncExitStack()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        app = self._app or await self._loaded()
        await app(scope, receive, send)

    def whose(self) -> list[str]:
        """For each page that is or was recently open, whom it counts for."""
        if self._app is None:
            return []
        from nicegui import Client

        return [_sharer(client) for client in Client.instances.values()]

    async def end(self) -> None:
        """Close all pages."""
        await self._held.aclose()

    async def _loaded(self) -> ASGIApp:
        async with self._lock:
            if self._app is None:
                await run_in_threadpool(importlib.import_module, "headrace.service.ui.pages")
                self._app = await self._begun()
            return self._app

    async def _begun(self) -> ASGIApp:
        from nicegui import core, ui

        from headrace.service.ui.pages import add_pages

        logging.getLogger("httpx").setLevel(logging.WARNING)  # pages send many requests, all within this process
        add_pages(self._api, self._recorder)
        shell = FastAPI()  # an application for NiceGUI to attach to: ours has started already
        ui.run_with(
            shell,
            title="Headrace",
            dark=None,
            language="en-US",
            binding_refresh_interval=None,
            reconnect_timeout=RECONNECT_S,
            tailwind=False,
            show_welcome_message=False,
        )
        core.app.config.quasar_config["loadingBar"]["skipHijack"] = True  # a bar that has no name for screen readers
        core.app.config.socket_io_js_transports = ["websocket"]
        core.sio.eio.transports = ["websocket"]
        core.sio.eio.cors_allowed_origins = []  # no CORS headers; the gate refuses other sites
        await self._held.enter_async_context(shell.router.lifespan_context(shell))
        app: ASGIApp = core.app
        return app
