"""What is in a job's tables, by slot: of a running job as its chief says, of another as its newest commit has it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dataset.schema import Schema
from millrace.deadline import Deadline
from millrace.job_client import JobClient
from service.begun import as_begun
from service.launcher.running import read_report
from service.operating.committed import newest
from service.spec import LoadedJob
from service.status import Status
from service.store import REPORT, in_use
from trainer.commits import Commit

COUNTS = ("bytes", "new_rows", "unadmitted", "dirty_rows")


def entries_of(job: LoadedJob, status: Status) -> list[dict[str, Any]]:
    """A mapping for each table: "name", "rows", COUNTS, "dim", "slots" (figures by slot), "held"."""
    slots = {slot.name: slot.sparse.table for slot in Schema.of(job.spec.slots).sparse}
    figures, held = status.parts("slots"), status.part("operations").part("shrinking").parts("held")
    told = status.parts("tables")
    rows = {slot: count for table in told.values() for slot, count in table.part("rows_by_slot").raw.items()}
    return [
        {
            "name": name,
            "rows": status.table_rows().get(name),
            **{key: told[name].number(key) if name in told else None for key in COUNTS},
            "dim": table.dim,
            "slots": {
                slot: {"rows": rows.get(slot), **(figures[slot].raw if slot in figures else {})}
                for slot, of in slots.items()
                if of == name
            },
            "held": dict(held[name].raw) if name in held else None,
        }
        for name, table in job.spec.tables.items()
    ]


def here(job: LoadedJob, deadline: Deadline) -> tuple[list[dict[str, Any]], str | None]:
    """The tables of a job whose store is on this machine; and the commit that says it, where the job does not run."""
    job = as_begun(job)
    if in_use(job.store):
        return entries_of(job, _status_of(job.store, deadline)), None
    commit = newest(job)
    return entries_of(job, committed_status(job, commit)), commit.name


def committed_status(job: LoadedJob, commit: Commit) -> Status:
    """What a commit says of tables, as a chief's status says it; memory and slots as the last report has them."""
    report = Status(read_report(job.store / REPORT))
    fresh = report if report.number("passes") == commit.version else Status({})
    slots = Schema.of(job.spec.slots).sparse
    told: dict[str, Any] = {}
    for name in job.spec.tables:
        parts = [part.tables[name] for part in commit.shards if name in part.tables]
        groups: dict[int, int] = {}
        for part in parts:
            for group, rows in part["rows_by_group"].items():
                groups[int(group)] = groups.get(int(group), 0) + rows
        by_slot = {slot.name: groups.get(slot.group, 0) for slot in slots if slot.sparse.table == name}
        size = fresh.parts("tables").get(name, Status({})).number("bytes")
        told[name] = {"rows": sum(part["rows"] for part in parts), "bytes": size, "rows_by_slot": by_slot}
    deciders: Mapping[str, Any] = commit.state.get("operations", {}).get("deciders", {})
    held = deciders.get("shrinking", {}).get("held", {})
    return Status({"tables": told, "slots": fresh.part("slots").raw, "operations": {"shrinking": {"held": held}}})


def begin_day(store: Path, to: int | None, deadline: Deadline) -> tuple[int, int]:
    """Have a running job begin the next day, or day `to`; return the day and the first version it holds for."""
    day = current_day(store, deadline) + 1 if to is None else to
    return day, JobClient(store).carry_out({"op": "day_tick", "to": day}, deadline)


def current_day(store: Path, deadline: Deadline) -> int:
    """The running job's day; 0 until a pass is closed."""
    return int(_status_of(store, deadline).number("day") or 0)


def _status_of(store: Path, deadline: Deadline) -> Status:
    return Status(JobClient(store).status(deadline))
