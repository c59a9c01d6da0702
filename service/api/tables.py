"""/v1/jobs/{job}/tables, /forget, /day-tick: a running job's rows. The work is in service.tables."""

import inspect
from contextlib import suppress
from dataclasses import asdict
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi import Path as InPath
from pydantic import Field

from headrace.config import NotNegative
from headrace.dataset.spec.schema import Schema
from headrace.deadline import Deadline
from headrace.errors import HeadraceError
from headrace.pserver.config import LAST_DAY, Days
from headrace.pserver.protocol.table_operations import SLOT_CHANGES, SlotChange
from headrace.rpc.job_client import JobClient
from headrace.service.api.actions import ActionCall, action
from headrace.service.api.authorization import AuthorizedRoute, CallerOf, authorized
from headrace.service.api.forms import Form, FormField, Group, trains
from headrace.service.api.job_cache import StatusesOf
from headrace.service.api.problems import http_error
from headrace.service.api.read_places import one_of_few
from headrace.service.api.schemas import JobName, Number, Page, Paged, RequestBody, ResponseBody, finite, page, shown_by
from headrace.service.auth.guard import address_of
from headrace.service.auth.limits import share_key
from headrace.service.auth.roles import Role
from headrace.service.cluster.store_defaults import with_store_defaults
from headrace.service.jobs.operation_queue import Operation
from headrace.service.spec.job import LoadedJob
from headrace.service.tables import forget as forgetting
from headrace.service.tables import row, table_requests
from headrace.service.tables.committed_tables import newest
from headrace.trainer.job_status import Status
from headrace.validation import no_such

router = APIRouter(prefix="/v1/jobs/{job}", tags=["tables"], route_class=AuthorizedRoute)

ACT_S = 600.0
"""How long an operation waits until it has taken effect."""
EXPLAIN_S = 20.0
TableName = Annotated[str, InPath(description="A table's name.", max_length=128)]
SlotName = Annotated[str, InPath(description="A sparse slot.", max_length=128)]
GONE = (HTTPStatus.NOT_FOUND,)


class TableEntry(ResponseBody):
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
    frozen: list[str]
    """Slots whose rows do not learn, until they are unfrozen."""
    slots: dict[str, dict[str, Any]]
    """By slot: its `rows`, which slots of one `share` have in common; `bytes`, its share of the table's memory by
    rows; and statistics of its values over the job's life. With `guards`, also the `drift` of the newest pass."""
    held: dict[str, Any] | None
    """A shrink that would delete too many rows and waits for an operator, or null."""


class ShrinkRequest(RequestBody):
    """Rows to delete: by the table's own rule, unless another is given."""

    model_config = shown_by({"delete_after_days": 30, "dry_run": True})

    delete_below: NotNegative | None = None
    """Delete rows whose score is lower."""
    delete_after_days: Days | None = None
    """Delete rows that were not seen for more days."""
    dry_run: bool = False
    """Only count the rows, by slot and reason."""
    allow: bool = False
    """Delete also more than `max_shrink_fraction` of the rows."""


class ForgetRequest(RequestBody):
    """A feature value whose row is to be deleted."""

    model_config = shown_by({"slot": "user", "value": "17"})

    slot: str = Field(max_length=128)
    value: str = Field(max_length=4096)
    """A feature id, or the text that it is made from."""
    everywhere: bool = False
    """True: also delete all other rows in which the value takes part: crosses, histories, counters, waiting samples."""


class DayTickRequest(RequestBody):
    """The day to begin."""

    model_config = shown_by({"to": 8})

    to: int | None = Field(default=None, ge=0, le=LAST_DAY)
    """Default: the next day."""


class Explanation(ResponseBody):
    """Everything that a job knows of one feature id; by its newest commit if the job does not run."""

    lines: list[str]
    """The explanation as text."""
    known: dict[str, Any]
    """The data: key, bucket, shard, admission, statistics, weights, time of deletion, exports that contain it."""


