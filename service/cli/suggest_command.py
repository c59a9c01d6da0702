"""`headrace suggest`: prints what the slots of a job are worth, and features that would add to them."""

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.deadline import Deadline
from headrace.printable import print_printable, printable
from headrace.service.cli.arguments import Json, Overrides
from headrace.service.cli.panels import Panel
from headrace.service.cli.progress import work_progress
from headrace.service.cli.targets import JobOrFile, Token, Url, path_of, remote_name, service_at
from headrace.service.planning.suggestion_text import SuggestionTable, lines_of, tables_of

if TYPE_CHECKING:
    from rich.table import Table

app = typer.Typer()

SUGGEST_S = 7 * 86400.0
"""Longest time to wait for a service's measurement: as long as the service keeps an operation."""


@app.command(rich_help_panel=Panel.TRAIN)
def suggest(
    job: JobOrFile,
    events: Annotated[
        int, typer.Option("--events", min=1_000, max=1_000_000, metavar="N", help="Events of the stream to read.")
    ] = 20_000,
    newest: Annotated[bool, typer.Option("--newest", help="Read the newest events, not the first ones.")] = False,
    overrides: Overrides = [],  # noqa: B006  # typer copies it
    url: Url = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Measure on the job's stream which crosses, counters and histories pay, which slots do not, and admission.

    It reads the first or the newest events through the job's source and pipe, and changes nothing: the job may run
    meanwhile. For a job of a service, the service measures.

    Example: headrace suggest job.toml --events 50000 --newest
    """
    from headrace.service.planning.job_features import suggest_features

    if (name := remote_name(job, url)) is not None:
        with service_at(url, token) as client, work_progress("measuring") as progress:
            asked, deadline = {"events": events, "newest": newest}, Deadline.after(SUGGEST_S)
            path = path_of("jobs", name, "suggest")
            found = client.carry_out(path, asked, deadline, lambda text: progress(None, text))
    else:
        from headrace.service.spec.job import load_job

        found = suggest_features(load_job(job, overrides), events, newest=newest).message()
    if as_json:
        print(json.dumps(found, indent=2))
        return
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 160, markup=False, highlight=False)
    for table in tables_of(found):
        console.print(_table(table))
    print_printable(*lines_of(found), sep="\n")


def _table(found: SuggestionTable) -> "Table":
    from rich.table import Table

    table = Table(*found.titles, title_justify="left")
    for name, *others in found.rows:
        table.add_row(printable(name), *others)
    return table
