"""The commands that act on a job's rows, and those that show them. Reads arguments; the work is beside it.

Each waits until what it asks for has acted: at the close of a pass, from whose version on it holds. `tables`, `explain`
and `shrink` are also for a job that does not run.
"""

import json
from typing import Annotated

import typer

from millrace.config import value_of
from millrace.deadline import Deadline
from millrace.errors import SpecError
from millrace.job_client import JobClient
from millrace.printable import say
from pserver.config import LAST_DAY, MAX_DAYS, MAX_FLOAT32
from service.arguments import Json, Overrides, SpecFile
from service.operating import explaining, forgetting, shrinking, tables
from service.past.commands import ran
from service.remote import acting, showing
from service.remote.asking import JobOrFile, Token, Url, path_of, remote_name, service_at

operating = typer.Typer()

Timeout = Annotated[float, typer.Option("--timeout", min=1, metavar="SECONDS", help="How long to wait at most.")]
Slot = Annotated[str, typer.Argument(help="A sparse slot.", show_default=False)]
ANEW = (
    "where counters of another width are needed (thresholds below 256, 65,536, 2**32), the counts begin anew, "
    "which the log tells"
)
NONE = "none"
"""As a value: nothing is set."""


@operating.command("set")
def set_(
    job: JobOrFile,
    values: Annotated[
        list[str], typer.Argument(metavar="KEY=VALUE...", help="As in tables.default.optimizer.lr=0.02.")
    ],
    overrides: Overrides = [],  # noqa: B006  # typer copies it
    timeout: Timeout = 120.0,
    url: Url = None,
    token: Token = None,
) -> None:
    """Set learning rates, decays and thresholds of a running job; "none" takes a threshold away.

    What is set stands before the job file, also after a restart, until that changes the same key.
    """
    keys = dict(_pair(text) for text in values)
    if (name := remote_name(job, url)) is not None:
        with service_at(url, token) as client:
            version = acting.set_keys(client, name, keys, Deadline.after(timeout))
    else:
        version = JobClient(ran(job, overrides).store).carry_out({"op": "set", "keys": keys}, Deadline.after(timeout))
    for key, value in keys.items():
        print(f"{key} = {NONE if value is None else value} acts from version {version} on{_counting(key)}")


def _counting(key: str) -> str:
    """What to know of a threshold of admission that is counted up to."""
    counts = ".admission." in key and key.endswith(".n")
    return f"; {ANEW}" if counts else ""


def _pair(text: str) -> tuple[str, object]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise SpecError(f"{text!r} is not of the form KEY=VALUE")
    meant = None if value == NONE else value_of(value)
    try:
        json.dumps(meant, allow_nan=False)
    except (TypeError, ValueError):
        raise SpecError(f"{value} is neither a finite number nor a text, nor made of such", key) from None
    return key, meant


@operating.command()
def shrink(
    job: SpecFile,
    overrides: Overrides = [],  # noqa: B006
    table: Annotated[str | None, typer.Option("--table", help="Only this one; else all.")] = None,
    delete_below: Annotated[
        float | None, typer.Option("--delete-below", min=0, metavar="SCORE", help="In place of the spec's rule.")
    ] = None,
    delete_after_days: Annotated[
        int | None,
        typer.Option("--delete-after-days", min=0, max=MAX_DAYS, metavar="DAYS", help="In place of the spec's rule."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go, by slot, and why.")] = False,
    allow: Annotated[bool, typer.Option("--allow", help="Also where it is more than max_shrink_fraction.")] = False,
    timeout: Timeout = 120.0,
    as_json: Json = False,
) -> None:
    """Have rows of a job's tables go by their rule; exit code 1 where they are too many.

    Of a job that does not run, rows are counted in its newest commit, and go in the next run.
    """
    if delete_below is not None and not delete_below <= MAX_FLOAT32:
        raise SpecError(f"is a score, at most {MAX_FLOAT32} (got {delete_below})", "--delete-below")
    loaded, deadline = ran(job, overrides), Deadline.after(timeout)
    rule = {"delete_below": delete_below, "delete_after_days": delete_after_days}
    meant = shrinking.chosen(shrinking.tables_of(loaded, deadline), table, ruled=rule != dict.fromkeys(rule))
    if dry_run:
        shrinking.print_dry_run(loaded, meant, rule, deadline, as_json=as_json)
    else:
        for shrunk in shrinking.shrink(loaded, meant, {**rule, "allow": allow}, deadline):
            say(shrunk)


@operating.command("tables")
def tables_(
    job: JobOrFile,
    overrides: Overrides = [],  # noqa: B006
    timeout: Timeout = 60.0,
    url: Url = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Print a job's tables: rows, memory, and what was seen by slot.

    Of a job file whose job does not run, its newest commit says it.
    """
    commit = None
    if (name := remote_name(job, url)) is not None:
        with service_at(url, token) as client:
            found = list(client.items(path_of("jobs", name, "tables")))
    else:
        found, commit = tables.here(ran(job, overrides), Deadline.after(timeout))
    if as_json:
        print(json.dumps(found, indent=2))
        return
    if commit is not None:
        say(f"the job does not run: this is as of its newest commit, {commit}")
    for line in showing.table_lines(found):
        say(line)


@operating.command()
def forget(
    job: SpecFile,
    slot: Slot,
    value: Annotated[str, typer.Argument(help="A sign, or the text of one.", show_default=False)],
    overrides: Overrides = [],  # noqa: B006
    timeout: Timeout = 120.0,
) -> None:
    """Delete one value's row from a running job, and the dead letters that hold it; say what holds it still."""
    for line in forgetting.forget(ran(job, overrides), slot, value, Deadline.after(timeout)):
        say(line)


@operating.command("day-tick")
def day_tick(
    job: SpecFile,
    overrides: Overrides = [],  # noqa: B006
    to: Annotated[
        int | None, typer.Option("--to", min=0, max=LAST_DAY, metavar="DAY", help="The day it then is; else the next.")
    ] = None,
    timeout: Timeout = 120.0,
) -> None:
    """Have the next day begin for a running job whose events have no time."""
    day, version = tables.begin_day(ran(job, overrides).store, to, Deadline.after(timeout))
    print(f"day {day} begins with version {version}")


@operating.command()
def explain(
    job: SpecFile,
    slot: Slot,
    sign: Annotated[str, typer.Argument(help="A sign, or the text of one.", show_default=False)],
    overrides: Overrides = [],  # noqa: B006
    timeout: Timeout = 60.0,
    as_json: Json = False,
) -> None:
    """Print all that a job knows of one sign: where its row is, why it has one or none, and when that goes.

    Of a job that does not run, its newest commit says it.
    """
    known = explaining.explained(ran(job, overrides), slot, sign, Deadline.after(timeout))
    say(json.dumps(known) if as_json else "\n".join(explaining.told(known)))