def _entries(job: LoadedJob, status: Status) -> list[TableEntry]:
    if not status.tables:  # it does not run, and its launcher left no status
        with suppress(HeadraceError):
            status = table_requests.committed_status(job, newest(job))
    return [TableEntry(**finite(entry)) for entry in table_requests.entries_of(job, status)]


@router.get("/tables", **authorized(Role.VIEWER, *GONE), operation_id="listTables", summary="List a job's tables")
def list_tables(statuses: StatusesOf, job: JobName, paging: Paged) -> Page[TableEntry]:
    """A job's tables, with their rows by slot."""
    return page(_entries(with_store_defaults(statuses.loaded(job)), statuses.of(job)), paging, lambda each: each.name)


@router.get("/tables/{table}", **authorized(Role.VIEWER, *GONE), operation_id="getTable", summary="Get a table")
def get_table(statuses: StatusesOf, job: JobName, table: TableName) -> TableEntry:
    """A table, with its rows by slot."""
    loaded = statuses.loaded(job)
    _check_table(loaded, table)
    return next(each for each in _entries(with_store_defaults(loaded), statuses.of(job)) if each.name == table)


@action(
    router,
    "/tables/{table}/shrink",
    id="shrinkTable",
    summary="Delete rows by a rule",
    form=Form(
        Group.ROWS,
        "Delete old rows",
        "Rows that meet the table's own rule, or the rule given here, are deleted. A dry run only counts them, "
        "by slot. Only a rewind brings deleted rows back.",
        trains,
        (
            FormField("table", "Table", choices=lambda known: list(known.spec.get("tables", {}))),
            FormField("delete_below", "Rows with a score below (default: the table's rule)"),
            FormField("delete_after_days", "Rows that were not seen for more days than"),
            FormField("dry_run", "Dry run: only count", default=True),
            FormField("allow", "Allow more than max_shrink_fraction"),
        ),
        grave=True,
    ),
)
def shrink(call: ActionCall, table: TableName, asked: ShrinkRequest) -> Operation:
    """Delete the rows that meet a rule, or with `dry_run` only count them. Refused if they are too many."""
    job = call.loaded
    _check_table(job, table)
    rule = {"delete_below": asked.delete_below, "delete_after_days": asked.delete_after_days}

    def work(deadline: Deadline) -> dict[str, Any]:
        if asked.dry_run:
            return table_requests.dry_run(job, table, rule, deadline)
        [shrunk] = table_requests.shrink(job, [table], {**rule, "allow": asked.allow}, deadline)
        return asdict(shrunk)

    kind, words = ("shrink-dry-run", "counting rows") if asked.dry_run else ("shrink", "waiting for the next close")
    return call.start(kind, words, ACT_S, work)


