"""Runs an ASGI application on a listener, on a thread of its own, with the bounds that all our HTTP servers have."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.http.connections import InferenceConnection, PagesConnection
from headrace.http.listening import BACKLOG, Listener, with_place
from headrace.logs import repeats_filtered

STOP_S = 5
"""How long requests in flight may take at the end."""


@contextmanager
def serving(
    app: ASGIApp,
    listener: Listener,
    *,
    http: Callable[..., InferenceConnection | PagesConnection],
    tls: tuple[Path, Path] | None = None,
    thread_name: str,
    before_stop: Callable[[], object] = lambda: None,
    **options: Any,
) -> Iterator[None]:
    """Serve `app` while the context lasts, with TLS where a certificate and its key are given; then close the listener.

    `options` are those of uvicorn.Config that the servers do not share. `before_stop` is called before requests in
    flight are waited for.
    """
    cert, key = tls or (None, None)

    async def placed(scope: Scope, receive: Receive, send: Send) -> None:
        with_place(scope, listener.place(scope.get("client")))
        await app(scope, receive, send)

    server = uvicorn.Server(
        uvicorn.Config(
            placed,
            http=partial(http, listener),  # type: ignore[arg-type]  # uvicorn calls it as it does a class
            limit_concurrency=listener.room.answered,
            backlog=BACKLOG,
            log_level="warning",
            access_log=False,
            loop="asyncio",  # not another one that some package brings: see Listener
            timeout_graceful_shutdown=STOP_S,
            ssl_certfile=cert,
            ssl_keyfile=key,
            proxy_headers=False,  # else a client on loopback could claim another address, and fail without a limit
            server_header=False,
            **options,
        )
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name=thread_name, daemon=True)
    with repeats_filtered("uvicorn.error", "asyncio"):
        thread.start()
        try:
            yield
        finally:
            before_stop()
            server.should_exit = True
            thread.join(2 * STOP_S)
            listener.close()
