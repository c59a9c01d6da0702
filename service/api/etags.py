"""A job's revision as an ETag, and `If-Match` on what changes it. Pure."""

import re
from http import HTTPStatus
from typing import Annotated

from fastapi import Header

from service.api.problems import refused
from service.hosting.host import HostedJob

_TAG = re.compile(r'\s*(?:W/)?"([^"]*)"\s*')

Precondition = Annotated[
    str | None,
    Header(alias="If-Match", max_length=200, description="The ETag of the job as it was read, or *."),
]


def etag(job: HostedJob) -> str:
    """The job's ETag: another one after every change that somebody makes."""
    return f'"{job.revision}"'


def check(job: HostedJob, wanted: str | None, *, needed: bool) -> None:
    """Raises 428 where a precondition is `needed` and missing, 412 where the job was changed since."""
    if wanted is None:
        if needed:
            raise refused(
                HTTPStatus.PRECONDITION_REQUIRED,
                f"send If-Match with the ETag of the job as you read it, now {etag(job)}: others may have changed it",
            )
        return
    tags = [match[1] for part in wanted.split(",") if (match := _TAG.fullmatch(part))]
    if wanted.strip() != "*" and str(job.revision) not in tags:
        raise refused(
            HTTPStatus.PRECONDITION_FAILED, f"the job was changed since: its ETag is {etag(job)}; get it again"
        )
