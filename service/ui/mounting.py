"""Adds the live page to the application, where NiceGUI is installed; else says how to have it.

Once in a process, for NiceGUI is one. It is imported here and in the pages, which nothing else imports.
"""

import importlib.util
import logging
from http import HTTPStatus

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route

from service.ui.gate import ROOT, Door, Gate
from service.ui.sessions import Sessions
from service.ui.signing_in import SigningIn

MISSING = "The live page is not installed: pip install 'millrace[ui]' adds it. The API is at /v1/openapi.json.\n"
RECONNECT_S = 15.0
"""How long a page that lost its connection is kept."""


def mount(api: FastAPI, max_pages: int) -> None:
    """Add the live page to `api`, for at most `max_pages` browser tabs at a time.

    Whoever serves it has to serve websockets then, and tell it when it starts and ends: `api.state.live` says so.
    """
    if importlib.util.find_spec("nicegui") is None:
        api.router.routes.append(Route("/", _missing, include_in_schema=False))
        return
    sessions = Sessions()
    door = Door(api, sessions)
    api.router.routes += [
        Route("/", _home, include_in_schema=False),
        Route(ROOT, _home, include_in_schema=False),
        *SigningIn(door, sessions).routes(),
    ]
    _mount_pages(api, door, max_pages)
    api.state.live = True


async def _missing(_request: Request) -> Response:
    return PlainTextResponse(MISSING)


async def _home(_request: Request) -> Response:
    return RedirectResponse(f"{ROOT}/", HTTPStatus.TEMPORARY_REDIRECT)


def _mount_pages(api: FastAPI, door: Door, max_pages: int) -> None:
    from nicegui import Client, core, ui

    from service.ui.pages import add_pages

    logging.getLogger("httpx").setLevel(logging.WARNING)  # pages ask much, and none of it goes over a wire
    add_pages(api)
    ui.run_with(
        api,
        mount_path=ROOT,
        title="Millrace",
        dark=None,
        binding_refresh_interval=None,
        reconnect_timeout=RECONNECT_S,
        tailwind=False,
        show_welcome_message=False,
    )
    core.app.config.socket_io_js_transports = ["websocket"]
    core.sio.eio.transports = ["websocket"]
    core.sio.eio.cors_allowed_origins = []  # says nothing to other sites; the gate refuses them
    [mounted] = [each for each in api.router.routes if isinstance(each, Mount) and each.path == ROOT]
    mounted.app = Gate(mounted.app, door, max_pages, lambda: len(Client.instances))
