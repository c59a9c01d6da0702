"""`headrace faults`: reads arguments; see service.cli.fault_output."""

import random
from typing import Annotated

import typer

from headrace.service.cli.arguments import Json, Overrides, SpecFile
from headrace.service.cli.panels import Panel

app = typer.Typer()


@app.command(rich_help_panel=Panel.OPERATE)
def faults(
    job: SpecFile,
    rounds: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of runs with deaths, each to the end of the stream.")
    ] = 1,
    seed: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Repeats the choice of points, roles and delays.")
    ] = None,
    events: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="End a simulated stream after this many events.")
    ] = None,
    operator: Annotated[
        bool, typer.Option("--operator", help="Have an operator set, shrink, forget and export meanwhile.")
    ] = False,
    overrides: Overrides = [],  # noqa: B006  # typer copies it
    as_json: Json = False,
) -> None:
    """Kill a job's workers at every point and at random, and compare the results with an undisturbed run.

    The job's own store is not used: each run has one of its own. Exit code 1 if a result differs.

    Example: headrace faults job.toml --rounds 3 --events 100000
    """
    from headrace.service.cli.fault_output import run_rounds
    from headrace.service.cluster.runtime import OF_ANY_JOB
    from headrace.service.cluster.warm import warm_launchers
    from headrace.service.faults.rounds import FaultRuns

    chosen = random.SystemRandom().randrange(1_000_000) if seed is None else seed
    with warm_launchers(OF_ANY_JOB):  # each round starts a job
        passed = run_rounds(
            lambda on_line: FaultRuns(job, overrides, events, chosen, on_line, operated=operator),
            rounds,
            chosen,
            as_json=as_json,
        )
    if not passed:
        raise typer.Exit(1)
