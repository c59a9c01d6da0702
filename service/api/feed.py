"""/v1/jobs/{job}/feed: the addresses where a replica subscribes to changes of a job's rows."""

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import ConfigDict

from headrace.deadline import Deadline
from headrace.identity.certificates import MAX_REQUEST_BYTES
from headrace.rpc.job_client import JobClient
from headrace.service.api.authorization import AuthorizedRoute, authorized
from headrace.service.api.job_cache import StatusesOf
from headrace.service.api.schemas import JobName, ResponseBody
from headrace.service.auth.roles import Role
from headrace.trainer.replica.feed_address import certified

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
    authority: str | None = None
    """Certificate of the job's authority, PEM, where the job listens for other machines: the feed has mutual TLS."""
    certificate: str | None = None
    """The replica's certificate, PEM, for this generation."""


@router.get(
    "/feed",
    **authorized(Role.OPERATOR, HTTPStatus.NOT_FOUND),
    operation_id="getFeed",
    summary="Get the addresses of the live feed",
)
def feed(
    statuses: StatusesOf,
    job: JobName,
    signing_request: Annotated[
        str | None, Query(max_length=MAX_REQUEST_BYTES, description="PKCS #10, PEM, of the replica's key on P-256.")
    ] = None,
) -> Feed:
    """Addresses and secret by which a replica follows a running job. Get them again after its workers restart.

    Where the job listens for other machines, a replica also gets a certificate for its signing request.
    """
    store = statuses.job(job).store
    answer = JobClient(store).answer({"do": "feed"}, Deadline.after(ANSWER_S))
    return Feed(**(answer if signing_request is None else certified(answer, store, signing_request)))
