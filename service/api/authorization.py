"""Authorization of every route, its audit log, and the replay of repeated requests.

A route declares its role by `authorized`. The role is enforced, and documented in the OpenAPI document.
"""

import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import Depends, HTTPException, Request, Response
from fastapi.responses import FileResponse
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool

from headrace.errors import HeadraceError
from headrace.service.api import idempotency, problems
from headrace.service.api.problems import described
from headrace.service.api.schemas import finite
from headrace.service.auth.guard import SAFE_METHODS, Guard, Refusal, address_of, authorize, authorize_without_waiting
from headrace.service.auth.roles import Caller, Role
from headrace.service.auth.tokens import without_tokens
from headrace.service.jobs.host import Host

log = logging.getLogger(__name__)

ROLE, ACT, REPEATABLE = "x-role", "x-act", "x-repeatable"
"""Keys of a route in the OpenAPI document."""
SCHEME = "bearer"
MAX_DETAIL = 2000
"""Most characters of one value in the audit log."""
MAX_PATH = 200
"""Most characters of the path of a refused request, which its sender chooses."""

GENERAL = (
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.UNPROCESSABLE_ENTITY,
    HTTPStatus.SERVICE_UNAVAILABLE,
)
"""Problems of every route."""
GUARDED = (
    HTTPStatus.UNAUTHORIZED,
    HTTPStatus.FORBIDDEN,
    HTTPStatus.CONFLICT,
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.INSUFFICIENT_STORAGE,
)
"""Further problems of routes that need a role: a job behind them may be in any state."""
KEY_PARAMETER = {
    "name": idempotency.HEADER,
    "in": "header",
    "required": False,
    "description": "Any text. A repeated request with the same key gets the same answer and is carried out once. "
    "Keys are kept for a day.",
    "schema": {"type": "string", "minLength": 1, "maxLength": idempotency.MAX_KEY, "pattern": "^[ -~]+$"},
}


def authorized(role: Role | None, *statuses: HTTPStatus, act: str = "", repeatable: bool = False) -> dict[str, Any]:
    """The keyword arguments of a route whose callers need `role`, or were granted `act`; None: no role.

    `statuses` are those of its own problems; those of every route are added.
    """
    if role is None:
        return {"responses": described([*GENERAL, *statuses]), "openapi_extra": {ROLE: "none", "security": []}}
    extra: dict[str, Any] = {ROLE: role.word, "security": [{SCHEME: []}]}
    if act:
        extra[ACT] = act
    if repeatable:
        extra |= {REPEATABLE: True, "parameters": [KEY_PARAMETER]}
    return {"responses": described([*GENERAL, *GUARDED, *statuses]), "openapi_extra": extra}


def downloads(role: Role, media_type: str, *statuses: HTTPStatus) -> dict[str, Any]:
    """The keyword arguments of a route that answers with a file."""
    found = authorized(role, *statuses)
    binary = {"schema": {"type": "string", "format": "binary"}}
    found["responses"][int(HTTPStatus.OK)] = {"description": "The file.", "content": {media_type: binary}}
    return found | {"response_class": FileResponse}


class AuthorizedRoute(APIRoute):
    """A route behind the guard.

    1. Authenticate the caller and check the role; log a refusal. 2. Replay the answer of a repeated request. 3. Call
    the route. 4. Store the answer for repetitions. 5. Log a request that may have changed something, with its status.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler that FastAPI calls for each request."""
        inner, extra = super().get_route_handler(), self.openapi_extra or {}
        if extra.get(ROLE, "none") == "none":
            return inner
        role, act = Role.of(extra[ROLE]), extra.get(ACT, "")

        async def handler(request: Request) -> Response:
            try:
                caller = await _entered(request, role, act)  # 1
            except Refusal as refusal:
                await _refused(request, refusal)
                raise HTTPException(refusal.status, refusal.detail, refusal.headers) from None
            request.state.caller = caller
            if request.method in SAFE_METHODS:
                return await inner(request)
            try:
                response = await (_once(request, caller, inner) if extra.get(REPEATABLE) else inner(request))
            except Exception as error:
                await run_in_threadpool(_write_down, request, caller, problems.response_to(error).status_code)
                raise
            await run_in_threadpool(_write_down, request, caller, response.status_code)
            return response

        return handler


