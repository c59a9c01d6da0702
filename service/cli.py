"""The command line: `millrace run | demo | spec | version`. Reads arguments; the work is done elsewhere."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

import millrace
from millrace.lifecycle import exit_code_of
from service.running import PlainShow, run_job
from service.spec import Job, load_job

cli = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train a recommendation model on an event stream.",
)
spec = typer.Typer(no_args_is_help=True, help="Check a job spec; print what may stand in one.")
cli.add_typer(spec, name="spec")

SpecFile = Annotated[Path, typer.Argument(metavar="JOB.TOML", help="The job spec.", show_default=False)]
Overrides = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Put a value in the spec's place, as in a.b=1.")
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Remove the run that the store holds, and begin anew.")]


@cli.command()
def run(job: SpecFile, overrides: Overrides = [], fresh: Fresh = False) -> None:  # noqa: B006  # typer copies it
    """Run a job in the foreground until its stream ends, or Ctrl-C."""
    raise typer.Exit(run_job(load_job(job, overrides), PlainShow(), fresh=fresh))


@spec.command()
def check(job: SpecFile, overrides: Overrides = []) -> None:  # noqa: B006
    """Say whether a job spec is right, and if not, what is wrong."""
    loaded = load_job(job, overrides)
    cluster = loaded.spec.cluster
    shards = f"{cluster.num_shards} shards" if cluster.num_shards else "the shard embedded"
    print(f"{job}: job {loaded.spec.name!r} is right: {cluster.trainers} trainers, {shards}, store {loaded.store}")


@spec.command()
def schema() -> None:
    """Print the JSON Schema of job specs."""
    print(json.dumps(Job.model_json_schema(), indent=2))


@cli.command()
def version() -> None:
    """Print Millrace's version."""
    print(millrace.__version__)


def main() -> None:
    """Run the command line; an error made for people is printed as one line."""
    sys.exit(exit_code_of(cli))
