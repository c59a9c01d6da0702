"""Translates errors to RFC 9457 problems: the status of each error of ours, and the body of the answer.

This is the only place of translation. A failed operation has a problem of the same form.
"""

import re
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ConfigDict
from starlette.exceptions import HTTPException as StarletteHTTPException

from headrace.errors import DeadlineExceeded, HeadraceError, NotYet, SpecError, Unavailable, Unwritable
from headrace.service.api.schemas import ResponseBody
from headrace.service.jobs.errors import LimitReached, UnknownJob, UnknownOperation

MEDIA_TYPE = "application/problem+json"
RETRY_S = 1
"""Value of `Retry-After` where the same request may succeed later."""
MAX_MISTAKES = 20
"""Mistakes of one request that are listed; the others are counted."""
STATUSES: tuple[tuple[type[HeadraceError], HTTPStatus], ...] = (
    (UnknownJob, HTTPStatus.NOT_FOUND),
    (UnknownOperation, HTTPStatus.NOT_FOUND),
    (LimitReached, HTTPStatus.TOO_MANY_REQUESTS),
    (SpecError, HTTPStatus.UNPROCESSABLE_ENTITY),
    (DeadlineExceeded, HTTPStatus.SERVICE_UNAVAILABLE),
    (NotYet, HTTPStatus.SERVICE_UNAVAILABLE),
    (Unwritable, HTTPStatus.INSUFFICIENT_STORAGE),  # before Unavailable: a full folder of exports is both
    (Unavailable, HTTPStatus.SERVICE_UNAVAILABLE),
)
"""The first error class that fits counts. Any other HeadraceError gets 409: the state of the job forbids the action."""
AGAIN = (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS)


class Problem(ResponseBody):
    """An error, in the form of RFC 9457."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"title": "Not Found", "status": 404}]})

    type: str = "about:blank"
    title: str
    """The status as text."""
    status: int
    detail: str
    """The error and its remedy, as text."""
    path: str | None = None
    """The wrong key, if there is one, as in "spec.tables.default.dim"."""


class ProblemResponse(JSONResponse):
    """A problem as an HTTP response."""

    media_type = MEDIA_TYPE


def described(statuses: Iterable[HTTPStatus]) -> dict[int | str, dict[str, Any]]:
    """FastAPI's `responses` for these statuses: their meanings and the schema of problems."""
    ref = {"$ref": "#/components/schemas/Problem"}
    return {
        int(status): {"description": MEANINGS.get(status, status.phrase), "content": {MEDIA_TYPE: {"schema": ref}}}
        for status in sorted(set(statuses))
    }


KEY = re.compile(r"([A-Za-z_][\w-]*(?:\.[\w-]+)*): ")
"""The start of an error message about a key."""
MEANINGS = {
    HTTPStatus.BAD_REQUEST: "The request is malformed, or for another host.",
    HTTPStatus.UNAUTHORIZED: "A token is needed, or this token is not valid.",
    HTTPStatus.FORBIDDEN: "The role of the token is too low, or a page of another site sent the request.",
    HTTPStatus.NOT_FOUND: "No object has this name.",
    HTTPStatus.CONFLICT: "The state of the job forbids the action; the detail says what to do.",
    HTTPStatus.PRECONDITION_FAILED: "The job has changed since; get it again.",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "The body is longer than `limits.max_body`.",
    HTTPStatus.UNPROCESSABLE_ENTITY: "A value is wrong; `path` names its key.",
    HTTPStatus.PRECONDITION_REQUIRED: "`If-Match` is missing.",
    HTTPStatus.TOO_MANY_REQUESTS: "A limit is reached, or there were too many wrong tokens; see `Retry-After`.",
    HTTPStatus.SERVICE_UNAVAILABLE: "The job or the records cannot answer now; see `Retry-After`.",
    HTTPStatus.INSUFFICIENT_STORAGE: "The disk is full, or fails.",
}


