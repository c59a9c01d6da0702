"""/v1/jobs/{job}/upgrade and /v1/upgrade: jobs move to another build."""

from fastapi import APIRouter
from pydantic import Field

from headrace.service.api.actions import ActionCall, action
from headrace.service.api.authorization import AuthorizedRoute, HostOf, authorized
from headrace.service.api.schemas import RequestBody, ResponseBody, shown_by
from headrace.service.auth.roles import Role
from headrace.service.jobs.builds import interpreter, upgrade, upgrade_all
from headrace.service.jobs.operation_queue import Operation

router = APIRouter(tags=["jobs"], route_class=AuthorizedRoute)


class Upgrade(RequestBody):
    """The build to move to."""

    model_config = shown_by({"build": "next"})

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


@action(router, "/v1/jobs/{job}/upgrade", id="upgradeJob", summary="Move a job to another build", role=Role.ADMIN)
def upgrade_job(call: ActionCall, asked: Upgrade) -> Operation:
    """Have a job end at a close, and go on in the environment of another build. The operation ends once it trains.

    A build that cannot read the job's spec or store is refused, and the job stays as it is.
    """
    host, job = call.host, call.name
    interpreter(host.builds, asked.build)
    host.job(job)
    return call.start_steps("upgrade", lambda progress, off: upgrade(host, job, asked.build, progress, off))


@action(router, "/v1/upgrade", id="upgradeAllJobs", summary="Move all jobs to another build", role=Role.ADMIN)
def upgrade_jobs(call: ActionCall, asked: Upgrade) -> Operation:
    """Move all jobs by name, one after another. The first that fails ends the operation; those before it stay moved."""
    host = call.host
    interpreter(host.builds, asked.build)
    return call.start_steps("upgrade", lambda progress, off: upgrade_all(host, asked.build, progress, off))
