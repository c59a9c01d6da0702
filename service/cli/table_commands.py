"""The commands that change or show a job's rows. They read arguments and print; the other modules do the work.

A command that changes rows waits until the change acts, at the close of a pass. `tables`, `ranking`,
`explain` and `shrink` also work for a job that does not run.
"""

import inspect
import json
from dataclasses import asdict
from typing import Annotated

import typer

from headrace.deadline import Deadline
from headrace.errors import SpecError
from headrace.printable import print_printable
from headrace.pserver.protocol.table_operations import SLOT_CHANGES, SlotChange
from headrace.service.cli.arguments import Json, Overrides, SpecFile
from headrace.service.cli.history_commands import load_run
from headrace.service.cli.panels import Panel
from headrace.service.cli.targets import JobOrFile, Token, Url, Wait, path_of, remote_name, service_at

app = typer.Typer()

LAST_DAY, MAX_DAYS = 32_767, 1_000_000
"""As pserver.config has them."""
Slot = Annotated[str, typer.Argument(help="A sparse slot.", show_default=False)]
COUNTS_RESTART = (
    "where counters of another width are needed (thresholds below 256, 65,536, 2**32), the counts restart at 0, "
    "and the log says so"
)
NONE = "none"
"""A value on the command line that removes a threshold."""


