"""The command line: all commands, and the entry point `main`. Groups of commands are in modules of their own."""

import sys
from pathlib import Path
from typing import Annotated

import typer

import headrace
from headrace.lifecycle import ExitCode, exit_code_of
from headrace.service.cli.arguments import Health, Overrides, SpecFile
from headrace.service.cli.export_commands import exporting
from headrace.service.cli.fault_commands import faults
from headrace.service.cli.guard_commands import guarding
from headrace.service.cli.history_commands import past
from headrace.service.cli.inspect_commands import looking
from headrace.service.cli.join_token_command import join_token
from headrace.service.cli.prediction_commands import predicting
from headrace.service.cli.render_command import render
from headrace.service.cli.replica_command import replica
from headrace.service.cli.resize_command import resize
from headrace.service.cli.run_command import run_job
from headrace.service.cli.service_commands import remote
from headrace.service.cli.size_command import size
from headrace.service.cli.spec_commands import spec
from headrace.service.cli.sweep_command import sweep
from headrace.service.cli.table_commands import operating
from headrace.service.cli.token_commands import token
from headrace.service.cli.upgrade_command import upgrade
from headrace.service.cli.worker_command import worker
from headrace.service.monitor.display import choose_show
from headrace.service.server.serve import serve
from headrace.service.spec.job import load_job
from headrace.timeline import parse_window

cli = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train a recommendation model on an event stream.",
)
cli.add_typer(spec, name="spec")
cli.add_typer(token, name="token")
cli.add_typer(render, name="render")
cli.add_typer(past)
cli.add_typer(exporting)
cli.add_typer(looking)
cli.add_typer(operating)
cli.add_typer(guarding)
cli.add_typer(remote)
cli.add_typer(predicting)
cli.command()(faults)
cli.command()(join_token)
cli.command()(replica)
cli.command()(resize)
cli.command()(serve)
cli.command()(size)
cli.command()(sweep)
cli.command()(upgrade)
cli.command()(worker)

Fresh = Annotated[
    bool, typer.Option("--fresh", help="Remove the run in the store and start again; default: continue it.")
]
Listen = Annotated[
    str | None, typer.Option("--listen", metavar="HOST:PORT", help="Serve the API, for example at 127.0.0.1:8080.")
]

Metrics = Annotated[
    str | None,
    typer.Option("--metrics", metavar="HOST:PORT", help="Answer Prometheus here: /metrics, without tokens."),
]

RetryStopped = Annotated[
    bool,
    typer.Option(
        "--retry-stopped",
        help="After a signal end with exit code 75, also at workers that joined: an orchestrator starts them again.",
    ),
]

Trace = Annotated[
    str | None,
    typer.Option(
        "--trace",
        metavar="steps=N[,after=M]",
        help="Record a timeline of N steps of every worker, after M others, as trace.json of the store, for Perfetto.",
    ),
]


@cli.command()
def run(
    job: SpecFile,
    overrides: Overrides = [],  # noqa: B006  # typer copies it
    fresh: Fresh = False,
    listen: Listen = None,
    trace: Trace = None,
    health: Health = None,
    metrics: Metrics = None,
    retry_stopped: RetryStopped = False,
) -> None:
    """Run a job in the foreground until its stream ends, or Ctrl-C."""
    window = None if trace is None else parse_window(trace)
    stopped = ExitCode.RETRY if retry_stopped else ExitCode.DRAINED
    loaded, show = load_job(job, overrides), choose_show()
    code = run_job(
        loaded, show, fresh=fresh, listen=listen, trace=window, health=health, metrics=metrics, stopped=stopped
    )
    raise typer.Exit(code)


@cli.command()
def demo(
    events: Annotated[
        int | None, typer.Option(min=1, help="Number of events after which to end; default: at Ctrl-C.")
    ] = None,
    overrides: Overrides = [],  # noqa: B006
    listen: Listen = None,
) -> None:
    """Watch a job learn from a simulated click stream next to a frozen twin; in runs/demo, fresh each time."""
    from headrace.service.demo.demo import (
        run_demo,
    )  # imported late: the server's imports would double the start time of every command

    raise typer.Exit(run_demo(events, overrides, listen, Path.cwd() / "runs" / "demo"))


@cli.command()
def version() -> None:
    """Print Headrace's version."""
    print(headrace.__version__)


def main() -> None:
    """Run the command line. An error for the user is printed as one line."""
    sys.exit(exit_code_of(cli))
