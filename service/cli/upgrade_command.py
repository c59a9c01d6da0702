"""`headrace upgrade`: jobs of a service move to another build."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from headrace.deadline import Deadline
from headrace.errors import SpecError
from headrace.printable import print_printable
from headrace.service.cli.arguments import Json
from headrace.service.cli.panels import Panel
from headrace.service.cli.targets import Token, Url, Wait, path_of, service_at

app = typer.Typer()

UPGRADE_S = 1800.0
"""Longest time to wait for jobs that move to another build: as long as the service waits for one."""


@app.command(rich_help_panel=Panel.SERVICE)
def upgrade(
    job: Annotated[str | None, typer.Argument(metavar="JOB", help="The job's name.", show_default=False)] = None,
    build: Annotated[
        str,
        typer.Option("--build", metavar="NAME", help="A build of the service's file. Default: the service's own."),
    ] = "",
    everything: Annotated[bool, typer.Option("--all", help="All jobs, one by one, until one fails.")] = False,
    timeout: Wait = UPGRADE_S,
    url: Url = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Move a service's job to another build of Headrace, at a close. Waits until it trains there.

    Example: headrace upgrade clicks --build next
    """
    if (job is None) != everything:
        raise SpecError("name either a job or --all", "JOB")
    if job is not None and ("/" in job or job.endswith(".toml")):
        raise SpecError(f"{job} is a job file on this machine; use the name of a job of the service", "JOB")
    with service_at(url, token) as client:
        path = "/v1/upgrade" if job is None else path_of("jobs", job, "upgrade")
        done = client.carry_out(path, {"build": build}, Deadline.after(timeout))
    moved = done["jobs"] if job is None else [done]
    print_printable(json.dumps(moved, indent=2) if as_json else "\n".join(moved_lines(moved)))


def moved_lines(moved: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each job that was moved."""
    return [f"{each['job']}: {each['was'] or 'at rest'} -> {each['version']}" for each in moved] or ["no jobs"]
