"""`headrace faults`: reads arguments, runs the rounds, prints their results."""

import random
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from headrace.printable import print_printable
from headrace.service.cli.arguments import Overrides, SpecFile
from headrace.service.faults.rounds import FaultRuns, Round
from headrace.service.faults.summary_table import table_of, total_line
from headrace.service.monitor.lines import labelled

BY_CLOSES = "every close, the report and every file exported, compared with the undisturbed run's"
BY_COUNTS = "events and counts of every close and of the report, and the exports made: in this mode weights differ"
BY_RERUN = "every close and the digest, compared with a rerun of the run's own log; each request acted once"


class _Quiet:
    """Writes the workers' lines to a file. See service.monitor.shows.Show."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def on_line(self, worker: str, text: str) -> None:
        print_printable(labelled(worker, text), file=self._file, flush=True)

    def watching(self, _status: Callable[[], Mapping[str, Any]]) -> nullcontext[None]:
        return nullcontext()


def faults(
    job: SpecFile,
    rounds: Annotated[int, typer.Option(min=1, help="Runs with deaths, each to the end of the stream.")] = 1,
    seed: Annotated[int | None, typer.Option(min=0, help="Repeats the choice of points, roles and delays.")] = None,
    events: Annotated[int | None, typer.Option(min=1, help="End a simulated stream after so many events.")] = None,
    operator: Annotated[
        bool, typer.Option("--operator", help="Have an operator set, shrink, forget and export meanwhile.")
    ] = False,
    overrides: Overrides = [],  # noqa: B006  # typer copies it
) -> None:
    """Kill a job's workers at every point and at random, in stores of its own, and compare what comes out."""
    console = Console()
    chosen = random.SystemRandom().randrange(1_000_000) if seed is None else seed
    console.print(f"seed {chosen}")
    lines: list[_Quiet] = []
    runs = FaultRuns(
        *(job, overrides, events, chosen), lambda worker, text: lines[0].on_line(worker, text), operated=operator
    )
    show = _Quiet(runs.folder / "output.txt")
    lines.append(show)
    console.print(f"undisturbed: {runs.undisturbed()} passes")
    found: list[Round] = []
    for number in range(1, rounds + 1):
        found.append(runs.disturbed(number, show))
        console.print(f"round {number}: {total_line(found[-1:])}{_trouble(found[-1])}", soft_wrap=True)
    by_closes = BY_CLOSES if runs.repeatable else BY_COUNTS
    console.print(table_of(found, BY_RERUN if runs.by_rerun else by_closes))
    console.print(f"{total_line(found)} (seed {chosen})")
    if all(each.identical for each in found):
        runs.clear()
        return
    console.print(f"stores and output are kept: {runs.folder}", soft_wrap=True)
    raise typer.Exit(1)


def _trouble(found: Round) -> str:
    unasked = [
        f"generation {number} ended in another way than planned: {reason}" for number, reason in found.unasked.items()
    ]
    text = "; ".join([*found.wrong, *unasked])
    return f"; {text} ({found.store})" if text else ""
