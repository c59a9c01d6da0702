"""The API's addresses: `/v1/health`, `/v1/jobs`, `/v1/jobs/{name}`, its `/commits`, `/metrics`.

Errors are RFC 9457 problems.
"""

from http import HTTPStatus

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware

import millrace
from millrace.errors import MillraceError
from service.api.exposition import exposition
from service.api.jobs import (
    CommitAsked,
    CommitEntry,
    CommitList,
    Health,
    JobEntry,
    JobList,
    Jobs,
    JobStatus,
    described,
)
from service.status import Status

LOCAL_NAMES = ["127.0.0.1", "localhost"]
"""Names under which it answers: a web page elsewhere cannot reach it by a name of its own."""


def app(jobs: Jobs) -> FastAPI:
    """The application that tells of `jobs`."""
    api = FastAPI(title="Millrace", version=millrace.__version__, openapi_url="/v1/openapi.json", docs_url=None)
    api.add_middleware(TrustedHostMiddleware, allowed_hosts=LOCAL_NAMES)
    api.add_exception_handler(StarletteHTTPException, _problem)
    api.add_exception_handler(MillraceError, _unavailable)

    @api.get("/v1/health")
    def health() -> Health:
        """Whether this process answers."""
        return Health(version=millrace.__version__)

    @api.get("/v1/jobs")
    def list_jobs() -> JobList:
        """All jobs."""
        statuses = ((name, jobs.status(name)) for name in jobs.names())
        return JobList(jobs=[JobEntry(name=name, state=s.text("state", "starting")) for name, s in statuses if s])

    @api.get("/v1/jobs/{name}")
    def job(name: str) -> JobStatus:
        """What a job is doing."""
        return described(name, _known(jobs, name))

    @api.get("/v1/jobs/{name}/commits")
    def list_commits(name: str) -> CommitList:
        """A job's commits."""
        _known(jobs, name)
        return CommitList(commits=[CommitEntry(**entry) for entry in jobs.commits(name)])

    @api.post("/v1/jobs/{name}/commits", status_code=HTTPStatus.ACCEPTED)
    def ask_commit(name: str, request: Request) -> CommitAsked:
        """Have a job make a commit; it is made in the background."""
        _known(jobs, name)
        if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise HTTPException(HTTPStatus.FORBIDDEN, "pages of other sites may not ask for anything here")
        return CommitAsked(version=jobs.ask_commit(name))

    @api.get("/metrics", response_class=Response)
    def metrics() -> Response:
        """Figures of all jobs, for Prometheus."""
        return Response(exposition(jobs), media_type=CONTENT_TYPE_LATEST)

    return api


def _known(jobs: Jobs, name: str) -> Status:
    """The status of a job that is known here, or a problem."""
    status = jobs.status(name)
    if status is None:
        known = ", ".join(jobs.names()) or "none"
        raise HTTPException(HTTPStatus.NOT_FOUND, f"there is no job {name!r}; known here: {known}")
    return status


def _unavailable(request: Request, error: Exception) -> Response:
    """The job cannot answer now: its chief is being started, or its store cannot be read."""
    return _problem(request, StarletteHTTPException(HTTPStatus.SERVICE_UNAVAILABLE, str(error)))


def _problem(_request: Request, error: Exception) -> Response:
    assert isinstance(error, StarletteHTTPException)
    title = HTTPStatus(error.status_code).phrase
    body = {"type": "about:blank", "title": title, "status": error.status_code, "detail": error.detail}
    return JSONResponse(body, error.status_code, error.headers, media_type="application/problem+json")
