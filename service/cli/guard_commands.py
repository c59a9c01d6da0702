"""The commands `doctor` and `freshness`. They read arguments and print; the other modules do the work."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from headrace.errors import SpecError
from headrace.printable import print_printable
from headrace.service.cli.arguments import Json, Overrides
from headrace.service.cli.history_commands import load_run
from headrace.service.cli.panels import Panel
from headrace.service.cli.progress import work_progress
from headrace.service.cli.targets import JobOrFile, Token, Url, only_here, path_of, remote_name, service_at

if TYPE_CHECKING:
    from headrace.service.history.version_ages import MeasuredAges

app = typer.Typer()


@app.command(rich_help_panel=Panel.LOOK)
def doctor(
    job: JobOrFile,
    overrides: Overrides = [],  # noqa: B006  # typer copies it
    by: Annotated[
        Literal["shift", "value", "cost"],
        typer.Option("--by", help="Sort by the greatest shift, value or cost."),
    ] = "shift",
    worth: Annotated[
        Path | None,
        typer.Option("--worth", metavar="FILE", help="The output of `headrace evaluate --worth --json`."),
    ] = None,
    as_json: Json = False,
    url: Url = None,
    token: Token = None,
) -> None:
    """Print figures of each slot at the newest commit, and warnings. The job may run.

    Example: headrace doctor job.toml --by cost
    """
    from headrace.codec import plain, typed
    from headrace.service.history.slot_report import JobReport, SlotOrder, format_report, read_worth, report_of

    if (name := remote_name(job, url)) is None:
        losses = {} if worth is None else read_worth(worth)
        loaded = load_run(job, overrides)
        with work_progress("reading the newest commit"):
            found = plain(report_of(loaded, SlotOrder(by), losses))
    else:
        only_here(overrides=overrides, worth=worth)
        with service_at(url, token) as client:
            found = client.get(path_of("jobs", name, "doctor"), by=by)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    if found["commit"] is None:
        print("no commit yet; the first one comes after commit.every")
        return
    for line in format_report(typed(JobReport, found, "the answer")):
        print_printable(line)


@app.command(rich_help_panel=Panel.LOOK)
def freshness(
    job: JobOrFile,
    overrides: Overrides = [],  # noqa: B006
    versions: Annotated[
        int, typer.Option("--versions", min=1, max=64, metavar="N", help="Most old versions to run again.")
    ] = 4,
    horizon: Annotated[
        str, typer.Option("--horizon", metavar="TIME", help="Greatest age, in event time: 12h, 2d.")
    ] = "2d",
    last: Annotated[bool, typer.Option("--last", help="Measure nothing; print the last result.")] = False,
    as_json: Json = False,
    url: Url = None,
    token: Token = None,
) -> None:
    """Measure the cost of serving an older model: old commits predict the events after them. The job may run.

    The result is kept in the store: the job's report, its page and the API show it.

    Example: headrace freshness job.toml --versions 4 --horizon 2d
    """
    from headrace.service.history.version_ages import of_message, read_ages

    if (name := remote_name(job, url)) is not None:
        if not last:
            raise SpecError("measures on the job's machine alone; add --last for the last result", "headrace freshness")
        only_here(overrides=overrides)
        with service_at(url, token) as client:
            _print_ages(of_message(client.get(path_of("jobs", name, "freshness"))), as_json)
    elif last:
        _print_ages(read_ages(load_run(job, overrides).store), as_json)
    else:
        _print_ages(_measure_ages(job, overrides, versions, horizon), as_json)


def _measure_ages(job: Path, overrides: list[str], versions: int, horizon: str) -> "MeasuredAges":
    """Run old versions again, and keep what came of it."""
    from headrace.service.history.frozen_runs import frozen_parts
    from headrace.service.history.version_ages import costs_of, keep_ages
    from headrace.trainer.journal.log import read_history

    loaded = load_run(job, overrides)
    passes = read_history(loaded.store / "log").closed
    parts = frozen_parts(loaded, versions, _seconds(horizon), _print_line)
    if not parts:
        raise SpecError("no pass that a version did not learn is so young; give a longer time", "--horizon")
    used = sorted({part.version for part in parts})
    return keep_ages(loaded.store, passes, used, costs_of(parts))


def _print_ages(found: "MeasuredAges | None", as_json: bool) -> None:
    from headrace.service.history.version_ages import format_measured

    if as_json:
        print(json.dumps(None if found is None else found.message(), indent=2))
        return
    for line in ["not measured yet; `headrace freshness` does so"] if found is None else format_measured(found):
        print_printable(line)


def _seconds(horizon: str) -> float:
    from headrace.config import parse_duration

    try:
        return parse_duration(horizon)
    except ValueError as error:
        raise SpecError(str(error), "--horizon") from None


def _print_line(worker: str, text: str) -> None:
    from headrace.service.monitor.lines import labelled

    print_printable(labelled(worker, text), file=sys.stderr, flush=True)
