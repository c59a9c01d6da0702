"""The answers of a service that is not active: 503 with the reason, except that it lives, and its figure.

service.server.waiting serves them while another service is active; `OnlyActive` gives them for an active service that
could not renew its lease.
"""

from collections.abc import Callable
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

import headrace
from headrace.service.api.exposition import Exposition, standby_exposition
from headrace.service.api.health import Health
from headrace.service.api.problems import answer, problem
from headrace.service.records.database import NotActive

TRY_AGAIN = 1013
"""WebSocket's code for a server that cannot answer now."""
HEALTH, METRICS = "/v1/health", "/metrics"
"""The paths that are answered as ever. They tell nothing that needs a token."""


class InactiveAnswers:
    """The application of a service that waits; `why` is the reason in words."""

    def __init__(self, why: Callable[[], str]) -> None:
        self._why = why

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": TRY_AGAIN, "reason": "another service is active"})
        elif scope["type"] == "http":
            await self._answer(scope)(scope, receive, send)

    def _answer(self, scope: Scope) -> Response:
        path = scope["path"]
        if path == HEALTH:
            return JSONResponse(Health(version=headrace.__version__).model_dump())
        if path == METRICS:
            return Exposition.of(standby_exposition, Headers(scope=scope).get("accept", ""))
        return answer(problem(HTTPStatus.SERVICE_UNAVAILABLE, self._why()))


class OnlyActive:
    """Middleware: the application's answers while `fence` returns, those of a standby while it raises NotActive."""

    def __init__(self, app: ASGIApp, fence: Callable[[], object]) -> None:
        self._app, self._fence = app, fence

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        try:
            if scope["type"] != "lifespan":
                self._fence()
        except NotActive as error:
            await InactiveAnswers(error.__str__)(scope, receive, send)
            return
        await self._app(scope, receive, send)
