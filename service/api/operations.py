"""/v1/operations: long actions that callers requested."""

from datetime import datetime
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Query

from headrace.service.api.authorization import AuthorizedRoute, CallerOf, HostOf, authorized
from headrace.service.api.schemas import Page, Paged, ResponseBody, cut
from headrace.service.auth.roles import Role
from headrace.service.jobs.operation_queue import Operation, OperationState

router = APIRouter(prefix="/v1/operations", tags=["operations"], route_class=AuthorizedRoute)


class OperationEntry(ResponseBody):
    """A long action that a caller requested."""

    id: str
    kind: str
    """The action: "commit", "export", "set" and so on."""
    job: str | None
    """The job that it acts on."""
    who: str
    """The caller that requested it."""
    state: OperationState
    """"waiting" or "running"; finally "done", "failed", "cancelled" or "interrupted" (the service ended meanwhile)."""
    progress: float | None
    """From 0 to 1, if known."""
    said: str
    """Its present step, as text."""
    result: Any
    """Its result, once it is done."""
    problem: dict[str, Any] | None
    """Why it failed, as a problem."""
    created: datetime
    ended: datetime | None


def entry(operation: Operation) -> OperationEntry:
    """An operation as an entry of the API."""
    return OperationEntry(
        id=operation.id,
        kind=operation.kind,
        job=operation.job,
        who=operation.who,
        state=operation.state,
        progress=operation.progress,
        said=operation.said,
        result=operation.result,
        problem=operation.problem,
        created=operation.created,
        ended=operation.ended,
    )


@router.get("", **authorized(Role.VIEWER), operation_id="listOperations", summary="List operations")
def operations(
    host: HostOf,
    paging: Paged,
    job: str | None = Query(default=None, max_length=64, description="Only operations on this job."),
) -> Page[OperationEntry]:
    """Operations, newest first. They are removed 7 days after their end."""
    found = host.work.list(job=job, after=paging.after, limit=paging.limit + 1)
    return cut([entry(each) for each in found], paging, lambda each: each.id)


@router.get(
    "/{id}", **authorized(Role.VIEWER, HTTPStatus.NOT_FOUND), operation_id="getOperation", summary="Get an operation"
)
def operation(host: HostOf, id: str) -> OperationEntry:
    """The state of an operation, and its result."""
    return entry(host.work.get(id))


@router.post(
    "/{id}/cancel",
    **authorized(Role.OPERATOR, HTTPStatus.NOT_FOUND, repeatable=True),
    operation_id="cancelOperation",
    summary="Cancel an operation",
)
def cancel(host: HostOf, _caller: CallerOf, id: str) -> OperationEntry:
    """Cancel an operation: if it waits, it never starts; if it runs, it ends soon; if it is over, nothing changes.

    A request that it has already sent to a job is still carried out.
    """
    return entry(host.work.cancel(id))
