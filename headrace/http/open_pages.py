"""Pages over plain HTTP without tokens, for probes and for scrapers of figures. They take no input."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.address import is_loopback, parse_address
from headrace.errors import SpecError

MAX_CONNECTIONS = 16
"""Most connections with an answer, since anybody may make them; beyond it the answer is 503."""


Pages = Mapping[str, Callable[[], ASGIApp]]
"""Makes the answer, a response of Starlette, at each path. Called on the server's only thread, so it must be quick."""


@contextmanager
def pages_served(at: str | None, pages: Pages, option: str, example: str) -> Iterator[None]:
    """Answer at HOST:PORT, the value of `option`, while the context lasts; nowhere for None.

    On loopback it answers only to HOST and the usual names of this machine. `example`: an address for the message.
    Raises SpecError for an address not to be had.
    """
    if at is None:
        yield
        return
    try:
        host, port = parse_address(at, example)
    except ValueError as error:
        raise SpecError(str(error), option) from None
    # Imported here: most processes serve nothing.
    from headrace.http import http_server
    from headrace.http.connections import PagesConnection
    from headrace.http.front_door import served_names
    from headrace.http.listening import ConnectionBounds, listen

    listener = listen(host, port, option, ConnectionBounds(answered=MAX_CONNECTIONS, open=2 * MAX_CONNECTIONS))
    name = option.removeprefix("--")
    names = served_names((host,)) if is_loopback(host) else None
    with http_server.serving(
        pages_app(pages, names), listener, thread_name=name, http=PagesConnection, lifespan="off", ws="none"
    ):
        yield


def pages_app(pages: Pages, names: Collection[str] | None) -> ASGIApp:
    """Answers 404 at all other paths, with those that there are.

    `names`: those that a client may call the server by; one that tells none, by HTTP/1.0, is no browser. None: any,
    since a probe asks for the address of a pod.
    """
    from starlette.datastructures import Headers  # see pages_served

    from headrace.http.front_door import is_known_host

    def missing() -> ASGIApp:
        return text_page(f"not found; known: {', '.join(pages)}", 404)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if names is None or "host" not in headers or is_known_host(headers, names):
            page = pages.get(scope["path"], missing)()
        else:
            page = text_page(f"not answered by this name; known: {', '.join(sorted(names))}", 400)
        await page(scope, receive, send)

    return answer


def text_page(line: str, code: int = 200) -> ASGIApp:
    """A page of one line."""
    from starlette.responses import PlainTextResponse  # see pages_served

    return PlainTextResponse(f"{line}\n", code)


# Answers an orchestrator whether this process is alive and ready: /live and /ready, over plain HTTP without tokens.

OPTION = "--health"

Lacks = Callable[[], str]
"""The things that a process lacks to be ready, in words; "" once it is ready. Any thread."""


def health_served(at: str | None, lacks: Lacks) -> AbstractContextManager[None]:
    """Answer at HOST:PORT while the context lasts; nowhere for None. Raises SpecError for an address not to be had."""
    return pages_served(at, health_pages(lacks), OPTION, "0.0.0.0:8081")


def health_pages(lacks: Lacks) -> Pages:
    """/live answers 200 as long as the process answers; /ready answers 503 with the reason until nothing lacks."""

    def ready() -> ASGIApp:
        reason = lacks()
        return text_page(reason, 503) if reason else text_page("ready")

    return {"/live": lambda: text_page("live"), "/ready": ready}
