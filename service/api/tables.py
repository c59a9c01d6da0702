"""/v1/jobs/{job}/tables, /forget, /day-tick: a running job's rows. The work is service.operating's."""

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
from service.api.operations import OperationEntry, begins, begun, said
from service.api.problems import refused
from service.api.statuses import StatusesOf
from service.begun import as_begun
from service.operating import explaining, tables
from service.operating.committed import newest
from service.spec import LoadedJob
from service.status import Number, Status

router = APIRouter(prefix="/v1/jobs/{job}", tags=["tables"], route_class=Door)

ACT_S = 600.0
"""How long an operation waits until it has acted."""
EXPLAIN_S = 20.0
MAX_EXPLAINING, MAX_EXPLAINING_EACH = 4, 2
"""Explanations at a time, in all and of one caller: each asks shards, and may fetch from an object store."""
TableName = Annotated[str, InPath(description="A table's name.", max_length=128)]
GONE = (HTTPStatus.NOT_FOUND,)
_explaining, _shares = threading.BoundedSemaphore(MAX_EXPLAINING), Shares(MAX_EXPLAINING_EACH)


class TableEntry(Described):
    """A table of rows."""

    name: str
    rows: Number | None
    bytes: Number | None
    """In memory, over all shards."""
    new_rows: Number | None
    """Made in the newest pass."""
    unadmitted: Number | None
    """Records of keys that were not admitted, in the newest pass."""
    dirty_rows: Number | None
    """Rows changed since the newest commit, of the fullest shard: they cannot leave memory."""
    dim: int
    """Length of a row's vector."""
    slots: dict[str, dict[str, Any]]
    """By slot: its `rows`, which slots of one `share` have together, and what was seen of its values over the job's
    life."""
    held: dict[str, Any] | None
    """A shrink that would take too many rows and waits for an operator, or null."""


class Shrink(Asked):
    """Rows that are to go: by the table's own rule, unless another is given."""

    delete_below: NotNegative | None = None
    """Those whose score is below."""
    delete_after_days: Days | None = None
    """Those that were not seen for longer."""
    dry_run: bool = False
    """Only count what would go, by slot, and why."""
    allow: bool = False
    """Also where it is more than `max_shrink_fraction`."""


class Forget(Asked):
    """A value whose row is to go."""

    slot: str = Field(max_length=128)
    value: str = Field(max_length=4096)
    """A sign, or the text of one."""


class DayTick(Asked):
    """The day that is to begin."""

    to: int | None = Field(default=None, ge=0, le=LAST_DAY)
    """Unless given, the next."""


class Explanation(Described):
    """All that a job knows of one sign; where it does not run, by its newest commit."""

    lines: list[str]
    """In words."""
    known: dict[str, Any]
    """As data: key, bucket, shard, admission, statistics, weights, when it goes, which exports hold it."""


def _entries(job: LoadedJob, status: Status) -> list[TableEntry]:
    if not status.part("tables").raw:  # it does not run, and its launcher left nothing to read
        with suppress(MillraceError):
            status = tables.committed_status(job, newest(job))
    return [TableEntry(**finite(entry)) for entry in tables.entries_of(job, status)]


@router.get("/tables", **door(Role.VIEWER, *GONE), operation_id="listTables", summary="List a job's tables")
def list_tables(statuses: StatusesOf, job: JobName, paging: Paged) -> Page[TableEntry]:
    """A job's tables, with what is in them, by slot."""
    return page(_entries(as_begun(statuses.loaded(job)), statuses.of(job)), paging, lambda each: each.name)


@router.get("/tables/{table}", **door(Role.VIEWER, *GONE), operation_id="getTable", summary="What is in a table")
def get_table(statuses: StatusesOf, job: JobName, table: TableName) -> TableEntry:
    """What is in a table, by slot."""
    loaded = statuses.loaded(job)
    _check_table(loaded, table)
    return next(each for each in _entries(as_begun(loaded), statuses.of(job)) if each.name == table)


