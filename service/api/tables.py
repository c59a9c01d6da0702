"""/v1/jobs/{job}/tables, /forget, /day-tick: a running job's rows. The work is in service.operating."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi import Path as InPath
from pydantic import Field

from millrace.deadline import Deadline
from millrace.errors import MillraceError, NotYet
from pserver.config import LAST_DAY, Days, NotNegative
from service.access.guard import address_of
from service.access.limiting import Shares, sharer
from service.access.roles import Role
from service.api.answers import Asked, Described, Page, Paged, finite, page
from service.api.doors import CallerOf, Door, HostOf, door, note
from service.api.jobs import JobName
from service.api.operations import OperationEntry, begins, begun, one_step
from service.api.problems import refused
from service.api.statuses import StatusesOf
from service.begun import as_begun
from service.operating import explaining, tables
from service.operating.committed import newest
from service.spec import LoadedJob
from service.status import Number, Status

router = APIRouter(prefix="/v1/jobs/{job}", tags=["tables"], route_class=Door)

ACT_S = 600.0
"""How long an operation waits until it has taken effect."""
EXPLAIN_S = 20.0
MAX_EXPLAINING, MAX_EXPLAINING_EACH = 4, 2
"""Explanations at a time, in total and for one caller: each queries shards, and may read from an object store."""
TableName = Annotated[str, InPath(description="A table's name.", max_length=128)]
GONE = (HTTPStatus.NOT_FOUND,)
_explaining, _shares = threading.BoundedSemaphore(MAX_EXPLAINING), Shares(MAX_EXPLAINING_EACH)


class TableEntry(Described):
    """A table of rows."""

    name: str
    rows: Number | None
    bytes: Number | None
    """Memory on all shards."""
    new_rows: Number | None
    """Rows created in the newest pass."""
    unadmitted: Number | None
    """Records of keys that were not admitted, in the newest pass."""
    dirty_rows: Number | None
    """Rows changed since the newest commit, on the shard with most of them: they cannot be evicted from memory."""
    dim: int
    """Length of a row's vector."""
    slots: dict[str, dict[str, Any]]
    """By slot: its `rows`, which slots of one `share` have in common, and statistics of its values over the job's
    life."""
    held: dict[str, Any] | None
    """A shrink that would delete too many rows and waits for an operator, or null."""


class Shrink(Asked):
    """Rows to delete: by the table's own rule, unless another is given."""

    delete_below: NotNegative | None = None
    """Delete rows whose score is lower."""
    delete_after_days: Days | None = None
    """Delete rows that were not seen for more days."""
    dry_run: bool = False
    """Only count the rows, by slot and reason."""
    allow: bool = False
    """Delete also more than `max_shrink_fraction` of the rows."""


class Forget(Asked):
    """A feature value whose row is to be deleted."""

    slot: str = Field(max_length=128)
    value: str = Field(max_length=4096)
    """A feature id, or the text that it is made from."""


class DayTick(Asked):
    """The day to begin."""

    to: int | None = Field(default=None, ge=0, le=LAST_DAY)
    """Default: the next day."""


class Explanation(Described):
    """Everything that a job knows of one feature id; by its newest commit if the job does not run."""

    lines: list[str]
    """The explanation as text."""
    known: dict[str, Any]
    """The data: key, bucket, shard, admission, statistics, weights, time of deletion, exports that contain it."""


def _entries(job: LoadedJob, status: Status) -> list[TableEntry]:
    if not status.part("tables").raw:  # it does not run, and its launcher left no status
        with suppress(MillraceError):
            status = tables.committed_status(job, newest(job))
    return [TableEntry(**finite(entry)) for entry in tables.entries_of(job, status)]


@router.get("/tables", **door(Role.VIEWER, *GONE), operation_id="listTables", summary="List a job's tables")
def list_tables(statuses: StatusesOf, job: JobName, paging: Paged) -> Page[TableEntry]:
    """A job's tables, with their rows by slot."""
    return page(_entries(as_begun(statuses.loaded(job)), statuses.of(job)), paging, lambda each: each.name)


@router.get("/tables/{table}", **door(Role.VIEWER, *GONE), operation_id="getTable", summary="Get a table")
def get_table(statuses: StatusesOf, job: JobName, table: TableName) -> TableEntry:
    """A table, with its rows by slot."""
    loaded = statuses.loaded(job)
    _check_table(loaded, table)
    return next(each for each in _entries(as_begun(loaded), statuses.of(job)) if each.name == table)