async def _entered(request: Request, role: Role, act: str) -> Caller:
    """Step 1. It uses a thread only where it may block: a thread costs two waits for a core beside training."""
    known = authorize_without_waiting(request, role)
    return known if known is not None else await run_in_threadpool(authorize, request, role, act)


async def _once(
    request: Request, caller: Caller, inner: Callable[[Request], Coroutine[Any, Any, Response]]
) -> Response:
    """Steps 2 to 4."""
    key = request.headers.get(idempotency.HEADER)
    if key is None:
        return await inner(request)
    kept: idempotency.IdempotencyStore = request.app.state.repeats
    asked = idempotency.KeyedRequest(key, caller.name, request.method, request.url.path, await request.body())
    known = await run_in_threadpool(kept.begin, asked)  # 2
    if known is not None:
        request.state.noted = {"repeated": True}
        return Response(known.body, known.status, {**known.headers, idempotency.REPLAYED: "true"})
    answered: idempotency.StoredAnswer | None = None
    try:
        response = await inner(request)  # 3
        if response.status_code < HTTPStatus.BAD_REQUEST:
            headers = {name: response.headers[name] for name in idempotency.KEPT_HEADERS if name in response.headers}
            answered = idempotency.StoredAnswer(response.status_code, headers, bytes(response.body).decode())
    finally:
        await run_in_threadpool(kept.end, asked, answered)  # 4
    return response


async def _refused(request: Request, refusal: Refusal) -> None:
    """Write a refusal to the audit log; of many like ones only some."""
    guard: Guard = request.app.state.guard
    detail = guard.audit_detail(refusal, address_of(request))
    if detail is not None:
        line = _Line(refusal.who, None, request.method, request.url.path[:MAX_PATH], None, detail, refusal.status)
        await run_in_threadpool(_write, request, line)


def _write_down(request: Request, caller: Caller, status: int) -> None:
    """Step 5."""
    role = caller.role.word if caller.role is not None else None
    job = request.path_params.get("job")
    detail = {name: value for name, value in request.path_params.items() if name != "job"}
    detail |= getattr(request.state, "noted", {})
    _write(request, _Line(caller.name, role, request.method, request.url.path[:MAX_DETAIL], job, detail, status))


@dataclass(frozen=True, slots=True)
class _Line:
    """One line of the audit log."""

    who: str
    role: str | None
    method: str
    path: str
    job: str | None
    detail: Mapping[str, Any]
    status: int


def _write(request: Request, line: _Line) -> None:
    """Write to the audit log, without tokens. If that fails, the request took effect all the same: log an error."""
    host: Host = request.app.state.host
    path, job, detail = without_tokens(line.path), without_tokens(line.job), without_tokens(line.detail)
    try:
        host.records.audit(line.who, line.method, job, detail, role=line.role, path=path, status=line.status)
    except HeadraceError as error:
        log.error("%s %s by %s cannot be written to the audit log: %s", line.method, path, line.who, error)


# Dependencies that do not block are async: FastAPI runs others on threads.


async def _caller(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller


async def _host(request: Request) -> Host:
    host: Host = request.app.state.host
    return host


def note(request: Request, **details: Any) -> None:
    """Set the details of the request in the audit log."""
    request.state.noted = {name: finite(_short(value)) for name, value in details.items()}


def _short(value: Any) -> Any:
    return value if len(str(value)) <= MAX_DETAIL else f"{str(value)[:MAX_DETAIL]}..."


CallerOf = Annotated[Caller, Depends(_caller)]
HostOf = Annotated[Host, Depends(_host)]
