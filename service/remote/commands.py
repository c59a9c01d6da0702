"""The commands that ask a service about its jobs, and have it act on them. Reads arguments; the work is beside it.

Those that are also for job files of this machine (commit, export, set, predict) are with these; they ask by
service.remote.acting.
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from millrace import documents
from millrace.config import load_toml
from millrace.errors import SpecError
from millrace.printable import say
from service.arguments import Json, Overrides
from service.remote import showing
from service.remote.asking import JobName, Token, Url, path_of, service_at

remote = typer.Typer()


@remote.command()
def submit(
    job: Annotated[Path, typer.Argument(metavar="JOB.TOML", help="The job spec, here.", show_default=False)],
    overrides: Overrides = [],  # noqa: B006  # typer copies it
    name: Annotated[str | None, typer.Option("--name", help="Stands before the spec's.")] = None,
    base: Annotated[
        str | None,
        typer.Option("--base", metavar="DIR", help="Folder at the service where the spec's relative paths start."),
    ] = None,
    hold: Annotated[bool, typer.Option("--hold", help="Do not begin: until somebody resumes it.")] = False,
    url: Url = None,
    token: Token = None,
) -> None:
    """Have a service run a job; print its name."""
    asked = {"spec": _plain(load_toml(job, overrides)), "name": name, "base": base, "start": not hold}
    with service_at(url, token) as client:
        made = client.post("/v1/jobs", {key: value for key, value in asked.items() if value is not None})
    print(made["name"])


@remote.command("ls")
def list_(url: Url = None, token: Token = None, as_json: Json = False) -> None:
    """Print a service's jobs, and where each stands."""
    with service_at(url, token) as client:
        jobs = list(client.items("/v1/jobs"))
    if as_json:
        print(json.dumps(jobs, indent=2))
    else:
        for line in showing.job_lines(jobs):
            say(line)


@remote.command()
def status(job: JobName, url: Url = None, token: Token = None, as_json: Json = False) -> None:
    """Print how a job is."""
    with service_at(url, token) as client:
        told = client.get(path_of("jobs", job))
    if as_json:
        print(json.dumps(told, indent=2))
    else:
        say(*showing.status_lines(told), sep="\n")


@remote.command()
def watch(job: JobName, url: Url = None, token: Token = None) -> None:
    """Print a job's progress as it comes, until the job ends; exit code 1 where it failed."""
    with service_at(url, token) as client:
        for line in showing.watched(client, job):
            say(line, flush=True)
        phase = client.get(path_of("jobs", job))["phase"]
    raise typer.Exit(1 if phase in ("failed", "broken") else 0)


@remote.command()
def logs(
    job: JobName,
    worker: Annotated[str | None, typer.Option("--worker", metavar="NAME", help='Only its lines: "trainer-0".')] = None,
    last: Annotated[int, typer.Option("--last", min=1, max=showing.PAGE, help="So many lines, the newest.")] = 50,
    everything: Annotated[bool, typer.Option("--all", help="All that are kept, in place of the newest.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Wait for more, until Ctrl-C.")] = False,
    url: Url = None,
    token: Token = None,
) -> None:
    """Print what a job's processes printed."""
    with service_at(url, token) as client:
        for line in showing.output_lines(client, job, worker, None if everything else last, follow=follow):
            say(line, flush=follow)


def _action(name: str, told: str) -> None:
    def act(job: JobName, url: Url = None, token: Token = None) -> None:
        with service_at(url, token) as client:
            done = client.post(path_of("jobs", job, name))
        say(showing.stands(done))

    act.__doc__ = told
    remote.command(name)(act)


_action("pause", "Have a service's job train no new pass; its workers stay.")
_action("resume", "Have a service's job train on; one that has ended begins again where it was.")
_action("drain", "Have a service's job finish its pass, commit, complete its exports and end.")
_action("stop", "As drain, but a job that takes long to end is killed.")
_action("restart", "Stop a service's job, then begin it again where it was.")


@remote.command()
def delete(
    job: JobName,
    keep_store: Annotated[bool, typer.Option("--keep-store", help="Leave its store on the disk.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask first.")] = False,
    url: Url = None,
    token: Token = None,
) -> None:
    """Have a service forget a job that does not run, with its folder and store."""
    if not yes:
        what = "" if keep_store else ", with all that it has learnt"
        typer.confirm(f"Delete the job {job!r}{what}?", abort=True)
    with service_at(url, token) as client:
        client.change("DELETE", path_of("jobs", job), keep_store=str(keep_store).lower())
    print(f"{job} is deleted")


def _plain(raw: dict[str, object]) -> object:
    """A spec as JSON has it: TOML's times as text."""
    try:
        return documents.parse(json.dumps(raw, default=str, allow_nan=False), "the spec")
    except ValueError as error:
        raise SpecError(f"a number of the spec is none: {error}") from None
