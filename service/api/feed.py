"""/v1/jobs/{job}/feed: where a replica subscribes to a job's rows as they change."""

from http import HTTPStatus
from typing import Any

from fastapi import APIRouter
from pydantic import ConfigDict

from millrace.deadline import Deadline
from millrace.job_client import JobClient
from service.access.roles import Role
from service.api.answers import Described
from service.api.doors import Door, door
from service.api.jobs import JobName
from service.api.statuses import StatusesOf

router = APIRouter(prefix="/v1/jobs/{job}", tags=["feed"], route_class=Door)

ANSWER_S = 5.0


class Feed(Described):
    """Where a job's rows are told as they change. The secret opens the feed alone, and with these workers it goes."""

    model_config = ConfigDict(extra="allow")

    timeline: str
    generation: int
    secret: str
    chief: str
    """Address of what is not in rows: dense weights, versions."""
    shards: list[Any]
    """Addresses of the rows."""


@router.get(
    "/feed",
    **door(Role.OPERATOR, HTTPStatus.NOT_FOUND),
    operation_id="getFeed",
    summary="Where a replica subscribes",
)
def feed(statuses: StatusesOf, job: JobName) -> Feed:
    """Addresses and the secret by which a replica follows a running job; ask again after its workers restart."""
    return Feed(**JobClient(statuses.job(job).store).answer({"do": "feed"}, Deadline.after(ANSWER_S)))
