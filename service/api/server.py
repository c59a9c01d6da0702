"""Serves the API from a thread of a foreground run. Loopback only, until requests are authenticated."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from millrace import address
from millrace.connections import HEAD_S, PagesConnection
from millrace.errors import SpecError
from millrace.listening import Listener, listen
from millrace.logs import repeats_filtered

OPTION = "--listen"
STOP_S = 5.0
"""How long requests in flight may take at the end."""
MAX_MESSAGE = 1 << 20
"""Bytes that a page's browser may send at once."""


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of "127.0.0.1:8080". Raises SpecError for what is no address of this machine alone."""
    try:
        host, port = address.parse_address(text)
    except ValueError as error:
        raise SpecError(str(error), OPTION) from None
    if ":" in host or not address.is_loopback(host):
        raise SpecError(
            f"{host!r} is not this machine's loopback; the API has no passwords yet, so only 127.0.0.1 is served: "
            "reach it from elsewhere through a tunnel or a proxy that asks who is calling",
            OPTION,
        )
    return (address.LOOPBACK if host == "localhost" else host), port


def bound(text: str) -> Listener:
    """A socket that listens at the address `text`; port 0 takes a free one. Raises SpecError where it is taken."""
    return listen(*parse_address(text), OPTION)


def _make_routes(api: FastAPI) -> None:
    """Have FastAPI build what it puts off to the first request, all of which would wait for that, and others with it.

    Each of the routers looks at a path once.
    """
    nowhere = {"type": "http", "method": "GET", "path": "/v1/-", "root_path": "", "headers": []}
    for route in api.routes:
        route.matches(nowhere)


@contextmanager
def serving(api: FastAPI, listener: Listener, cert: Path | None = None, key: Path | None = None) -> Iterator[None]:
    """Serve `api` on `listener` as long as the context lasts, encrypted with `cert`; then the port is free again."""
    _make_routes(api)
    live = getattr(api.state, "live", False)  # whether service.ui's pages are there: they need a start and websockets
    server = uvicorn.Server(
        uvicorn.Config(
            api,
            http=PagesConnection,
            limit_concurrency=listener.room.answered,
            backlog=listener.room.open,
            log_level="warning",
            loop="asyncio",  # not another one because a package of the pages brings it: see Listener
            lifespan="auto" if live else "off",
            ws="websockets-sansio" if live else "none",
            ws_max_size=MAX_MESSAGE,
            timeout_graceful_shutdown=int(STOP_S),
            timeout_keep_alive=int(HEAD_S),  # who asks every ten seconds keeps their connection
            ssl_certfile=cert,
            ssl_keyfile=key,
            proxy_headers=False,  # else who asks from loopback could say another address, and never fail too often
            server_header=False,
        )
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="api", daemon=True)
    with repeats_filtered("uvicorn.error", "asyncio"):
        thread.start()
        try:
            yield
        finally:
            if hasattr(api.state, "streams"):
                api.state.streams.close()
            server.should_exit = True
            thread.join(2 * STOP_S)
            listener.close()
