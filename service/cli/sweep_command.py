"""`headrace sweep`: reads arguments, runs the settings, prints the table."""

import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.errors import SpecError
from headrace.printable import print_printable
from headrace.service.cli.arguments import Json, SpecFile
from headrace.service.cli.panels import Panel
from headrace.service.cli.progress import work_progress

if TYPE_CHECKING:
    from headrace.service.planning.sweep_runs import SweepResult
    from headrace.service.planning.sweep_settings import SweepSetting

app = typer.Typer()

Sets = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=A,B", help="Values of a key. Repeat it for a grid; one value is for all runs."),
]
Without = Annotated[list[str], typer.Option("--without", metavar="SLOT", help="Leave a slot out. Repeat it for more.")]


@app.command(rich_help_panel=Panel.TRAIN)
def sweep(
    job: SpecFile,
    sets: Sets = [],  # noqa: B006  # typer copies it
    settings: Annotated[
        Path | None, typer.Option("--settings", metavar="FILE", help="TOML with a table of keys for each setting.")
    ] = None,
    without: Without = [],  # noqa: B006
    ablate: Annotated[bool, typer.Option("--ablate", help="Add a run for each slot, without that slot.")] = False,
    jobs: Annotated[
        int, typer.Option("--jobs", min=1, max=64, metavar="N", help="Runs side by side, after the first.")
    ] = 1,
    keep: Annotated[str, typer.Option("--keep", metavar="SIZE", help="Most bytes of samples kept on disk.")] = "8GiB",
    after: Annotated[
        int,
        typer.Option(
            "--after",
            min=0,
            metavar="N",
            help="Leave the first passes out of the paired test; show the AUC of the second half of the samples, too.",
        ),
    ] = 0,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder of the runs; emptied. Default: runs/sweep.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run several settings of a job over the same events, and compare them in a table, with significance.

    The stream is read once: later runs take the samples of the first from disk.

    Example: headrace sweep job.toml --set tables.default.dim=8,16 --jobs 2
    """
    from headrace.service.planning.sweep_runs import Sweep
    from headrace.service.planning.sweep_settings import check_settings

    if settings is not None and ablate:
        raise SpecError("--ablate leaves each slot out of one setting, and --settings has several; leave one out")
    chosen = _choose(job, sets, settings, without, ablate=ablate)
    check_settings(chosen)
    folder = out or job.resolve().parent / "runs" / "sweep"
    swept = Sweep(job.resolve(), folder, chosen, keep=keep, after=after)
    ended = itertools.count(1)
    with work_progress("sweep") as progress:
        results = swept.run(jobs, lambda text: progress(next(ended) / len(chosen), text))
    if as_json:
        print(json.dumps([each.message() for each in results], indent=2))
        return
    _print_table(results, second_half=after > 0)


def _choose(
    job: Path, sets: list[str], settings: Path | None, without: list[str], *, ablate: bool
) -> "list[SweepSetting]":
    """The settings that the options name. Raises SpecError."""
    from headrace.dataset.spec.schema import Schema
    from headrace.service.planning.sweep_settings import ablations, grid, read_settings
    from headrace.service.spec.job import load_job

    found = grid(sets, without)
    if settings is not None:
        if len(found) > 1:
            raise SpecError("with --settings, each key of --set has one value, which is for all settings of the file")
        found = read_settings(settings, found[0].overrides)
    chosen = _with_its_slices(job, found)
    if not ablate:
        return chosen
    if len(chosen) > 1:
        raise SpecError("--ablate leaves each slot out of one setting; give each key of --set one value")
    schema = Schema.of(load_job(job, chosen[0].overrides).spec.slots)
    return _with_its_slices(job, ablations(chosen[0], schema))


def _print_table(results: "Sequence[SweepResult]", *, second_half: bool) -> None:
    from rich.console import Console

    from headrace.service.planning.sweep_runs import table_of

    Console(width=None if sys.stdout.isatty() else 160).print(table_of(results, second_half=second_half))


def _with_its_slices(job: Path, chosen: "list[SweepSetting]") -> "list[SweepSetting]":
    """The settings without slices of metrics by slots that they leave out; says which."""
    from headrace.config import load_toml
    from headrace.service.planning.sweep_settings import without_slices

    found = []
    for each in chosen:
        metrics = load_toml(job, each.overrides).get("metrics") if each.without else None
        slices = metrics.get("slices", []) if isinstance(metrics, dict) else []
        found.append(without_slices(each, slices))
        if gone := [name for name in slices if name in each.without]:
            words = f"{each.name}: without slices by {', '.join(gone)} (metrics.slices), which this setting leaves out"
            print_printable(words, file=sys.stderr, flush=True)
    return found
