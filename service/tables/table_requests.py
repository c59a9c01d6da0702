"""The tables of a job: list them, shrink them, begin the next day.

A running job's rank 0 decides and counts. For a job that does not run, the newest commit is read, and a shrink waits in
the log for the next run (service.tables.committed_tables).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.codec import plain
from headrace.dataset.spec.schema import Schema
from headrace.deadline import Deadline
from headrace.errors import SpecError
from headrace.pserver.config import TableSection
from headrace.rpc.job_client import JobClient
from headrace.service.cluster.job_run import read_report
from headrace.service.cluster.store import REPORT, in_use
from headrace.service.cluster.store_defaults import with_store_defaults
from headrace.service.monitor.lines import count
from headrace.service.spec.job import JobFile, LoadedJob
from headrace.service.tables import committed_tables
from headrace.trainer.checkpoint.commits import Commit
from headrace.trainer.job_status import GuardsStatus, OperationsStatus, ShrinkingStatus, Status, TableStatus, read
from headrace.trainer.rank0.shrink_guard import has_rule
from headrace.trainer.run_report import RunReport
from headrace.trainer.spec.history_tables import history_tables
from headrace.trainer.spec.join_tables import join_tables
from headrace.validation import no_such

Rule = Mapping[str, Any]


# List


def _filled_tables(spec: JobFile) -> dict[str, TableSection]:
    """The tables that the job fills itself: histories, and what waits for a join."""
    return {**history_tables(Schema.of(spec.slots)), **join_tables(spec.join)}


def entries_of(job: LoadedJob, status: Status) -> list[dict[str, Any]]:
    """Of each table: its figures, null where they are not known, "frozen", slots whose rows do not learn, "slots"
    (figures by slot), and "held", the shrink that waits. Histories, joins are last.
    """
    slots = {slot.name: slot.sparse.table for slot in Schema.of(job.spec.slots).sparse}
    held, guarded = status.operations.shrinking.held, status.operations.guards.slots
    rows = {slot: count for table in status.tables.values() for slot, count in table.rows_by_slot.items()}
    entries = []
    for name, table in {**job.spec.tables, **_filled_tables(job.spec)}.items():
        reported = status.tables.get(name, TableStatus())
        entries.append(
            {
                "name": name,
                "rows": reported.rows,
                "bytes": reported.bytes,
                "new_rows": reported.new_rows,
                "unadmitted": reported.unadmitted,
                "dirty_rows": reported.dirty_rows,
                "dim": table.dim,
                "frozen": reported.frozen,
                "slots": {
                    slot: {
                        "rows": rows.get(slot),
                        "bytes": reported.bytes_by_slot.get(slot),
                        **status.slots.get(slot, {}),
                        **({"drift": guarded[slot].get("drift")} if slot in guarded else {}),
                    }
                    for slot, table_of in slots.items()
                    if table_of == name
                },
                "held": plain(held[name]) if name in held else None,
            }
        )
    return entries


def local_tables(job: LoadedJob, deadline: Deadline) -> tuple[list[dict[str, Any]], str | None]:
    """The tables of a job whose store is on this machine; and the commit that was read, if the job does not run."""
    job = with_store_defaults(job)
    if in_use(job.store):
        return entries_of(job, _status_of(job.store, deadline)), None
    commit = committed_tables.newest(job)
    return entries_of(job, committed_status(job, commit)), commit.name


def committed_status(job: LoadedJob, commit: Commit) -> Status:
    """The tables of a commit, in the form of rank 0's status; memory and slot figures come from the last report."""
    report = read(RunReport, read_report(job.store / REPORT))
    fresh = report if report.passes == commit.version else RunReport()
    schema = Schema.of(job.spec.slots)
    slots, tables = schema.sparse, dict[str, TableStatus]()
    for name in (*job.spec.tables, *_filled_tables(job.spec)):
        parts = [part.tables[name] for part in commit.shards if name in part.tables]
        groups: dict[int, int] = {}
        for part in parts:
            for group, rows in part.rows_by_group.items():
                groups[group] = groups.get(group, 0) + rows
        by_slot = {slot.name: groups.get(slot.group, 0) for slot in slots if slot.sparse.table == name}
        size = fresh.tables[name].bytes if name in fresh.tables else None
        frozen = {group for part in parts if part.life is not None for group in part.life.frozen_groups}
        tables[name] = TableStatus(
            rows=sum(part.rows for part in parts),
            bytes=size,
            rows_by_slot=by_slot,
            frozen=[slot.name for slot in slots if slot.sparse.table == name and slot.group in frozen],
        )
    deciders: Mapping[str, Any] = commit.state.get("operations", {}).get("deciders", {})
    operations = OperationsStatus(
        shrinking=read(ShrinkingStatus, {"held": deciders.get("shrinking", {}).get("held", {})}),
        guards=read(GuardsStatus, {"slots": deciders.get("guards", {}).get("figures", {})}),
    )
    return Status(tables=tables, slots=fresh.slots, operations=operations)


