"""`millrace shrink`: which tables, what would go, and that it goes. Deciding and counting are the chief's.

Of a job that does not run, rows are counted in its newest commit, and a shrink waits in the log for the next run
(service.operating.committed).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.deadline import Deadline
from millrace.errors import SpecError
from millrace.job_client import JobClient
from millrace.mistakes import nearest
from millrace.printable import say
from service.lines import count
from service.operating import committed
from service.spec import LoadedJob
from service.store import in_use
from trainer.shrink_guard import has_rule

Rule = Mapping[str, Any]


def tables_of(job: LoadedJob, deadline: Deadline) -> Mapping[str, bool]:
    """The job's tables, and whether each has a rule now."""
    if in_use(job.store):
        return JobClient(job.store).answer({"do": "tables"}, deadline)
    tables = committed.tables_in_force(job, committed.newest(job))
    return {name: has_rule(table) for name, table in tables.items()}


def chosen(tables: Mapping[str, bool], name: str | None, *, ruled: bool) -> Sequence[str]:
    """The tables meant: the one named, else all; unless a rule is given (`ruled`), those that have one."""
    if name is not None:
        if name not in tables:
            raise SpecError(f"there is no table {name!r}; {nearest(name, tables)}")
        return [name]
    found = [each for each, has_rule in tables.items() if ruled or has_rule]
    if not found:
        raise SpecError("no table has a rule by which rows go; give --delete-below or --delete-after-days")
    return found


@dataclass(frozen=True)
class Shrunk:
    """A table whose rows went."""

    table: str
    version: int | None
    """From which on they have; None: from the first close of the next run on."""
    going: int
    """How many met the rule when they were counted."""
    rows: int
    """How many there were then."""

    def __str__(self) -> str:
        going = f"{count(self.going)} of {count(self.rows)} rows met the rule when they were counted"
        if self.version is None:
            return (
                f"the job does not run: a shrink of table {self.table} is logged, and `millrace run` does it; {going}"
            )
        return f"table {self.table} is shrunk from version {self.version} on; {going}"


def shrink(job: LoadedJob, tables: Sequence[str], wish: Rule, deadline: Deadline) -> Iterator[Shrunk]:
    """Have rows go, table by table. Raises MillraceError at the first one refused."""
    for table in tables:
        version = None
        if in_use(job.store):
            found = dry_run(job, table, wish, deadline)
            version = JobClient(job.store).carry_out({"op": "shrink", "table": table, **wish}, deadline)
        else:
            found = committed.log_shrink(job, table, wish, deadline)
        yield Shrunk(table, version, int(found["going"]), int(found["rows"]))


def dry_run(job: LoadedJob, table: str, wish: Rule, deadline: Deadline) -> dict[str, Any]:
    """What would go of a table now."""
    request = {"table": table, **wish}
    if in_use(job.store):
        return JobClient(job.store).answer({"do": "dry_run", "operation": request}, deadline)
    with committed.opened(job, table, deadline) as rows:
        return rows.dry_run(request, deadline)


def print_dry_run(job: LoadedJob, tables: Sequence[str], rule: Rule, deadline: Deadline, *, as_json: bool) -> None:
    """Print what would go now."""
    for table in tables:
        answer = dry_run(job, table, rule, deadline)
        say(json.dumps(answer) if as_json else "\n".join(told(answer)))


def told(answer: Mapping[str, Any]) -> list[str]:
    """A dry run in words: a line for the table, then one for each slot that would lose rows."""
    too_many = answer["fraction"] > answer["max_fraction"]
    limit = f"max_shrink_fraction = {answer['max_fraction']:.1%}"
    note = f"more than {limit}: needs --allow" if too_many else f"within {limit}"
    lines = [
        f"table {answer['table']}: {count(answer['going'])} of {count(answer['rows'])} rows would go "
        f"({answer['fraction']:.1%}; {note})"
    ]
    if "commit" in answer:
        lines.append(f"  the job does not run: counted in its newest commit, {answer['commit']}")
    below, unseen = answer["below"], answer["unseen"]
    slots = [*below, *(slot for slot in unseen if slot not in below)]
    if slots:
        width = max(4, *map(len, slots))
        lines.append(f"  {'slot':<{width}}  {'score below':>12}  {'unseen':>12}")
        lines += [
            f"  {slot:<{width}}  {count(below.get(slot, 0)):>12}  {count(unseen.get(slot, 0)):>12}" for slot in slots
        ]
    return lines
