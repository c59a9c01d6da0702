"""`headrace suggest`: prints what the slots of a job are worth, and features that would add to them."""

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.printable import print_printable, printable
from headrace.service.cli.arguments import Json, Overrides, SpecFile
from headrace.service.cli.panels import Panel

if TYPE_CHECKING:
    from rich.table import Table

    from headrace.service.planning.job_features import Suggestions

app = typer.Typer()


@app.command(rich_help_panel=Panel.TRAIN)
def suggest(
    job: SpecFile,
    events: Annotated[
        int, typer.Option("--events", min=1_000, max=1_000_000, metavar="N", help="First events of the stream to read.")
    ] = 20_000,
    overrides: Overrides = [],  # noqa: B006  # typer copies it
    as_json: Json = False,
) -> None:
    """Measure on the job's stream which crosses, counters and histories pay, which slots do not, and admission.

    It reads the first events through the job's source and pipe, and changes nothing: the job may run meanwhile.

    Example: headrace suggest job.toml --events 50000
    """
    from headrace.service.planning.job_features import suggest_features
    from headrace.service.spec.job import load_job

    found = suggest_features(load_job(job, overrides), events)
    if as_json:
        print(json.dumps(found.message(), indent=2))
        return
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 160, markup=False, highlight=False)
    for table in _tables(found):
        console.print(table)
    print_printable(*found.lines(), sep="\n")


def _tables(found: "Suggestions") -> "list[Table]":
    from rich.table import Table

    measured = found.found
    added = Table("features that pay, each on top of those before", "AUC", "p", "rows", title_justify="left")
    for name, feature, gain in found.features:
        added.add_row(printable(name), f"{gain.auc:+.4f}", f"{gain.p:.4f}", f"{feature.column.num_rows:,}")
    slots = Table("slot", "AUC without it", "p", "rows", "of all", "")
    total = max(1, sum(rows for _, rows in measured.slots.values()))
    for name, (gain, rows) in sorted(measured.slots.items(), key=lambda item: (item[1][0].auc, item[0])):
        advice = "drop" if name in found.droppable else ""
        slots.add_row(printable(name), f"{gain.auc:+.4f}", f"{gain.p:.4f}", f"{rows:,}", f"{rows / total:.1%}", advice)
    admission = Table("admit an id after", "AUC", "p", "rows", "saved")
    for times, (gain, rows) in measured.admission.items():
        saved = 1 - rows / max(1, measured.num_rows)
        admission.add_row(f"{times} times", f"{gain.auc:+.4f}", f"{gain.p:.4f}", f"{rows:,}", f"{saved:.1%}")
    return [added, slots, admission]