@router.post(
    "/tables/{table}/shrink", **begins(Role.OPERATOR), operation_id="shrinkTable", summary="Delete rows by a rule"
)
def shrink(
    host: HostOf,
    statuses: StatusesOf,
    caller: CallerOf,
    job: JobName,
    table: TableName,
    asked: Shrink,
    request: Request,
    response: Response,
) -> OperationEntry:
    """Delete the rows that meet a rule, or with `dry_run` only count them. Refused if they are too many."""
    note(request, table=table, **asked.model_dump())
    loaded = statuses.loaded(job)
    _check_table(loaded, table)
    rule = {"delete_below": asked.delete_below, "delete_after_days": asked.delete_after_days}

    def work(deadline: Deadline) -> dict[str, Any]:
        if asked.dry_run:
            return tables.dry_run(loaded, table, rule, deadline)
        [shrunk] = tables.shrink(loaded, [table], {**rule, "allow": asked.allow}, deadline)
        return asdict(shrunk)

    kind, words = ("shrink-dry-run", "counting rows") if asked.dry_run else ("shrink", "waiting for the next close")
    return begun(host, kind, job, caller, one_step(words, ACT_S, work), response)


@router.get(
    "/tables/{table}/explain",
    **door(Role.VIEWER, *GONE),
    operation_id="explainSign",
    summary="Explain a feature id",
)
def explain(
    request: Request,
    caller: CallerOf,
    statuses: StatusesOf,
    job: JobName,
    table: TableName,
    slot: Annotated[str, Query(max_length=128, description="A sparse slot of the table.")],
    sign: Annotated[str, Query(max_length=4096, description="A feature id, or the text that it is made from.")],
) -> Explanation:
    """Where its row is, why it has one or none, its values, when it is deleted, which exports contain it."""
    loaded = statuses.loaded(job)
    _check_table(loaded, table)
    explaining.sign_of(loaded.spec, slot, sign)
    with _one_of_few(sharer(caller, address_of(request))):
        known = finite(explaining.explain(loaded, slot, sign, Deadline.after(EXPLAIN_S)))
    if known["table"] != table:
        raise refused(HTTPStatus.NOT_FOUND, f"slot {slot!r} belongs to table {known['table']!r}")
    return Explanation(lines=list(explaining.format_explanation(known)), known=known)


@router.post("/forget", **begins(Role.OPERATOR), operation_id="forgetValue", summary="Delete the row of a value")
def forget(
    host: HostOf,
    statuses: StatusesOf,
    caller: CallerOf,
    job: JobName,
    asked: Forget,
    request: Request,
    response: Response,
) -> OperationEntry:
    """Delete one value's row, and after a commit its dead letters. The result lists what still contains the value."""
    note(request, slot=asked.slot)  # not the value, which must be forgotten
    loaded = statuses.loaded(job)
    explaining.sign_of(loaded.spec, asked.slot, asked.value)

    def work(deadline: Deadline) -> dict[str, Any]:
        return {"lines": list(explaining.forget(loaded, asked.slot, asked.value, deadline))}

    act = one_step("waiting for the next close and a commit", ACT_S, work)
    return begun(host, "forget", job, caller, act, response)


@router.post("/day-tick", **begins(Role.OPERATOR), operation_id="tickDay", summary="Begin the next day")
def day_tick(
    host: HostOf,
    statuses: StatusesOf,
    caller: CallerOf,
    job: JobName,
    request: Request,
    response: Response,
    asked: DayTick | None = None,
) -> OperationEntry:
    """Begin the next day of a running job whose events have no time."""
    to = None if asked is None else asked.to
    note(request, to=to)
    store = statuses.job(job).store

    def work(deadline: Deadline) -> dict[str, Any]:
        day, version = tables.begin_day(store, to, deadline)
        return {"day": day, "version": version}

    return begun(host, "day-tick", job, caller, one_step("waiting for the next close", ACT_S, work), response)


@contextmanager
def _one_of_few(who: str) -> Iterator[None]:
    """Take one of the places for explanations. It does not wait: a waiting request would block a thread."""
    if not _shares.take(who):
        raise NotYet(f"{MAX_EXPLAINING_EACH} explanations that you requested are running; retry")
    try:
        if not _explaining.acquire(blocking=False):
            raise NotYet(f"{MAX_EXPLAINING} explanations are running; retry")
        try:
            yield
        finally:
            _explaining.release()
    finally:
        _shares.give_back(who)


def _check_table(job: LoadedJob, table: str) -> None:
    if table not in job.spec.tables:
        raise refused(HTTPStatus.NOT_FOUND, f"there is no table {table!r}; known: {', '.join(job.spec.tables)}")
