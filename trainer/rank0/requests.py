"""Requests of clients for operations, and their checks, but for exports. Pure.

A request is answered by trainer.rank0.operations, which logs the operation.
"""

from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from headrace.config import MAX_FLOAT32
from headrace.dataset.spec.schema import NUM_GROUPS
from headrace.errors import SpecError
from headrace.pserver.config import LAST_DAY, MAX_DAYS, TableSection
from headrace.pserver.protocol.table_operations import SLOT_CHANGES, ShrinkRows
from headrace.trainer.journal.records import (
    ActingOperation,
    DayTickOperation,
    ForgetOperation,
    ResizeOperation,
    SetOperation,
    SlotOperation,
)
from headrace.trainer.rank0.job_in_force import JobInForce
from headrace.trainer.rank0.shrink_guard import has_rule
from headrace.trainer.spec.changes import MOST_TRAINERS, SHARDS, TRAINERS, after_set, present_names
from headrace.trainer.spec.join_tables import windows_of
from headrace.validation import no_such

Request = Mapping[str, Any]
"""A client's request for an operation: JSON-able, with "op" and an "id" of its own."""

ONLY_PREDICTS = "is false: the job only predicts, and its model stays as it is; set it to true first"
"""The answer to a request that would age or remove rows."""
MAX_FORGOTTEN = 4096
"""Most other rows of one request to forget: 80 KiB of the log."""
ALSO = "also"
"""The key of the other rows, which operations that acted are remembered without."""
MAX_WORKERS = 64
"""Most workers of each role."""


def set_requested(request: Request, job: JobInForce, waiting: Iterable[ActingOperation]) -> SetOperation:
    """{"keys"}: new values by key; those that wait to act come first."""
    keys = present_names(request.get("keys") or {})
    before = [present_names(each.keys) for each in waiting if isinstance(each, SetOperation)]
    after_set(job.job, {**job.overrides, **dict(ChainMap(*reversed(before)))}, keys)
    return SetOperation(id=request["id"], keys=keys)


def resize_requested(request: Request, job: JobInForce, waiting: Iterable[ActingOperation] = ()) -> ResizeOperation:
    """{"shards", "trainers", "joined"}: what is not given stays. One trainer may hold the rows itself.

    An elastic number of trainers is lowered at once, and rises as workers join: `joined` is such a rise, of the
    launcher. A person's number is a new upper bound.
    """
    now, shards, trainers = job.workers or {}, request.get("shards"), request.get("trainers")
    if shards is None and trainers is None:
        raise SpecError("nothing is resized: give a number of shards, of trainers, or both")
    world = _number_of(TRAINERS, now.get(TRAINERS) if trainers is None else trainers, 1)
    job.now.dense.check_trainers(world)
    least = int(world > 1)
    num_shards = max(now.get(SHARDS, 0), least) if shards is None else _number_of(SHARDS, shards, least)
    if job.now.train.rows == "device":
        raise SpecError("rows on devices do not move while a job runs: stop it, and change the job file", "train.rows")
    keys = {SHARDS: num_shards, TRAINERS: world}
    if job.elastic is not None and trainers is not None:
        fewest, most = job.elastic
        if not fewest <= world <= most:
            raise SpecError(f"{world} is not in the range of the job file, {fewest} to {most}", TRAINERS)
        if not request.get("joined"):
            keys |= {TRAINERS: min(world, now.get(TRAINERS, world)), MOST_TRAINERS: world}
    return ResizeOperation(id=request["id"], keys=keys)


def day_tick_requested(request: Request, job: JobInForce, waiting: Iterable[ActingOperation]) -> DayTickOperation:
    """{"to"}: the day to begin."""
    to, most = request.get("to"), job.day + job.job.passes.max_day_jump
    if not job.job.train.learn:
        raise SpecError(ONLY_PREDICTS, "train.learn")
    if job.timed:
        raise SpecError("the job's days follow its event time; a day tick is for jobs without event time")
    if not isinstance(to, int) or isinstance(to, bool) or not 0 <= to <= LAST_DAY:
        raise SpecError(f"{to!r} is not a day: days are numbers from 0 to {LAST_DAY:,}")
    if to > most:
        raise SpecError(f"is day {job.day} and would be {to}; at most {most} at once", "passes.max_day_jump")
    return DayTickOperation(id=request["id"], to=to)


