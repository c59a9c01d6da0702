"""Answers an orchestrator whether this process is alive and ready: /live and /ready, over plain HTTP without tokens."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp, Receive, Scope, Send

from millrace.address import parse_address
from millrace.errors import SpecError

OPTION = "--health"

Lacks = Callable[[], str]
"""The things that a process lacks to be ready, in words; "" once it is ready. Any thread."""


@contextmanager
def health_served(at: str | None, lacks: Lacks) -> Iterator[None]:
    """Answer at HOST:PORT while the context lasts; nowhere for None. Raises SpecError for an address not to be had."""
    if at is None:
        yield
        return
    try:
        host, port = parse_address(at, "0.0.0.0:8081")
    except ValueError as error:
        raise SpecError(str(error), OPTION) from None
    # Imported here: most processes serve nothing.
    from millrace.http import http_server
    from millrace.http.connections import PagesConnection
    from millrace.http.listening import listen

    listener = listen(host, port, OPTION)
    with http_server.serving(
        health_app(lacks), listener, thread_name="health", http=PagesConnection, lifespan="off", ws="none"
    ):
        yield


def health_app(lacks: Lacks) -> ASGIApp:
    """/live answers 200 as long as the process answers; /ready answers 503 with the reason until nothing lacks."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        code, text = _answer(scope["path"], lacks)
        body = f"{text}\n".encode()
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": code, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return answer


def _answer(path: str, lacks: Lacks) -> tuple[int, str]:
    match path:
        case "/live":
            return 200, "live"
        case "/ready":
            reason = lacks()
            return (503, reason) if reason else (200, "ready")
        case _:
            return 404, "there are /live and /ready"
