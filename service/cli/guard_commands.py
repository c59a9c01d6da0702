"""The commands `doctor` and `freshness`. They read arguments and print; the other modules do the work."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from millrace.config import parse_duration
from millrace.errors import SpecError
from millrace.printable import print_printable
from service.cli.arguments import Json, Overrides, SpecFile
from service.cli.history_commands import load_run
from service.history import version_ages
from service.history.frozen_runs import frozen_parts
from service.inspect.slot_report import SlotOrder, format_report, read_worth, report_of
from service.monitor.lines import labelled

guarding = typer.Typer()


@guarding.command()
def doctor(
    job: SpecFile,
    overrides: Overrides = [],  # noqa: B006  # typer copies it
    by: Annotated[SlotOrder, typer.Option("--by", help="What comes first: the greatest shift, value or cost.")] = (
        SlotOrder.SHIFT
    ),
    worth: Annotated[
        Path | None,
        typer.Option("--worth", metavar="FILE", help="The output of `millrace evaluate --worth --json`."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print what is known of each slot at the newest commit, and what looks wrong; the job may run."""
    found = report_of(load_run(job, overrides), by, {} if worth is None else read_worth(worth))
    if as_json:
        print(json.dumps(found.message(), indent=2))
        return
    for line in format_report(found):
        print_printable(line)


@guarding.command()
def freshness(
    job: SpecFile,
    overrides: Overrides = [],  # noqa: B006
    versions: Annotated[int, typer.Option("--versions", min=1, max=64, help="Most old versions to run again.")] = 4,
    horizon: Annotated[
        str, typer.Option("--horizon", metavar="TIME", help="Greatest age, in event time: 12h, 2d.")
    ] = "2d",
    as_json: Json = False,
) -> None:
    """Measure what the age of a served version costs: old commits predict the events after them; the job may run."""
    parts = frozen_parts(load_run(job, overrides), versions, _seconds(horizon), _print_line)
    costs, used = version_ages.costs_of(parts), sorted({part.version for part in parts})
    if as_json:
        print(json.dumps(version_ages.message_of(used, costs), indent=2))
        return
    for line in version_ages.format_costs(used, costs):
        print_printable(line)


def _seconds(horizon: str) -> float:
    try:
        return parse_duration(horizon)
    except ValueError as error:
        raise SpecError(str(error), "--horizon") from None


def _print_line(worker: str, text: str) -> None:
    print_printable(labelled(worker, text), file=sys.stderr, flush=True)
