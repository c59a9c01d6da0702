"""/v1/operations: long actions that callers requested; and helpers for the routes that start them."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Query, Response

from headrace.deadline import Deadline
from headrace.errors import HeadraceError
from headrace.service.api.authorization import AuthorizedRoute, CallerOf, HostOf, authorized
from headrace.service.api.schemas import Page, Paged, ResponseBody, cut
from headrace.service.auth.roles import Caller, Role
from headrace.service.jobs.errors import Cancelled
from headrace.service.jobs.host import Host
from headrace.service.jobs.hot_settings import UntilCancelled
from headrace.service.jobs.operation_queue import Act, Operation, OperationState, ReportProgress

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


def start_operation(
    host: Host, kind: str, job: str | None, who: Caller, act: Act, response: Response
) -> OperationEntry:
    """Start `act` as an operation; the answer 202, with its address. Raises LimitReached."""
    return accepted(host.work.start(kind, job, who.name, act), response)


def accepted(operation: Operation, response: Response) -> OperationEntry:
    """The answer 202 for an operation."""
    response.headers["Location"] = f"/v1/operations/{operation.id}"
    return entry(operation)


def one_step(words: str, within_s: float, work: Callable[[Deadline], Any]) -> Act:
    """An operation of one step, described by `words`: `work` until its deadline or its cancellation."""

    def act(progress: ReportProgress, cancelled: threading.Event) -> Any:
        progress(None, words)
        with as_cancelled(cancelled):
            return work(UntilCancelled.within(within_s, cancelled))

    return act


@contextmanager
def as_cancelled(cancelled: threading.Event) -> Iterator[None]:
    """Raise Cancelled in place of any error of ours once the operation is cancelled."""
    try:
        yield
    except HeadraceError:
        if cancelled.is_set():
            raise Cancelled from None
        raise


LOCATION = {"Location": {"description": "Address of the operation.", "schema": {"type": "string"}}}


def starts_operation(role: Role, *statuses: HTTPStatus, act: str = "") -> dict[str, Any]:
    """The keyword arguments of a route that starts an operation."""
    found = authorized(role, HTTPStatus.NOT_FOUND, *statuses, act=act, repeatable=True)
    found["responses"][int(HTTPStatus.ACCEPTED)] = {
        "description": "The operation has started; get it at `Location`.",
        "headers": LOCATION,
    }
    return found | {"status_code": HTTPStatus.ACCEPTED, "response_model": OperationEntry}


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