def status_of(error: HeadraceError) -> HTTPStatus:
    """The status of an error of ours."""
    return next((status for kind, status in STATUSES if isinstance(error, kind)), HTTPStatus.CONFLICT)


def problem(status: HTTPStatus, detail: str, path: str | None = None) -> Problem:
    """A problem of this status."""
    return Problem(title=status.phrase, status=int(status), detail=detail, path=path or None)


def problem_of(error: Exception) -> dict[str, Any]:
    """An error as the problem of an operation: its message if it is an error of ours, else that it is a bug."""
    if isinstance(error, HeadraceError):
        return problem(status_of(error), str(error), path_of(error)).model_dump(exclude_none=True)
    detail = f"{type(error).__name__}: {error}; this is a bug, see the service's log"
    return problem(HTTPStatus.INTERNAL_SERVER_ERROR, detail).model_dump(exclude_none=True)


def answer(found: Problem, headers: dict[str, str] | None = None) -> ProblemResponse:
    """A problem as a response."""
    more = {"Retry-After": str(RETRY_S)} if found.status in AGAIN else {}
    return ProblemResponse(found.model_dump(exclude_none=True), found.status, {**more, **(headers or {})})


def on_error(request: Request, error: Exception) -> Response:
    """The answer to an error. For a method that is not allowed it lists the allowed ones."""
    response = response_to(error)
    if response.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        paths = request.app.openapi()["paths"].items()
        methods = {method.upper() for path, known in paths if _matches(path, request.url.path) for method in known}
        response.headers["Allow"] = ", ".join(sorted(methods))
    return response


def _matches(template: str, path: str) -> bool:
    parts, given = template.split("/"), path.split("/")
    return len(parts) == len(given) and all(
        a == b or (a.startswith("{") and b) for a, b in zip(parts, given, strict=True)
    )


def response_to(error: Exception) -> ProblemResponse:
    """The response for `error`; 500 for a bug."""
    match error:
        case RequestValidationError():
            return answer(_of_validation(error))
        case StarletteHTTPException():
            headers = dict(error.headers or {})
            return answer(problem(HTTPStatus(error.status_code), str(error.detail)), headers)
        case HeadraceError():
            return answer(problem(status_of(error), str(error), path_of(error)))
        case _:
            detail = "an internal error of the service, see its log; your request is not the cause"
            return answer(problem(HTTPStatus.INTERNAL_SERVER_ERROR, detail))


def path_of(error: HeadraceError) -> str | None:
    """The wrong key, the first of several; None where the error is not about a key."""
    if not isinstance(error, SpecError):
        return None
    begins = KEY.match(str(error))
    return error.path or (begins[1] if begins else None)


def http_error(status: HTTPStatus, detail: str) -> HTTPException:
    """An exception with this status."""
    return HTTPException(status, detail)


def _of_validation(error: RequestValidationError) -> Problem:
    """A problem that lists every mistake with its key; `path` is that of the first."""
    if isinstance(error.body, bytes) and error.errors()[0]["loc"] == ("body",):  # it was not parsed
        detail = 'the body must be JSON, sent with the header "Content-Type: application/json"'
        return problem(HTTPStatus.UNPROCESSABLE_ENTITY, detail)
    mistakes = [
        ("" if each["type"] == "json_invalid" else _path(each["loc"]), str(each["msg"])) for each in error.errors()
    ]
    lines = [f"{path}: {message}" if path else message for path, message in mistakes[:MAX_MISTAKES]]
    if len(mistakes) > MAX_MISTAKES:
        lines.append(f"and {len(mistakes) - MAX_MISTAKES} more")
    return problem(HTTPStatus.UNPROCESSABLE_ENTITY, "\n".join(lines), mistakes[0][0] if mistakes else None)


def _path(place: tuple[int | str, ...]) -> str:
    """ "spec.name" of ("body", "spec", "name"). Parameters keep their source: "query.limit"."""
    return ".".join(map(str, place[1:] if place and place[0] == "body" else place))
