"""The commands that show, start, change and stop the jobs of a service.

The commands that also work on job files of this machine (commit, export, set, predict) are elsewhere; they use
service.client.job_actions.
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from headrace import documents
from headrace.config import load_toml
from headrace.errors import SpecError
from headrace.printable import print_printable
from headrace.service.cli import service_output
from headrace.service.cli.arguments import Json, Overrides
from headrace.service.cli.targets import JobName, Token, Url, service_at
from headrace.service.client.paths import path_of

remote = typer.Typer()


@remote.command()
def submit(
    job: Annotated[Path, typer.Argument(metavar="JOB.TOML", help="The job spec, here.", show_default=False)],
    overrides: Overrides = [],  # noqa: B006  # typer copies it
    name: Annotated[str | None, typer.Option("--name", help="Overrides the name in the spec.")] = None,
    base: Annotated[
        str | None,
        typer.Option("--base", metavar="DIR", help="Folder at the service for the spec's relative paths."),
    ] = None,
    hold: Annotated[bool, typer.Option("--hold", help="Do not start until `resume`.")] = False,
    url: Url = None,
    token: Token = None,
) -> None:
    """Have a service run a job; print the job's name."""
    body = {"spec": _plain(load_toml(job, overrides)), "name": name, "base": base, "start": not hold}
    with service_at(url, token) as client:
        made = client.post("/v1/jobs", {key: value for key, value in body.items() if value is not None})
    print(made["name"])


@remote.command("ls")
def list_(url: Url = None, token: Token = None, as_json: Json = False) -> None:
    """Print a service's jobs and their phases."""
    with service_at(url, token) as client:
        jobs = list(client.items("/v1/jobs"))
    if as_json:
        print(json.dumps(jobs, indent=2))
    else:
        for line in service_output.job_lines(jobs):
            print_printable(line)


@remote.command()
def status(job: JobName, url: Url = None, token: Token = None, as_json: Json = False) -> None:
    """Print a job's phase, figures and alarms."""
    with service_at(url, token) as client:
        found = client.get(path_of("jobs", job))
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        print_printable(*service_output.status_lines(found), sep="\n")


@remote.command()
def watch(job: JobName, url: Url = None, token: Token = None) -> None:
    """Print a job's progress until the job ends; exit code 1 if it failed."""
    with service_at(url, token) as client:
        for line in service_output.progress_lines(client, job):
            print_printable(line, flush=True)
        phase = client.get(path_of("jobs", job))["phase"]
    raise typer.Exit(1 if phase in ("failed", "broken") else 0)


@remote.command()
def logs(
    job: JobName,
    worker: Annotated[
        str | None, typer.Option("--worker", metavar="NAME", help='Only lines of this worker, as in "trainer-0".')
    ] = None,
    last: Annotated[
        int, typer.Option("--last", min=1, max=service_output.PAGE, help="Print the newest lines, this many.")
    ] = 50,
    everything: Annotated[bool, typer.Option("--all", help="Print all lines that are kept.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Wait for more, until Ctrl-C.")] = False,
    url: Url = None,
    token: Token = None,
) -> None:
    """Print the output of a job's processes."""
    with service_at(url, token) as client:
        for line in service_output.output_lines(client, job, worker, None if everything else last, follow=follow):
            print_printable(line, flush=follow)


def _action(name: str, description: str) -> None:
    def act(job: JobName, url: Url = None, token: Token = None) -> None:
        with service_at(url, token) as client:
            done = client.post(path_of("jobs", job, name))
        print_printable(service_output.phase_line(done))

    act.__doc__ = description
    remote.command(name)(act)


_action("pause", "Have a service's job start no new pass; its workers keep running.")
_action("resume", "Have a service's job continue; a job that has ended starts again where it stopped.")
_action("drain", "Have a service's job finish its pass, commit, complete its exports and end.")
_action("stop", "Like drain, but a job that takes long to end is killed.")
_action("restart", "Stop a service's job, then start it again where it stopped.")


@remote.command()
def delete(
    job: JobName,
    keep_store: Annotated[bool, typer.Option("--keep-store", help="Keep its store on the disk.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask first.")] = False,
    url: Url = None,
    token: Token = None,
) -> None:
    """Delete a job that does not run from a service, with its folder and store."""
    if not yes:
        extent = "" if keep_store else ", with all that it has learned"
        typer.confirm(f"Delete the job {job!r}{extent}?", abort=True)
    with service_at(url, token) as client:
        client.change("DELETE", path_of("jobs", job), keep_store=str(keep_store).lower())
    print(f"{job} is deleted")


def _plain(raw: dict[str, object]) -> object:
    """A spec as JSON values: TOML times become text."""
    try:
        return documents.parse(json.dumps(raw, default=str, allow_nan=False), "the spec")
    except ValueError as error:
        raise SpecError(f"the spec contains a number that JSON cannot carry: {error}") from None
