"""The command line: all commands, and the entry point `main`. Groups of commands are in modules of their own."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

import millrace
from millrace.lifecycle import exit_code_of
from service.arguments import Overrides, SpecFile
from service.display import show_here
from service.exports.commands import exporting
from service.faults.command import faults
from service.looking.commands import looking
from service.operating.commands import operating
from service.past.commands import past
from service.predicting.commands import predicting
from service.preflight import check_job
from service.remote.commands import remote
from service.running import run_job
from service.serve import serve
from service.serving import replica
from service.spec import Job, load_job
from service.tokens import token

cli = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train a recommendation model on an event stream.",
)
spec = typer.Typer(no_args_is_help=True, help="Check a job spec; print its schema.")
cli.add_typer(spec, name="spec")
cli.add_typer(token, name="token")
cli.add_typer(past)
cli.add_typer(exporting)
cli.add_typer(looking)
cli.add_typer(operating)
cli.add_typer(remote)
cli.add_typer(predicting)
cli.command()(faults)
cli.command()(replica)
cli.command()(serve)

Fresh = Annotated[
    bool, typer.Option("--fresh", help="Remove the run in the store and start again; default: continue it.")
]
Listen = Annotated[
    str | None, typer.Option("--listen", metavar="HOST:PORT", help="Serve the API, for example at 127.0.0.1:8080.")
]


@cli.command()
def run(
    job: SpecFile,
    overrides: Overrides = [],  # noqa: B006  # typer copies it
    fresh: Fresh = False,
    listen: Listen = None,
) -> None:
    """Run a job in the foreground until its stream ends, or Ctrl-C."""
    raise typer.Exit(run_job(load_job(job, overrides), show_here(), fresh=fresh, listen=listen))


@cli.command()
def demo(
    events: Annotated[
        int | None, typer.Option(min=1, help="Number of events after which to end; default: at Ctrl-C.")
    ] = None,
    overrides: Overrides = [],  # noqa: B006
    listen: Listen = None,
) -> None:
    """Watch a job learn from a simulated click stream next to a frozen twin; in runs/demo, fresh each time."""
    from service.demo.running import (
        run_demo,
    )  # imported late: the server's imports would double the start time of every command

    raise typer.Exit(run_demo(events, overrides, listen, Path.cwd() / "runs" / "demo"))


@spec.command()
def check(job: SpecFile, overrides: Overrides = []) -> None:  # noqa: B006
    """Check whether the job could start here, and print what is wrong if not."""
    loaded = load_job(job, overrides)
    missing = check_job(loaded)
    cluster = loaded.spec.cluster
    print(f"{job} is valid")
    print(f"job {loaded.spec.name}; trainers {cluster.trainers}; shards {cluster.num_shards or 'embedded'}")
    print(f"store {loaded.store}")
    if missing is not None:
        print(f"note: a run is refused until there is data: {missing}")


@spec.command()
def schema() -> None:
    """Print the JSON Schema of job specs."""
    print(json.dumps(Job.model_json_schema(), indent=2))


@cli.command()
def version() -> None:
    """Print Millrace's version."""
    print(millrace.__version__)


def main() -> None:
    """Run the command line. An error for the user is printed as one line."""
    sys.exit(exit_code_of(cli))
