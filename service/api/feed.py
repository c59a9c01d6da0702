"""/v1/jobs/{job}/feed: the addresses where a replica subscribes to changes of a job's rows."""

from http import HTTPStatus
from typing import Any

from fastapi import APIRouter
from pydantic import ConfigDict

from millrace.deadline import Deadline
from millrace.rpc.job_client import JobClient
from service.api.authorization import AuthorizedRoute, authorized
from service.api.job_cache import StatusesOf
from service.api.jobs import JobName
from service.api.schemas import ResponseBody
from service.auth.roles import Role

router = APIRouter(prefix="/v1/jobs/{job}", tags=["feed"], route_class=AuthorizedRoute)

ANSWER_S = 5.0


class Feed(ResponseBody):
    """Addresses of a job's live feed. The secret gives access to the feed only, and ends with these workers."""

    model_config = ConfigDict(extra="allow")

    timeline: str
    generation: int
    secret: str
    chief: str
    """Address of rank 0, which sends dense weights and versions."""
    shards: list[Any]
    """Addresses of the shards, which send rows."""


@router.get(
    "/feed",
    **authorized(Role.OPERATOR, HTTPStatus.NOT_FOUND),
    operation_id="getFeed",
    summary="Get the addresses of the live feed",
)
def feed(statuses: StatusesOf, job: JobName) -> Feed:
    """Addresses and secret by which a replica follows a running job. Get them again after its workers restart."""
    return Feed(**JobClient(statuses.job(job).store).answer({"do": "feed"}, Deadline.after(ANSWER_S)))
