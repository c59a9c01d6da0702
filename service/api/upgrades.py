"""/v1/jobs/{job}/upgrade and /v1/upgrade: jobs move to another build."""

import threading
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from headrace.service.api.authorization import AuthorizedRoute, CallerOf, HostOf, authorized, note
from headrace.service.api.job_cache import StatusesOf
from headrace.service.api.jobs import JobName
from headrace.service.api.operations import OperationEntry, start_operation, starts_operation
from headrace.service.api.schemas import RequestBody, ResponseBody
from headrace.service.auth.roles import Role
from headrace.service.jobs.builds import interpreter
from headrace.service.jobs.operation_queue import ReportProgress
from headrace.service.jobs.upgrade import upgrade, upgrade_all

router = APIRouter(tags=["jobs"], route_class=AuthorizedRoute)


class Upgrade(RequestBody):
    """The build to move to."""

    build: str = Field(default="", max_length=64)
    """A name of `builds` in the service's configuration; empty: the service's own environment."""


class Builds(ResponseBody):
    """The builds that jobs may move to."""

    builds: list[str]
    """Their names."""


@router.get("/v1/builds", **authorized(Role.VIEWER), operation_id="listBuilds", summary="List the builds")
def list_builds(host: HostOf) -> Builds:
    """The names of the builds of the service's configuration. The service's own environment is always one more."""
    return Builds(builds=sorted(host.builds))


@router.post(
    "/v1/jobs/{job}/upgrade",
    **starts_operation(Role.ADMIN),
    operation_id="upgradeJob",
    summary="Move a job to another build",
)
def upgrade_job(
    host: HostOf,
    statuses: StatusesOf,
    caller: CallerOf,
    job: JobName,
    asked: Upgrade,
    request: Request,
    response: Response,
) -> OperationEntry:
    """Have a job end at a close, and go on in the environment of another build. The operation ends once it trains.

    A build that cannot read the job's spec or store is refused, and the job stays as it is.
    """
    note(request, build=asked.build)
    interpreter(host.builds, asked.build)
    host.job(job)

    def act(progress: ReportProgress, cancelled: threading.Event) -> dict[str, Any]:
        try:
            return upgrade(host, job, asked.build, progress, cancelled)
        finally:
            statuses.forget(job)

    return start_operation(host, "upgrade", job, caller, act, response)


@router.post(
    "/v1/upgrade",
    **starts_operation(Role.ADMIN),
    operation_id="upgradeAllJobs",
    summary="Move all jobs to another build",
)
def upgrade_jobs(
    host: HostOf, caller: CallerOf, asked: Upgrade, request: Request, response: Response
) -> OperationEntry:
    """Move all jobs by name, one after another. The first that fails ends the operation; those before it stay moved."""
    note(request, build=asked.build)
    interpreter(host.builds, asked.build)

    def act(progress: ReportProgress, cancelled: threading.Event) -> dict[str, Any]:
        return upgrade_all(host, asked.build, progress, cancelled)

    return start_operation(host, "upgrade", None, caller, act, response)
