"""Errors as RFC 9457 problems: which status an error of ours has, and its body.

Errors are translated here and nowhere else; an operation that fails has a problem of the same form.
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

from millrace.errors import DeadlineExceeded, MillraceError, NotYet, SpecError, Unavailable, Unwritable
from service.api.answers import Described
from service.hosting.errors import TooMany, UnknownJob, UnknownOperation

MEDIA_TYPE = "application/problem+json"
RETRY_S = 1
"""What `Retry-After` says where the same request may do later."""
MAX_MISTAKES = 20
"""Mistakes of one request that are told; of the others it says how many."""
STATUSES: tuple[tuple[type[MillraceError], HTTPStatus], ...] = (
    (UnknownJob, HTTPStatus.NOT_FOUND),
    (UnknownOperation, HTTPStatus.NOT_FOUND),
    (TooMany, HTTPStatus.TOO_MANY_REQUESTS),
    (SpecError, HTTPStatus.UNPROCESSABLE_ENTITY),
    (Unavailable, HTTPStatus.SERVICE_UNAVAILABLE),
    (DeadlineExceeded, HTTPStatus.SERVICE_UNAVAILABLE),
    (NotYet, HTTPStatus.SERVICE_UNAVAILABLE),
    (Unwritable, HTTPStatus.INSUFFICIENT_STORAGE),
)
"""By error, the first that fits; every other one for people means that the job's state forbids it: 409."""
AGAIN = (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS)


class Problem(Described):
    """What went wrong, as RFC 9457 has it."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"title": "Not Found", "status": 404}]})

    type: str = "about:blank"
    title: str
    """The status in words."""
    status: int
    detail: str
    """What is wrong, for people, and what to do."""
    path: str | None = None
    """The key that is wrong, as in "spec.tables.default.dim", where it is one."""


class ProblemResponse(JSONResponse):
    """A problem over the wire."""

    media_type = MEDIA_TYPE


def described(statuses: Iterable[HTTPStatus]) -> dict[int | str, dict[str, Any]]:
    """These statuses as FastAPI's `responses`: what they mean, and that they are problems."""
    ref = {"$ref": "#/components/schemas/Problem"}
    return {
        int(status): {"description": MEANINGS.get(status, status.phrase), "content": {MEDIA_TYPE: {"schema": ref}}}
        for status in sorted(set(statuses))
    }


KEY = re.compile(r"([A-Za-z_][\w-]*(?:\.[\w-]+)*): ")
"""How a mistake in a spec begins."""
MEANINGS = {
    HTTPStatus.BAD_REQUEST: "The request is none that HTTP knows, or is for another host.",
    HTTPStatus.UNAUTHORIZED: "A token is needed, or this one is not known.",
    HTTPStatus.FORBIDDEN: "The token's role may not do this, or a page of another site asks.",
    HTTPStatus.NOT_FOUND: "There is none of this name.",
    HTTPStatus.CONFLICT: "The state that the job is in forbids it; the detail says what to do.",
    HTTPStatus.PRECONDITION_FAILED: "Somebody changed the job since; get it again.",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "The body is longer than `limits.max_body`.",
    HTTPStatus.UNPROCESSABLE_ENTITY: "A value is wrong; `path` names it.",
    HTTPStatus.PRECONDITION_REQUIRED: "`If-Match` is missing.",
    HTTPStatus.TOO_MANY_REQUESTS: "A limit is reached, or there were too many wrong tokens; see `Retry-After`.",
    HTTPStatus.SERVICE_UNAVAILABLE: "The job or the records cannot answer now; see `Retry-After`.",
    HTTPStatus.INSUFFICIENT_STORAGE: "The disk is full, or fails.",
}


def status_of(error: MillraceError) -> HTTPStatus:
    """The status of an error for people."""
    return next((status for kind, status in STATUSES if isinstance(error, kind)), HTTPStatus.CONFLICT)


def problem(status: HTTPStatus, detail: str, path: str | None = None) -> Problem:
    """A problem of this status."""
    return Problem(title=status.phrase, status=int(status), detail=detail, path=path or None)


def problem_of(error: Exception) -> dict[str, Any]:
    """An error as a problem, as an operation keeps it: what it says where it is for people, else that it is a bug."""
    if isinstance(error, MillraceError):
        return problem(status_of(error), str(error), path_of(error)).model_dump(exclude_none=True)
    detail = f"{type(error).__name__}: {error}; this is a bug, see the service's log"
    return problem(HTTPStatus.INTERNAL_SERVER_ERROR, detail).model_dump(exclude_none=True)


def answer(found: Problem, headers: dict[str, str] | None = None) -> ProblemResponse:
    """A problem as a response."""
    more = {"Retry-After": str(RETRY_S)} if found.status in AGAIN else {}
    return ProblemResponse(found.model_dump(exclude_none=True), found.status, {**more, **(headers or {})})


def on_error(request: Request, error: Exception) -> Response:
    """The answer to an error; for a method that is none here, with those that are."""
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
    """The response that tells of `error`; 500 where it is a bug."""
    match error:
        case RequestValidationError():
            return answer(_of_validation(error))
        case StarletteHTTPException():
            headers = dict(error.headers or {})
            return answer(problem(HTTPStatus(error.status_code), str(error.detail)), headers)
        case MillraceError():
            return answer(problem(status_of(error), str(error), path_of(error)))
        case _:
            told = "something here is broken, the service's log says what; nothing of yours is wrong"
            return answer(problem(HTTPStatus.INTERNAL_SERVER_ERROR, told))


def path_of(error: MillraceError) -> str | None:
    """The key that is wrong, of several the first; None where the error is about none."""
    if not isinstance(error, SpecError):
        return None
    begins = KEY.match(str(error))
    return error.path or (begins[1] if begins else None)


def refused(status: HTTPStatus, detail: str) -> HTTPException:
    """An error of this status, to be raised."""
    return HTTPException(status, detail)


def _of_validation(error: RequestValidationError) -> Problem:
    """Every mistake by the key's path; `path` is that of the first."""
    if isinstance(error.body, bytes) and error.errors()[0]["loc"] == ("body",):  # nobody tried to read it
        told = 'the body must be JSON, and be said to be: send it with the header "Content-Type: application/json"'
        return problem(HTTPStatus.UNPROCESSABLE_ENTITY, told)
    mistakes = [
        ("" if each["type"] == "json_invalid" else _path(each["loc"]), str(each["msg"])) for each in error.errors()
    ]
    lines = [f"{path}: {message}" if path else message for path, message in mistakes[:MAX_MISTAKES]]
    if len(mistakes) > MAX_MISTAKES:
        lines.append(f"and {len(mistakes) - MAX_MISTAKES} more")
    return problem(HTTPStatus.UNPROCESSABLE_ENTITY, "\n".join(lines), mistakes[0][0] if mistakes else None)


def _path(place: tuple[int | str, ...]) -> str:
    """ "spec.name" of ("body", "spec", "name"); parameters keep where they stand: "query.limit"."""
    return ".".join(map(str, place[1:] if place and place[0] == "body" else place))
