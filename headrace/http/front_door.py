"""Checks of an HTTP request before an application sees it, for every server of ours.

The name that the client calls the server by (Host), the site whose page sends the request (Origin), and the length of
the body. Pure, but for `bounded`, which counts a body as it arrives. Each server words its own refusals. Heads and
connections are the work of headrace.http.connections and headrace.http.listening, addresses that of headrace.address.

Starlette's TrustedHostMiddleware does less: it reads the first of two Host headers and no IPv6 address in brackets.
"""

import asyncio
from collections.abc import Callable, Collection
from http import HTTPStatus
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Message, Receive

from headrace.address import LOCAL_NAMES, host_of

SAME_SITE = ("none", "same-origin")
"""Values of `Sec-Fetch-Site` that no page of another site has; programs that are no browsers do not send it."""
MAX_DIGITS = 18
"""Of a Content-Length: Python takes long to read a number of thousands of digits."""

Refusal = Callable[[HTTPStatus, str], Exception]
"""Makes the exception that the application answers, of a status and a text."""


def served_names(names: Collection[str] = ()) -> frozenset[str]:
    """Names that a server answers to: those of this machine, and `names`, with or without brackets."""
    return frozenset((*LOCAL_NAMES, *(name.strip("[]").lower() for name in names)))


def is_known_host(headers: Headers, names: Collection[str]) -> bool:
    """Whether the request has exactly one Host header, and that one of the `names` of `served_names`.

    This stops DNS rebinding: a page of another site cannot reach a local server by a name of its own.
    """
    hosts = headers.getlist("host")
    return len(hosts) == 1 and host_of(hosts[0]) in names


def is_cross_site(headers: Headers) -> bool:
    """Whether a page of another site sends the request, by Host, Origin and Sec-Fetch-Site.

    Older browsers send no Sec-Fetch-Site.
    """
    host, origins, fetch_sites = headers.get("host"), headers.getlist("origin"), headers.getlist("sec-fetch-site")
    return any(_netloc(origin) != host for origin in origins) or any(each not in SAME_SITE for each in fetch_sites)


def is_too_long(headers: Headers, max_bytes: int) -> bool:
    """Whether Content-Length is no number, or more than `max_bytes`. Without one, `bounded` counts the body."""
    length = headers.get("content-length", "0")
    is_number = length.isascii() and length.isdigit() and len(length) <= MAX_DIGITS
    return not (is_number and int(length) <= max_bytes)


def bounded(receive: Receive, max_bytes: int, within_s: float, refusal: Refusal, too_large: str) -> Receive:
    """`receive`, but a body that is longer, or not complete in time, is refused; it is counted as it arrives."""
    read, is_whole = 0, False
    until_s = asyncio.get_running_loop().time() + within_s

    async def of_the_body() -> Message:
        nonlocal read, is_whole
        if is_whole:  # the only message that may still come: the client has left
            return await receive()
        try:
            async with asyncio.timeout_at(until_s):
                message = await receive()
        except TimeoutError:
            raise refusal(HTTPStatus.REQUEST_TIMEOUT, f"the body did not arrive within {within_s:g} s") from None
        read += len(message.get("body", b""))
        is_whole = not message.get("more_body", False)
        if read > max_bytes:
            raise refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, too_large)
        return message

    return of_the_body


def _netloc(origin: str) -> str:
    """Host and port of an Origin; empty where it has none, as "null" has."""
    try:
        return urlsplit(origin).netloc
    except ValueError:  # a bracket that is not closed
        return ""
