"""The commands for a job's exports. They read arguments; the other modules do the work."""

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from headrace.deadline import Deadline
from headrace.errors import SpecError
from headrace.printable import print_printable
from headrace.service.cli.arguments import Json, Overrides, SpecFile
from headrace.service.cli.history_commands import load_run
from headrace.service.cli.panels import Panel, PanelledGroup
from headrace.service.cli.progress import work_progress
from headrace.service.cli.targets import JobOrFile, Token, Url, Wait, path_of, remote_name, service_at

if TYPE_CHECKING:
    from headrace.service.python.rest_client import ServiceClient
    from headrace.service.spec.job import LoadedJob

app = typer.Typer()
exports = typer.Typer(
    cls=PanelledGroup, no_args_is_help=True, help="List and show exports of a job, and choose the current one."
)
app.add_typer(exports, name="exports", rich_help_panel=Panel.SERVE)

OneStream = Annotated[str | None, typer.Option("--stream", metavar="NAME", help="Only this stream of exports.")]
StreamName = Annotated[
    str, typer.Argument(metavar="STREAM", help="Name of the stream, as in [exports.NAME].", show_default=False)
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="An export's name, or its version.", show_default=False)]


def choose_stream(job: "LoadedJob", name: str | None) -> str:
    """The stream called `name`, or the only one. Raises SpecError."""
    from headrace.validation import no_such

    if name is not None and name not in job.spec.exports:
        raise SpecError(no_such("stream", name, job.spec.exports), "exports")
    if name is not None:
        return name
    return _only(job.spec.exports)


def _only_stream(client: "ServiceClient", job: str) -> str:
    return _only(client.get(path_of("jobs", job, "spec"))["spec"].get("exports", {}))


def _only(streams: Iterable[str]) -> str:
    """The one stream of exports. Raises SpecError if there is another number."""
    names = list(streams)
    if len(names) != 1:
        raise SpecError(f"name one with --stream; the job has: {', '.join(names) or 'none'}", "exports")
    return names[0]


@app.command(rich_help_panel=Panel.SERVE)
def export(
    job: JobOrFile,
    overrides: Overrides = [],  # noqa: B006  # typer copies it
    stream: OneStream = None,
    kind: Annotated[
        Literal["base", "delta"] | None, typer.Option("--kind", help="Default: a delta, if the stream has deltas.")
    ] = None,
    timeout: Wait = 600.0,
    url: Url = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Export the present state of a running job. Waits until the export is complete.

    Example: headrace export job.toml --stream serving
    """
    if (name := remote_name(job, url)) is not None:
        with service_at(url, token) as client:
            chosen = _only_stream(client, name) if stream is None else stream
            body = {"stream": chosen, **({} if kind is None else {"kind": kind})}
            made = client.carry_out(path_of("jobs", name, "exports"), body, Deadline.after(timeout))
    else:
        from headrace.service.exports.export_request import make_export

        loaded = load_run(job, overrides)
        chosen = choose_stream(loaded, stream)
        with work_progress(f"exporting {chosen}"):
            made = make_export(loaded.store, chosen, kind, Deadline.after(timeout)).message(chosen)
    print(json.dumps(made, indent=2) if as_json else made["said"])


@exports.command("list")
def list_(
    job: SpecFile,
    overrides: Overrides = [],  # noqa: B006  # typer copies it
    stream: OneStream = None,
    as_json: Json = False,
) -> None:
    """Print the exports, oldest first.

    Example: headrace exports list job.toml
    """
    from headrace.service.cli.export_output import list_exports
    from headrace.service.spec.job import load_job

    list_exports(load_job(job, overrides), stream, as_json=as_json)


@exports.command()
def show(
    job: SpecFile,
    name: Name,
    overrides: Overrides = [],  # noqa: B006
    stream: OneStream = None,
    as_json: Json = False,
) -> None:
    """Print the content of an export; as JSON, its whole manifest.

    Example: headrace exports show job.toml 17
    """
    from headrace.service.cli.export_output import show_export
    from headrace.service.spec.job import load_job

    loaded = load_job(job, overrides)
    show_export(loaded, choose_stream(loaded, stream), name, as_json=as_json)


@exports.command()
def point(
    job: SpecFile,
    stream: StreamName,
    name: Name,
    overrides: Overrides = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Make an export the current one, also an older one, until the job's next export replaces it.

    Its name is written to the stream's current.json.

    Example: headrace exports point job.toml serving 0000000017-base
    """
    from headrace.service.exports import export_list
    from headrace.service.spec.job import load_job

    pointed = export_list.make_current(load_job(job, overrides), stream, name)
    if as_json:
        print(json.dumps({"address": pointed.url, "failed_gates": pointed.failed_gates}, indent=2))
        return
    print(f"{pointed.url} is current")
    if pointed.failed_gates:
        print_printable(f"it failed its gates: {', '.join(pointed.failed_gates)}")