def forget_requested(request: Request, job: JobInForce, waiting: Iterable[ActingOperation]) -> ForgetOperation:
    """{"slot", "sign", "also"}: a value, and other rows in which it takes part."""
    slot, key = job.key_of(request.get("slot"), request.get("sign"))
    also, table = _rows_of(request.get(ALSO), {*job.aging_tables, *windows_of(job.job.join)}), slot.sparse.table
    return ForgetOperation(id=request["id"], slot=slot.name, table=table, group=slot.group, key=key, also=also)


def shrink_requested(request: Request, tables: Mapping[str, TableSection]) -> ShrinkRows:
    """{"table", "delete_below", "delete_after_days"}: for the decider of shrinks, which counts the rows first."""
    name = request.get("table")
    if not isinstance(name, str) or name not in tables:
        raise SpecError(no_such("table", name, tables))
    below, days = request.get("delete_below"), request.get("delete_after_days")
    if below is not None and not _is_score(below):
        raise SpecError(f"delete_below is {below!r}: a score is a finite number from 0 to {MAX_FLOAT32}")
    if days is not None and (not isinstance(days, int) or isinstance(days, bool) or not 0 <= days <= MAX_DAYS):
        raise SpecError(f"delete_after_days is {days!r}: days are from 0 to {MAX_DAYS:,}")
    if below is None and days is None and not has_rule(tables[name]):
        raise SpecError(
            f"table {name!r} has no rule to remove rows: give --delete-below or --delete-after-days, or set "
            f"tables.{name}.delete_below or .delete_after_days"
        )
    return ShrinkRows(table=name, delete_below=None if below is None else float(below), delete_after_days=days)


def slot_requested(request: Request, job: JobInForce, waiting: Iterable[ActingOperation]) -> SlotOperation:
    """{"slot"}, for a change of all its rows."""
    slot, [change] = job.sparse_slot(request.get("slot")), [each for each in SLOT_CHANGES if each.name == request["op"]]
    if not job.job.train.learn:
        raise SpecError(ONLY_PREDICTS, "train.learn")
    return SlotOperation(id=request["id"], change=change(slot=slot.name, table=slot.sparse.table, group=slot.group))


CHECKS: Mapping[str, Callable[[Request, JobInForce, Iterable[ActingOperation]], ActingOperation]] = {
    SetOperation.op: set_requested,
    ResizeOperation.op: resize_requested,
    DayTickOperation.op: day_tick_requested,
    ForgetOperation.op: forget_requested,
    **{each.name: slot_requested for each in SLOT_CHANGES},
}
"""By "op": makes the operation of a request. Raises SpecError for one that cannot be granted."""


def operation_of(request: Request, job: JobInForce, waiting: Iterable[ActingOperation]) -> ActingOperation:
    """The operation of a request that no decider took; those `waiting` act before it. Raises SpecError."""
    check = CHECKS.get(str(request.get("op")))
    if check is None:
        raise SpecError(f"{request.get('op')!r} is not an operation that a client may request")
    return check(request, job, waiting)


def _rows_of(rows: object, known: set[str]) -> list[dict[str, Any]] | None:
    """Other rows that a request forgets, as ForgetOperation has them; None without any."""
    if rows is None:
        return None
    if not isinstance(rows, list) or not all(isinstance(each, Mapping) for each in rows):
        raise SpecError("is not a list of rows: {table, group, keys} each", ALSO)
    found = [(each.get("table"), each.get("group"), each.get("keys")) for each in rows]
    for table, group, keys in found:
        if table not in known:
            raise SpecError(no_such("table", table, known), ALSO)
        if not _is_number(group, NUM_GROUPS) or not isinstance(keys, list) or not _are_keys(keys):
            raise SpecError(f"rows of table {table!r} need a slot group, and a list of keys of 64 bits", ALSO)
    if (num_keys := sum(len(keys) for _, _, keys in found)) > MAX_FORGOTTEN:
        raise SpecError(f"{num_keys:,} rows are too many for one request: at most {MAX_FORGOTTEN:,}", ALSO)
    return [{"table": table, "group": group, "keys": keys} for table, group, keys in found]


def _number_of(key: str, number: object, least: int) -> int:
    """A number of workers. Raises SpecError."""
    if not isinstance(number, int) or isinstance(number, bool) or not least <= number <= MAX_WORKERS:
        why = "; the rows live in the trainer only where there is one" if key == SHARDS and least else ""
        raise SpecError(f"{number!r} is not a number from {least} to {MAX_WORKERS}{why}", key)
    return number


def _is_number(value: object, end: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < end


def _are_keys(values: Sequence[object]) -> bool:
    return all(_is_number(value, 1 << 64) for value in values)


def _is_score(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_FLOAT32
