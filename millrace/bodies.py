"""Bodies of requests with an end, in bytes and in time, for an ASGI application around another."""

import asyncio
from collections.abc import Callable
from http import HTTPStatus

from starlette.types import Message, Receive

Refusal = Callable[[HTTPStatus, str], Exception]
"""Makes what the application answers of a status and of words."""


def bounded(receive: Receive, max_bytes: int, within_s: float, refusal: Refusal, too_large: str) -> Receive:
    """As `receive`, but a body that is longer, or not here in time, is refused; it is counted as it comes."""
    read, is_whole = 0, False
    until_s = asyncio.get_running_loop().time() + within_s

    async def of_the_body() -> Message:
        nonlocal read, is_whole
        if is_whole:  # what comes now is that the client has gone
            return await receive()
        try:
            async with asyncio.timeout_at(until_s):
                message = await receive()
        except TimeoutError:
            raise refusal(HTTPStatus.REQUEST_TIMEOUT, f"the body was not here in {within_s:g} s") from None
        read += len(message.get("body", b""))
        is_whole = not message.get("more_body", False)
        if read > max_bytes:
            raise refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, too_large)
        return message

    return of_the_body
