"""/v1/jobs/{job}/trace: a timeline of some steps of a running job, for Perfetto.

Workers look for a request beside their steps (headrace.timeline); service.cluster.trace_file puts their parts together.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http import HTTPStatus
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse
from pydantic import Field

from headrace.deadline import Deadline
from headrace.durable import check_no_link, locked
from headrace.errors import DeadlineExceeded
from headrace.rpc.job_client import NotRunning
from headrace.service.api.actions import ActionCall, action
from headrace.service.api.authorization import AuthorizedRoute, downloads
from headrace.service.api.forms import Form, FormField, Group, trains
from headrace.service.api.job_cache import StatusesOf
from headrace.service.api.problems import http_error
from headrace.service.api.schemas import JobName, RequestBody, shown_by
from headrace.service.auth.roles import Role
from headrace.service.cluster.job_run import workers_of
from headrace.service.cluster.store import TRACE, TRACE_LOCK, in_use
from headrace.service.cluster.store_defaults import with_store_defaults
from headrace.service.cluster.trace_file import record_trace
from headrace.service.history.dead_letters import is_plain
from headrace.service.jobs.errors import WrongPhase
from headrace.service.jobs.operation_queue import Operation
from headrace.timeline import MAX_STEPS

router = APIRouter(prefix="/v1/jobs/{job}", tags=["jobs"], route_class=AuthorizedRoute)

TRACE_S = 300.0
"""Longest time for the steps."""
JSON = "application/json"


class RecordTrace(RequestBody):
    """The steps to record."""

    model_config = shown_by({"steps": 200})

    steps: int = Field(default=200, ge=1, le=MAX_STEPS)


@action(
    router,
    "/trace",
    id="recordTrace",
    summary="Record a timeline of a running job",
    form=Form(
        Group.SETTINGS,
        "Record a trace",
        "Every trainer and shard records what each of its threads does in its next steps. The file is then on the tab "
        "Workers, for ui.perfetto.dev. An earlier trace is replaced.",
        trains,
        (FormField("steps", "Steps"),),
    ),
)
def record(call: ActionCall, asked: RecordTrace | None = None) -> Operation:
    """Record the next steps of every trainer and shard. The trace replaces an earlier one; download it once it is done.

    Training goes on. The operation ends once all workers have recorded so many steps, or after five minutes, with the
    parts that there are. It fails while another one records the same job.
    """
    store, steps = call.job.store, (asked or RecordTrace()).steps
    workers = workers_of(with_store_defaults(call.loaded))

    def work(deadline: Deadline) -> dict[str, str]:
        if not in_use(store):
            raise NotRunning(store)
        with _alone(store, call.name):
            return {"said": record_trace(store, steps, workers, deadline)}

    return call.start("trace", f"recording {steps} steps", TRACE_S, work)


@contextmanager
def _alone(store: Path, job: str) -> Iterator[None]:
    """Raise WrongPhase while another operation records: each removes what it finds."""
    with ExitStack() as held:
        try:
            held.enter_context(locked(store / TRACE_LOCK, Deadline.after(0)))
        except DeadlineExceeded:
            raise WrongPhase(f"another trace of job {job!r} is being recorded; retry once it is done") from None
        yield


@router.get(
    "/trace",
    **downloads(Role.VIEWER, JSON, HTTPStatus.NOT_FOUND),
    operation_id="getTrace",
    summary="Download the timeline of a job",
)
def trace(statuses: StatusesOf, job: JobName) -> FileResponse:
    """The newest timeline, in the trace format of Chrome; open it in ui.perfetto.dev."""
    path = check_no_link(statuses.job(job).store) / TRACE
    if not is_plain(path):
        raise http_error(HTTPStatus.NOT_FOUND, "there is no trace; record one first")
    return FileResponse(path, media_type=JSON, filename=f"{job}-trace.json")
