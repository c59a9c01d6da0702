"""The commands that show, start, change and stop the jobs of a service.

The commands that also work on job files of this machine (commit, export, set, resize, predict) are elsewhere.
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from headrace.deadline import Deadline
from headrace.errors import SpecError
from headrace.printable import print_printable
from headrace.service.cli import service_output
from headrace.service.cli.arguments import Json, Overrides
from headrace.service.cli.panels import Panel
from headrace.service.cli.targets import JobName, Token, Url, path_of, service_at

app = typer.Typer()

TRACE_S = 360.0
"""Longest time to wait for a trace: the service gives up after 300 s."""


@app.command(rich_help_panel=Panel.SERVICE)
def submit(
    job: Annotated[Path, typer.Argument(metavar="JOB.TOML", help="The job file, on this machine.", show_default=False)],
    overrides: Overrides = [],  # noqa: B006  # typer copies it
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Override the name in the job file.")
    ] = None,
    base: Annotated[
        str | None,
        typer.Option("--base", metavar="DIR", help="Folder at the service for relative paths of the job file."),
    ] = None,
    hold: Annotated[bool, typer.Option("--hold", help="Do not start it until `headrace resume`.")] = False,
    url: Url = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Hand a job to a service, which runs it. Prints the job's name.

    Example: headrace submit job.toml --url https://train.example:8080
    """
    from headrace.service.python.service_connection import submission

    body = submission(job, overrides, name, base, start=not hold)
    with service_at(url, token) as client:
        made = client.post("/v1/jobs", body)
    print(json.dumps(made, indent=2) if as_json else made["name"])


@app.command("ls", rich_help_panel=Panel.SERVICE)
def list_(url: Url = None, token: Token = None, as_json: Json = False) -> None:
    """List the jobs of a service, with their phases.

    Example: headrace ls --url https://train.example:8080
    """
    with service_at(url, token) as client:
        jobs = list(client.items("/v1/jobs"))
    if as_json:
        print(json.dumps(jobs, indent=2))
    else:
        for line in service_output.job_lines(jobs):
            print_printable(line)


@app.command(rich_help_panel=Panel.SERVICE)
def status(job: JobName, url: Url = None, token: Token = None, as_json: Json = False) -> None:
    """Print a job's phase, figures and alarms.

    Example: headrace status clicks --url https://train.example:8080
    """
    with service_at(url, token) as client:
        found = client.get(path_of("jobs", job))
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        print_printable(*service_output.status_lines(found), sep="\n")


@app.command(rich_help_panel=Panel.SERVICE)
def watch(job: JobName, url: Url = None, token: Token = None, as_json: Json = False) -> None:
    """Print a job's progress until the job ends. Exit code 1 if it failed. With --json an object a line.

    Example: headrace watch clicks --url https://train.example:8080
    """
    with service_at(url, token) as client:
        for line in service_output.progress_lines(client, job, as_json=as_json):
            print_printable(line, flush=True)
        phase = client.get(path_of("jobs", job))["phase"]
    raise typer.Exit(1 if phase in ("failed", "broken") else 0)


@app.command(rich_help_panel=Panel.SERVICE)
def logs(
    job: JobName,
    worker: Annotated[
        str | None, typer.Option("--worker", metavar="NAME", help='Only lines of this worker, as in "trainer-0".')
    ] = None,
    last: Annotated[
        int,
        typer.Option("--last", min=1, max=service_output.PAGE, metavar="N", help="Print the newest lines, this many."),
    ] = 50,
    everything: Annotated[bool, typer.Option("--all", help="Print all lines that the service keeps.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Wait for more lines, until Ctrl-C.")] = False,
    url: Url = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Print the output of a job's processes. With --json an object a line.

    Example: headrace logs clicks --worker trainer-0 --follow
    """
    with service_at(url, token) as client:
        for line in service_output.output_lines(client, job, worker, None if everything else last, follow=follow):
            print_printable(json.dumps(line) if as_json else f"{line['worker']}: {line['text']}", flush=follow)


@app.command(rich_help_panel=Panel.LOOK)
def settings(
    job: JobName,
    everything: Annotated[bool, typer.Option("--all", help="Also those that nobody changed.")] = False,
    url: Url = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Print the settings of a service's job that were changed while it ran, and changes of its file that wait.

    Example: headrace settings clicks --url https://train.example:8080
    """
    with service_at(url, token) as client:
        found = client.get(path_of("jobs", job, "settings"))
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        print_printable(*service_output.settings_lines(found, everything), sep="\n")


@app.command(rich_help_panel=Panel.LOOK)
def trace(
    job: JobName,
    output: Annotated[Path, typer.Option("--output", metavar="FILE", help="Where to write it.")] = Path("trace.json"),
    steps: Annotated[int, typer.Option("--steps", min=1, metavar="N", help="Steps of every worker.")] = 200,
    url: Url = None,
    token: Token = None,
) -> None:
    """Record what each thread of a service's running job does in its next steps, as a file for ui.perfetto.dev.

    For a job file: headrace run job.toml --trace steps=200

    Example: headrace trace clicks --url https://train.example:8080
    """
    from headrace.durable import writing

    path = path_of("jobs", job, "trace")
    if not output.absolute().parent.is_dir():
        raise SpecError(f"{output.absolute().parent}: no such folder", "--output")
    with service_at(url, token) as client:
        print_printable(f"at the service: {client.carry_out(path, {'steps': steps}, Deadline.after(TRACE_S))['said']}")
        found = client.get(path)
    with writing(output):
        output.write_text(json.dumps(found))
    print(f"{output} is written; open it in https://ui.perfetto.dev")


def _action(name: str, description: str) -> None:
    def act(job: JobName, url: Url = None, token: Token = None, as_json: Json = False) -> None:
        with service_at(url, token) as client:
            done = client.post(path_of("jobs", job, name))
        print_printable(json.dumps(done, indent=2) if as_json else service_output.phase_line(done))

    example = f"Example: headrace {name} clicks --url https://train.example:8080"
    app.command(name, rich_help_panel=Panel.SERVICE, help=f"{description}\n\n{example}")(act)


_action("pause", "Stop a service's job from starting new passes; its workers keep running.")
_action("resume", "Continue a service's job; a job that has ended starts again where it stopped.")
_action("drain", "End a service's job in order: it finishes its pass, commits and completes its exports.")
_action("stop", "Like drain, but a job that takes long to end is killed.")
_action("restart", "Stop a service's job, then start it again where it stopped.")


@app.command(rich_help_panel=Panel.SERVICE)
def delete(
    job: JobName,
    keep_store: Annotated[bool, typer.Option("--keep-store", help="Keep the job's store on the disk.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask first.")] = False,
    url: Url = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Delete a job that does not run from a service, with its folder and store.

    Example: headrace delete clicks --keep-store
    """
    if not yes:
        extent = "" if keep_store else ", with all that it has learned"
        typer.confirm(f"Delete the job {job!r}{extent}?", abort=True, err=as_json)
    with service_at(url, token) as client:
        client.change("DELETE", path_of("jobs", job), keep_store=str(keep_store).lower())
    print(json.dumps({"job": job, "store_kept": keep_store}) if as_json else f"{job} is deleted")
