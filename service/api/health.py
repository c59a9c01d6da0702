"""/v1/health, /v1/ready, /metrics: liveness and readiness of the service, and figures for Prometheus."""

from functools import partial

from fastapi import APIRouter, Request
from sqlalchemy import text

import headrace
from headrace.errors import HeadraceError
from headrace.service.api.authorization import AuthorizedRoute, HostOf, authorized
from headrace.service.api.exposition import Exposition, exposition
from headrace.service.api.job_cache import StatusesOf
from headrace.service.api.schemas import ResponseBody
from headrace.service.auth.roles import Role

router = APIRouter(tags=["health"], route_class=AuthorizedRoute)


class Health(ResponseBody):
    """The process answers."""

    status: str = "ok"
    version: str
    """Headrace's version."""


class Ready(ResponseBody):
    """The service is ready."""

    status: str = "ready"


@router.get("/v1/health", **authorized(None), operation_id="getHealth", summary="Whether this process answers")
def health() -> Health:
    """Whether this process answers. It checks nothing else."""
    return Health(version=headrace.__version__)


@router.get("/v1/ready", **authorized(None), operation_id="getReady", summary="Whether the service is ready")
def ready(host: HostOf) -> Ready:
    """Whether the database of the service can be read; 503 if not."""
    with host.records.reading() as session:
        session.execute(text("SELECT 1"))
    return Ready()


@router.get(
    "/metrics",
    **authorized(Role.VIEWER),
    operation_id="getExposition",
    summary="Figures of all jobs, for Prometheus",
    response_class=Exposition,
)
def metrics(request: Request, statuses: StatusesOf) -> Exposition:
    """Figures of all jobs, in the text format of Prometheus."""
    found = []
    for job in statuses.jobs():
        try:
            found.append((job.name, statuses.of(job.name)))
        except HeadraceError:  # it was deleted, or does not answer: the other jobs are still reported
            continue
    return Exposition.of(partial(exposition, found), request.headers.get("accept", ""))
