"""`headrace suggest`: prints what the slots of a job are worth, and features that would add to them."""

import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.deadline import Deadline
from headrace.printable import print_printable, printable
from headrace.service.cli.arguments import Json, Overrides
from headrace.service.cli.panels import Panel
from headrace.service.cli.progress import work_progress
from headrace.service.cli.targets import JobOrFile, Token, Url, path_of, remote_name, service_at

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
    from headrace.service.planning.job_features import lines_of, suggest_features

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
    for table in _tables(found):
        console.print(table)
    print_printable(*lines_of(found), sep="\n")


def _tables(found: Mapping[str, Any]) -> "list[Table]":
    """Of a `Suggestions.message`."""
    from rich.table import Table

    def worth(each: Mapping[str, Any]) -> tuple[str, str]:
        return f"{each['auc']:+.4f}", f"{each['p']:.4f}"

    added = Table("features that pay, each on top of those before", "AUC", "p", "costs rows", title_justify="left")
    for each in found["features"]:
        added.add_row(printable(each["slot"]["name"]), *worth(each), f"{each['rows']:,}")
    slots = Table("slot", "AUC without it", "p", "saves rows", "of all", "")
    total = max(1, sum(each["rows"] for each in found["slots"].values()))
    for name, each in sorted(found["slots"].items(), key=lambda item: (item[1]["auc"], item[0])):
        saved, advice = each["saved"], "drop" if each["drop"] else ""
        slots.add_row(printable(name), *worth(each), f"{saved:,}", f"{saved / total:.1%}", advice)
    admission = Table("admit an id after", "AUC", "p", "rows left", "saves rows", "of all")
    for times, each in found["admission"].items():
        saved = each["saved"]
        share = f"{saved / max(1, found['rows']):.1%}"
        admission.add_row(f"{times} times", *worth(each), f"{each['rows']:,}", f"{saved:,}", share)
    return [added, slots, admission]
