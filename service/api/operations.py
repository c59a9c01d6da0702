"""/v1/operations: long work that somebody asked for. And the answer of every route that begins such work."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Query, Response

from millrace.deadline import Deadline
from millrace.errors import MillraceError
from service.access.roles import Caller, Role
from service.api.answers import Described, Page, Paged, cut
from service.api.doors import CallerOf, Door, HostOf, door
from service.hosting.changing import UntilCancelled
from service.hosting.errors import Cancelled
from service.hosting.host import Host
from service.hosting.work import Act, Operation, Progress, State

router = APIRouter(prefix="/v1/operations", tags=["operations"], route_class=Door)


class OperationEntry(Described):
    """Long work that somebody asked for."""

    id: str
    kind: str
    """What it does: "commit", "export", "set"."""
    job: str | None
    """Of which job."""
    who: str
    """Who asked for it."""
    state: State
    """"waiting", "running"; then for good "done", "failed", "cancelled", "interrupted": the service ended meanwhile."""
    progress: float | None
    """From 0 to 1, where that can be said."""
    said: str
    """What it is doing, in words."""
    result: Any
    """What came of it, once it is done."""
    problem: dict[str, Any] | None
    """Why it failed: a problem."""
    created: datetime
    ended: datetime | None


def entry(operation: Operation) -> OperationEntry:
    """An operation as the API tells of it."""
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


def begun(host: Host, kind: str, job: str | None, who: Caller, act: Act, response: Response) -> OperationEntry:
    """Have `act` done as an operation; the answer 202 that tells where to ask for it. Raises TooMany."""
    return accepted(host.work.start(kind, job, who.name, act), response)


def accepted(operation: Operation, response: Response) -> OperationEntry:
    """The answer 202 that tells of an operation."""
    response.headers["Location"] = f"/v1/operations/{operation.id}"
    return entry(operation)


def said(words: str, within_s: float, work: Callable[[Deadline], Any]) -> Act:
    """An act of one step: it says `words`, and gives what `work` does until time is up, or nobody wants it any more."""

    def act(progress: Progress, cancelled: threading.Event) -> Any:
        progress(None, words)
        with called_off(cancelled):
            return work(UntilCancelled.within(within_s, cancelled))

    return act


@contextmanager
def called_off(cancelled: threading.Event) -> Iterator[None]:
    """Whatever ends work that nobody wants any more, is that."""
    try:
        yield
    except MillraceError:
        if cancelled.is_set():
            raise Cancelled from None
        raise


LOCATION = {"Location": {"description": "Where to ask how it goes.", "schema": {"type": "string"}}}


def begins(role: Role, *statuses: HTTPStatus, act: str = "") -> dict[str, Any]:
    """What a POST route says that begins an operation."""
    found = door(role, HTTPStatus.NOT_FOUND, *statuses, act=act, repeatable=True)
    found["responses"][int(HTTPStatus.ACCEPTED)] = {
        "description": "It is begun; ask for it at `Location`.",
        "headers": LOCATION,
    }
    return found | {"status_code": HTTPStatus.ACCEPTED, "response_model": OperationEntry}


@router.get("", **door(Role.VIEWER), operation_id="listOperations", summary="List operations")
def operations(
    host: HostOf, paging: Paged, job: str | None = Query(default=None, max_length=64, description="Of this job only.")
) -> Page[OperationEntry]:
    """Operations, the newest first; those that ended are forgotten after 7 days."""
    found = host.work.list(job=job, after=paging.after, limit=paging.limit + 1)
    return cut([entry(each) for each in found], paging, lambda each: each.id)


@router.get(
    "/{id}", **door(Role.VIEWER, HTTPStatus.NOT_FOUND), operation_id="getOperation", summary="How an operation stands"
)
def operation(host: HostOf, id: str) -> OperationEntry:
    """How an operation stands, and what came of it."""
    return entry(host.work.get(id))


@router.post(
    "/{id}/cancel",
    **door(Role.OPERATOR, HTTPStatus.NOT_FOUND, repeatable=True),
    operation_id="cancelOperation",
    summary="Ask an operation to end",
)
def cancel(host: HostOf, _caller: CallerOf, id: str) -> OperationEntry:
    """Ask that it end: one that waits never begins, one that runs ends soon, one that is over stays as it is.

    What it has already asked of a job happens all the same.
    """
    return entry(host.work.cancel(id))