@router.post("/tables/{table}/shrink", **begins(Role.OPERATOR), operation_id="shrinkTable", summary="Have rows go")
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
    """Have rows go that meet a rule, or with `dry_run` only count them; refused where they are too many."""
    note(request, table=table, **asked.model_dump())
    loaded = statuses.loaded(job)
    _check_table(loaded, table)
    rule = {"delete_below": asked.delete_below, "delete_after_days": asked.delete_after_days}

    def work(deadline: Deadline) -> dict[str, Any]:
        if asked.dry_run:
            return tables.dry_run(loaded, table, rule, deadline)
        [shrunk] = tables.shrink(loaded, [table], {**rule, "allow": asked.allow}, deadline)
        return asdict(shrunk)

    kind, words = ("shrink-dry-run", "rows are being counted") if asked.dry_run else ("shrink", "until a pass closes")
    return begun(host, kind, job, caller, said(words, ACT_S, work), response)


@router.get(
    "/tables/{table}/explain",
    **door(Role.VIEWER, *GONE),
    operation_id="explainSign",
    summary="What is known of a sign",
)
def explain(
    request: Request,
    caller: CallerOf,
    statuses: StatusesOf,
    job: JobName,
    table: TableName,
    slot: Annotated[str, Query(max_length=128, description="A sparse slot of the table.")],
    sign: Annotated[str, Query(max_length=4096, description="A sign, or the text of one.")],
) -> Explanation:
    """Where its row is, why it has one or none, what it holds, when it goes, which exports hold it."""
    loaded = statuses.loaded(job)
    _check_table(loaded, table)
    explaining.sign_of(loaded.spec, slot, sign)
    with _one_of_few(sharer(caller, address_of(request))):
        known = finite(explaining.explain(loaded, slot, sign, Deadline.after(EXPLAIN_S)))
    if known["table"] != table:
        raise refused(HTTPStatus.NOT_FOUND, f"slot {slot!r} is of table {known['table']!r}")
    return Explanation(lines=list(explaining.format_explanation(known)), known=known)


@router.post("/forget", **begins(Role.OPERATOR), operation_id="forgetValue", summary="Have a value's row go")
def forget(
    host: HostOf,
    statuses: StatusesOf,
    caller: CallerOf,
    job: JobName,
    asked: Forget,
    request: Request,
    response: Response,
) -> OperationEntry:
    """Have one value's row go, and, after a commit, dead letters that hold it; the result says what holds it still."""
    note(request, slot=asked.slot)  # not the value: it is to be forgotten
    loaded = statuses.loaded(job)
    explaining.sign_of(loaded.spec, asked.slot, asked.value)

    def work(deadline: Deadline) -> dict[str, Any]:
        return {"lines": list(explaining.forget(loaded, asked.slot, asked.value, deadline))}

    act = said("until a pass closes, and a commit is made", ACT_S, work)
    return begun(host, "forget", job, caller, act, response)


@router.post("/day-tick", **begins(Role.OPERATOR), operation_id="tickDay", summary="Have the next day begin")
def day_tick(
    host: HostOf,
    statuses: StatusesOf,
    caller: CallerOf,
    job: JobName,
    request: Request,
    response: Response,
    asked: DayTick | None = None,
) -> OperationEntry:
    """Have the next day begin for a running job whose events have no time."""
    to = None if asked is None else asked.to
    note(request, to=to)
    store = statuses.job(job).store

    def work(deadline: Deadline) -> dict[str, Any]:
        day, version = tables.begin_day(store, to, deadline)
        return {"day": day, "version": version}

    return begun(host, "day-tick", job, caller, said("until a pass closes", ACT_S, work), response)


@contextmanager
def _one_of_few(who: str) -> Iterator[None]:
    """Room for one more explanation. Nobody waits for it: who waits keeps a thread from all others."""
    if not _shares.take(who):
        raise NotYet(f"{MAX_EXPLAINING_EACH} explanations that you asked for are being looked up; ask again")
    try:
        if not _explaining.acquire(blocking=False):
            raise NotYet(f"{MAX_EXPLAINING} explanations are being looked up; ask again")
        try:
            yield
        finally:
            _explaining.release()
    finally:
        _shares.give_back(who)


def _check_table(job: LoadedJob, table: str) -> None:
    if table not in job.spec.tables:
        raise refused(HTTPStatus.NOT_FOUND, f"there is no table {table!r}; there are: {', '.join(job.spec.tables)}")