@router.get(
    "/tables/{table}/explain",
    **authorized(Role.VIEWER, *GONE),
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
    row.sign_of(loaded.spec, slot, sign)
    with one_of_few(share_key(caller, address_of(request))):
        known = finite(row.explain(loaded, slot, sign, Deadline.after(EXPLAIN_S)))
    if known["table"] != table:
        raise http_error(HTTPStatus.NOT_FOUND, f"slot {slot!r} belongs to table {known['table']!r}")
    return Explanation(lines=list(row.format_explanation(known)), known=known)


class RankedRowEntry(ResponseBody):
    """A row by its shows."""

    slot: str | None
    """The first slot that has such rows; null for rows of a slot that is gone."""
    sign: str
    """Its feature id."""
    show: Number
    """Shows now: they decay."""
    click: Number
    unseen_days: int
    """Days since it was seen."""


class UnseenRows(ResponseBody):
    """Rows by the days since they were seen."""

    from_days: int
    """The least days; the next entry begins with more."""
    rows: int


class RowRanking(ResponseBody):
    """The rows of a table with most shows, and how long ago its rows were seen."""

    rows: list[RankedRowEntry]
    """Most shows first."""
    unseen: list[UnseenRows]
    scanned: int
    """Rows that were looked at: of very many, those in memory first."""
    total: int
    """All rows of the table."""
    commit: str | None = None
    """The commit that was read, if the job does not run."""


@router.get(
    "/tables/{table}/ranking",
    **authorized(Role.VIEWER, *GONE),
    operation_id="rankRows",
    summary="Rank the rows of a table by shows",
)
def rank_rows(request: Request, caller: CallerOf, statuses: StatusesOf, job: JobName, table: TableName) -> RowRanking:
    """The rows with most shows, and how long ago rows were seen; by its newest commit if the job does not run."""
    loaded = statuses.loaded(job)
    _check_table(loaded, table)
    with one_of_few(share_key(caller, address_of(request))):
        return RowRanking(**finite(row.ranking(loaded, table, Deadline.after(EXPLAIN_S))))


@action(
    router,
    "/forget",
    id="forgetValue",
    summary="Delete the row of a value",
    audited=("slot", "everywhere"),  # not the value, which must be forgotten
    form=Form(
        Group.ROWS,
        "Delete a value",
        "The row of one value of a slot is deleted, and after a commit its dead letters. The result lists what still "
        "contains the value.",
        trains,
        (
            FormField("slot", "Slot"),
            FormField("value", "Value: a feature id, or its text"),
            FormField("everywhere", "Also delete what was made of it: crosses, histories, counters, waiting samples"),
        ),
        grave=True,
    ),
)
def forget(call: ActionCall, asked: ForgetRequest) -> Operation:
    """Delete one value's row, and after a commit its dead letters. The result lists what still contains the value."""
    job = call.loaded
    row.sign_of(job.spec, asked.slot, asked.value)

    def work(deadline: Deadline) -> dict[str, Any]:
        return {"lines": list(forgetting.forget(job, asked.slot, asked.value, deadline, everywhere=asked.everywhere))}

    return call.start("forget", "waiting for the next close and a commit", ACT_S, work)


@action(
    router,
    "/day-tick",
    id="tickDay",
    summary="Begin the next day",
    form=Form(
        Group.ROWS,
        "Begin the next day",
        "The next day begins for a job whose events have no time: scores decay, and the daily shrink of the "
        "tables runs.",
        trains,
        (FormField("to", "Day (default: the next)"),),
    ),
)
def day_tick(call: ActionCall, asked: DayTickRequest | None = None) -> Operation:
    """Begin the next day of a running job whose events have no time."""
    store = call.job.store

    def work(deadline: Deadline) -> dict[str, Any]:
        day, version = table_requests.begin_day(store, None if asked is None else asked.to, deadline)
        return {"day": day, "version": version}

    return call.start("day-tick", "waiting for the next close", ACT_S, work)


def _add_slot_action(change: type[SlotChange]) -> None:
    """The action for a change of all rows of a slot."""
    summary, _, effect = inspect.cleandoc(change.__doc__ or "").partition("\n\n")

    def act(call: ActionCall, slot: SlotName) -> Operation:
        store, request = call.job.store, {"op": change.name, "slot": slot}
        names = [each.name for each in Schema.of(call.loaded.spec.slots).sparse]
        if slot not in names:
            raise http_error(HTTPStatus.NOT_FOUND, no_such("sparse slot", slot, names))

        def work(deadline: Deadline) -> dict[str, Any]:
            return {"slot": slot, "version": JobClient(store).carry_out(request, deadline)}

        return call.start(change.name, "waiting for the next close", ACT_S, work)

    act.__name__, act.__doc__ = change.name, change.__doc__
    path, id_, words = f"/slots/{{slot}}/{change.name}", f"{change.name}Slot", " ".join(effect.split())
    fields = (FormField("slot", "Slot"),)
    form = Form(
        Group.ROWS, f"{change.name.capitalize()} slot", f"{summary} {words}", trains, fields, grave=change.deletes
    )
    action(router, path, id=id_, summary=summary.rstrip("."), form=form)(act)


for _change in SLOT_CHANGES:
    _add_slot_action(_change)


def _check_table(job: LoadedJob, table: str) -> None:
    if table not in job.spec.tables:
        raise http_error(HTTPStatus.NOT_FOUND, no_such("table", table, job.spec.tables))