# Shrink


def tables_with_rules(job: LoadedJob, deadline: Deadline) -> Mapping[str, bool]:
    """The job's tables, and whether each has a rule that deletes rows."""
    if in_use(job.store):
        return JobClient(job.store).answer({"do": "tables"}, deadline)
    tables = committed_tables.tables_in_force(job, committed_tables.newest(job))
    return {name: has_rule(table) for name, table in tables.items()}


def choose_tables(tables: Mapping[str, bool], name: str | None, *, ruled: bool) -> Sequence[str]:
    """The table called `name`; else all tables if a rule is given (`ruled`), or those with a rule of their own."""
    if name is not None:
        if name not in tables:
            raise SpecError(no_such("table", name, tables))
        return [name]
    found = [each for each, has_rule in tables.items() if ruled or has_rule]
    if not found:
        raise SpecError("no table has a rule that deletes rows; give --delete-below or --delete-after-days")
    return found


@dataclass(frozen=True)
class ShrinkReport:
    """A table that was shrunk."""

    table: str
    version: int | None
    """The first version without the rows; None: they are deleted at the first close of the next run."""
    going: int
    """Rows that met the rule when they were counted."""
    rows: int
    """All rows at that time."""

    def __str__(self) -> str:
        going = f"{count(self.going)} of {count(self.rows)} rows met the rule when they were counted"
        if self.version is None:
            return f"the job does not run; a shrink of table {self.table} is logged for the next run; {going}"
        return f"table {self.table} is shrunk from version {self.version} on; {going}"


def shrink(job: LoadedJob, tables: Sequence[str], rule: Rule, deadline: Deadline) -> Iterator[ShrinkReport]:
    """Shrink the tables one after another. `rule` may hold "allow". Raises HeadraceError at the first refusal."""
    for table in tables:
        version = None
        if in_use(job.store):
            found = dry_run(job, table, rule, deadline)
            version = JobClient(job.store).carry_out({"op": "shrink", "table": table, **rule}, deadline)
        else:
            found = committed_tables.log_shrink(job, table, rule, deadline)
        yield ShrinkReport(table, version, int(found["going"]), int(found["rows"]))


def dry_run(job: LoadedJob, table: str, rule: Rule, deadline: Deadline) -> dict[str, Any]:
    """The rows that a shrink of the table would delete now."""
    request = {"table": table, **rule}
    if in_use(job.store):
        return JobClient(job.store).answer({"do": "dry_run", "operation": request}, deadline)
    with committed_tables.open_table(job, table, deadline) as rows:
        return rows.dry_run(request, deadline)


def format_dry_run(answer: Mapping[str, Any]) -> list[str]:
    """A dry run as lines: one for the table, then one for each slot that would lose rows."""
    too_many = answer["fraction"] > answer["max_fraction"]
    limit = f"max_shrink_fraction = {answer['max_fraction']:.1%}"
    note = f"more than {limit}: needs --allow" if too_many else f"within {limit}"
    lines = [
        f"table {answer['table']}: {count(answer['going'])} of {count(answer['rows'])} rows would be deleted "
        f"({answer['fraction']:.1%}; {note})"
    ]
    if "commit" in answer:
        lines.append(f"  the job does not run; counted in its newest commit, {answer['commit']}")
    below, unseen = answer["below"], answer["unseen"]
    slots = [*below, *(slot for slot in unseen if slot not in below)]
    if slots:
        width = max(4, *map(len, slots))
        lines.append(f"  {'slot':<{width}}  {'score below':>12}  {'unseen':>12}")
        lines += [
            f"  {slot:<{width}}  {count(below.get(slot, 0)):>12}  {count(unseen.get(slot, 0)):>12}" for slot in slots
        ]
    return lines


# Begin a day


def begin_day(store: Path, to: int | None, deadline: Deadline) -> tuple[int, int]:
    """Have a running job begin the next day, or day `to`; return the day and the first version it holds for."""
    day = current_day(store, deadline) + 1 if to is None else to
    return day, JobClient(store).carry_out({"op": "day_tick", "to": day}, deadline)


def current_day(store: Path, deadline: Deadline) -> int:
    """The running job's day; 0 until a pass is closed."""
    return _status_of(store, deadline).day or 0


def _status_of(store: Path, deadline: Deadline) -> Status:
    return read(Status, JobClient(store).status(deadline))
