"""Serves the API on a thread; and the address of a foreground run, on loopback only, as it has no tokens."""

from contextlib import AbstractContextManager
from pathlib import Path

from fastapi import FastAPI

from headrace import address
from headrace.errors import SpecError
from headrace.http import http_server
from headrace.http.connections import HEAD_S, PagesConnection
from headrace.http.listening import Listener, listen

OPTION = "--listen"
MAX_MESSAGE = 1 << 20
"""Bytes of one WebSocket message of a page."""


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of "127.0.0.1:8080". Raises SpecError for an address that other machines can reach."""
    try:
        host, port = address.parse_address(text)
    except ValueError as error:
        raise SpecError(str(error), OPTION) from None
    if ":" in host or not address.is_loopback(host):
        raise SpecError(
            f"{host!r} is not this machine's loopback; a foreground run has no tokens, so it serves 127.0.0.1 only: "
            "use `headrace serve`, or a tunnel or a proxy that authenticates",
            OPTION,
        )
    return (address.LOOPBACK if host == "localhost" else host), port


def bound(text: str) -> Listener:
    """A socket that listens at the address `text`; port 0 chooses a free port. Raises SpecError where it is taken."""
    return listen(*parse_address(text), OPTION)


def _make_routes(api: FastAPI) -> None:
    """Have FastAPI build now what it otherwise builds during the first request, which all others would wait for."""
    nowhere = {"type": "http", "method": "GET", "path": "/v1/-", "root_path": "", "headers": []}
    for route in api.routes:
        route.matches(nowhere)


def _end_work(api: FastAPI) -> None:
    """Close what would keep the server from stopping, or outlive it; an application that only waits has none."""
    for name in ("streams", "trials"):
        if hasattr(api.state, name):
            getattr(api.state, name).close()


def serving(
    api: FastAPI, listener: Listener, cert: Path | None = None, key: Path | None = None
) -> AbstractContextManager[None]:
    """Serve `api` on `listener` while the context lasts, with TLS where there is a `cert`; then the port is free."""
    _make_routes(api)
    has_pages = getattr(api.state, "live", False)  # service.ui's pages need a lifespan and WebSockets
    return http_server.serving(
        api,
        listener,
        tls=None if cert is None or key is None else (cert, key),
        thread_name="api",
        before_stop=lambda: _end_work(api),
        http=PagesConnection,
        lifespan="auto" if has_pages else "off",
        ws="websockets-sansio" if has_pages else "none",
        ws_max_size=MAX_MESSAGE,
        timeout_keep_alive=int(HEAD_S),  # a client that polls every ten seconds keeps its connection
    )