@app.command("set", rich_help_panel=Panel.OPERATE)
def set_(
    job: JobOrFile,
    values: Annotated[
        list[str], typer.Argument(metavar="KEY=VALUE...", help="As in tables.default.optimizer.lr=0.02.")
    ],
    overrides: Overrides = [],  # noqa: B006  # typer copies it
    timeout: Wait = 120.0,
    url: Url = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Set learning rates, schedules, decays and thresholds of a running job; "none" removes a threshold.

    A setting overrides the job file, also after a restart, until the job file changes the same key.

    Example: headrace set job.toml tables.default.optimizer.lr=0.02
    """
    keys = dict(_pair(text) for text in values)
    if (name := remote_name(job, url)) is not None:
        with service_at(url, token) as client:
            operation = client.change("PATCH", path_of("jobs", name), {"keys": keys})
            version = client.done(operation, Deadline.after(timeout))["version"]
    else:
        from headrace.rpc.job_client import JobClient

        version = JobClient(load_run(job, overrides).store).carry_out(
            {"op": "set", "keys": keys}, Deadline.after(timeout)
        )
    if as_json:
        print(json.dumps({"keys": keys, "version": version}, indent=2))
        return
    for key, value in keys.items():
        print(f"{key} = {NONE if value is None else value} acts from version {version} on{_counting_note(key)}")


def _counting_note(key: str) -> str:
    """A note on an admission threshold that counts occurrences; empty for other keys."""
    counts = ".admission." in key and key.endswith(".n")
    return f"; {COUNTS_RESTART}" if counts else ""


def _pair(text: str) -> tuple[str, object]:
    from headrace.config import parse_value

    key, equals, value = text.partition("=")
    if not equals or not key:
        raise SpecError(f"{text!r} is not of the form KEY=VALUE")
    meant = None if value == NONE else parse_value(value)
    try:
        json.dumps(meant, allow_nan=False)
    except (TypeError, ValueError):
        raise SpecError(f"{value} is not a finite number, a text, or a list or table of these", key) from None
    return key, meant


@app.command(rich_help_panel=Panel.OPERATE)
def shrink(
    job: SpecFile,
    overrides: Overrides = [],  # noqa: B006
    table: Annotated[str | None, typer.Option("--table", metavar="NAME", help="Only this table; default: all.")] = None,
    delete_below: Annotated[
        float | None, typer.Option("--delete-below", min=0, metavar="SCORE", help="Replaces the rule of the job file.")
    ] = None,
    delete_after_days: Annotated[
        int | None,
        typer.Option(
            "--delete-after-days", min=0, max=MAX_DAYS, metavar="DAYS", help="Replaces the rule of the job file."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count, by slot and reason.")] = False,
    allow: Annotated[bool, typer.Option("--allow", help="Delete more than max_shrink_fraction allows.")] = False,
    timeout: Wait = 120.0,
    as_json: Json = False,
) -> None:
    """Delete rows of a job's tables by their rule. Exit code 1 if there are too many.

    For a job that does not run, rows are counted in its newest commit and deleted in the next run. With --json an
    object a line for each table.

    Example: headrace shrink job.toml --dry-run
    """
    from headrace.config import MAX_FLOAT32
    from headrace.service.tables import table_requests

    if delete_below is not None and not delete_below <= MAX_FLOAT32:
        raise SpecError(f"is a score, at most {MAX_FLOAT32} (got {delete_below})", "--delete-below")
    loaded, deadline = load_run(job, overrides), Deadline.after(timeout)
    rule = {"delete_below": delete_below, "delete_after_days": delete_after_days}
    ruled = rule != dict.fromkeys(rule)
    chosen = table_requests.choose_tables(table_requests.tables_with_rules(loaded, deadline), table, ruled=ruled)
    if not dry_run:
        for report in table_requests.shrink(loaded, chosen, {**rule, "allow": allow}, deadline):
            print_printable(json.dumps(asdict(report)) if as_json else report)
        return
    for each in chosen:
        answer = table_requests.dry_run(loaded, each, rule, deadline)
        print_printable(json.dumps(answer) if as_json else "\n".join(table_requests.format_dry_run(answer)))


@app.command("tables", rich_help_panel=Panel.LOOK)
def tables_(
    job: JobOrFile,
    overrides: Overrides = [],  # noqa: B006
    timeout: Wait = 60.0,
    url: Url = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Print a job's tables: rows, memory, and figures of each slot.

    If the job does not run, its newest commit is read.

    Example: headrace tables job.toml
    """
    from headrace.service.cli import service_output

    commit = None
    if (name := remote_name(job, url)) is not None:
        with service_at(url, token) as client:
            found = list(client.items(path_of("jobs", name, "tables")))
    else:
        from headrace.service.tables import table_requests

        found, commit = table_requests.local_tables(load_run(job, overrides), Deadline.after(timeout))
    if as_json:
        print(json.dumps(found, indent=2))
        return
    if commit is not None:
        print_printable(f"the job does not run; this is the state of its newest commit, {commit}")
    for line in service_output.table_lines(found):
        print_printable(line)


@app.command(rich_help_panel=Panel.LOOK)
def ranking(
    job: JobOrFile,
    table: Annotated[str, typer.Argument(help="A table.")] = "default",
    overrides: Overrides = [],  # noqa: B006
    timeout: Wait = 60.0,
    url: Url = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Print the rows of a table that have most shows, and how long ago its rows were seen.

    If the job does not run, its newest commit is read.

    Example: headrace ranking job.toml default
    """
    from headrace.service.tables import row

    if (name := remote_name(job, url)) is not None:
        with service_at(url, token) as client:
            found = client.get(path_of("jobs", name, "tables", table, "ranking"))
    else:
        from headrace.validation import no_such

        loaded = load_run(job, overrides)
        if table not in loaded.spec.tables:
            raise SpecError(no_such("table", table, loaded.spec.tables))
        found = row.ranking(loaded, table, Deadline.after(timeout))
    print_printable(json.dumps(found) if as_json else "\n".join(row.format_ranking(found)))


@app.command(rich_help_panel=Panel.OPERATE)
def forget(
    job: SpecFile,
    slot: Slot,
    value: Annotated[str, typer.Argument(help="A sign (feature id), or its text.", show_default=False)],
    overrides: Overrides = [],  # noqa: B006
    everywhere: Annotated[
        bool,
        typer.Option("--everywhere", help="Also delete its crosses, histories, counters and waiting samples."),
    ] = False,
    timeout: Wait = 120.0,
    as_json: Json = False,
) -> None:
    """Delete one value's row from a running job, and the dead letters that contain it. Names the remaining copies.

    Example: headrace forget job.toml user 4711 --everywhere
    """
    from headrace.service.tables import forget as forgetting

    told = forgetting.forget(load_run(job, overrides), slot, value, Deadline.after(timeout), everywhere=everywhere)
    if as_json:
        print(json.dumps({"lines": list(told)}, indent=2))
        return
    for line in told:
        print_printable(line)


@app.command("day-tick", rich_help_panel=Panel.OPERATE)
def day_tick(
    job: SpecFile,
    overrides: Overrides = [],  # noqa: B006
    to: Annotated[
        int | None,
        typer.Option("--to", min=0, max=LAST_DAY, metavar="DAY", help="The day to begin."),
    ] = None,
    timeout: Wait = 120.0,
    as_json: Json = False,
) -> None:
    """Begin the next day of a running job whose events have no time.

    Example: headrace day-tick job.toml
    """
    from headrace.service.tables import table_requests

    day, version = table_requests.begin_day(load_run(job, overrides).store, to, Deadline.after(timeout))
    if as_json:
        print(json.dumps({"day": day, "version": version}))
        return
    print(f"day {day} begins with version {version}")


def _add_slot_command(change: type[SlotChange]) -> None:
    """The command for a change of all rows of a slot."""

    def command(
        job: JobOrFile,
        slot: Slot,
        overrides: Overrides = [],  # noqa: B006
        timeout: Wait = 120.0,
        url: Url = None,
        token: Token = None,
        as_json: Json = False,
    ) -> None:
        deadline = Deadline.after(timeout)
        if (name := remote_name(job, url)) is not None:
            with service_at(url, token) as client:
                version = client.carry_out(path_of("jobs", name, "slots", slot, change.name), None, deadline)["version"]
        else:
            from headrace.rpc.job_client import JobClient

            version = JobClient(load_run(job, overrides).store).carry_out({"op": change.name, "slot": slot}, deadline)
        if as_json:
            print(json.dumps({"slot": slot, "version": version}))
            return
        print(f"{change.name} {slot}: acts from version {version} on")

    help_ = f"{inspect.cleandoc(change.__doc__ or '')}\n\nExample: headrace {change.name} job.toml user"
    app.command(change.name, rich_help_panel=Panel.OPERATE, help=help_)(command)


for _change in SLOT_CHANGES:
    _add_slot_command(_change)


@app.command(rich_help_panel=Panel.LOOK)
def explain(
    job: SpecFile,
    slot: Slot,
    sign: Annotated[str, typer.Argument(help="A sign (feature id), or its text.", show_default=False)],
    overrides: Overrides = [],  # noqa: B006
    timeout: Wait = 60.0,
    as_json: Json = False,
) -> None:
    """Print all that a job knows of one sign: where its row is, why it has one or none, and when it is deleted.

    If the job does not run, its newest commit is read.

    Example: headrace explain job.toml user 4711
    """
    from headrace.service.tables import row

    known = row.explain(load_run(job, overrides), slot, sign, Deadline.after(timeout))
    print_printable(json.dumps(known) if as_json else "\n".join(row.format_explanation(known)))
