"""/v1/health, /v1/ready, /metrics: whether the service answers, whether it can work, and figures for Prometheus."""

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST
from sqlalchemy import text

import millrace
from millrace.errors import MillraceError
from service.access.roles import Role
from service.api.answers import Described
from service.api.doors import Door, HostOf, door
from service.api.exposition import exposition
from service.api.statuses import StatusesOf

router = APIRouter(tags=["health"], route_class=Door)


class Health(Described):
    """That this process answers."""

    status: str = "ok"
    version: str
    """Millrace's version."""


class Ready(Described):
    """That the service can work."""

    status: str = "ready"


class Exposition(Response):
    """Prometheus' text."""

    media_type = CONTENT_TYPE_LATEST


@router.get("/v1/health", **door(None), operation_id="getHealth", summary="Whether this process answers")
def health() -> Health:
    """Whether this process answers: asks nothing and nobody."""
    return Health(version=millrace.__version__)


@router.get("/v1/ready", **door(None), operation_id="getReady", summary="Whether the service can work")
def ready(host: HostOf) -> Ready:
    """Whether the records can be read: 503 where they cannot."""
    with host.records.reading() as session:
        session.execute(text("SELECT 1"))
    return Ready()


@router.get(
    "/metrics",
    **door(Role.VIEWER),
    operation_id="getExposition",
    summary="Figures of all jobs, for Prometheus",
    response_class=Exposition,
)
def metrics(statuses: StatusesOf) -> Exposition:
    """Figures of all jobs, as Prometheus reads them."""
    found = []
    for job in statuses.jobs():
        try:
            found.append((job.name, statuses.of(job.name)))
        except MillraceError:  # deleted since, or away now: the other jobs are told of all the same
            continue
    return Exposition(exposition(found))
