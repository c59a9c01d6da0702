"""The commands about a job's exports. Reads arguments; the work is done beside it."""

from typing import Annotated, Literal

import typer

from millrace.deadline import Deadline
from millrace.errors import SpecError
from millrace.mistakes import nearest
from millrace.printable import say
from service.arguments import Json, Overrides, SpecFile
from service.exports import listing
from service.exports.wishing import make_export
from service.past.commands import ran
from service.remote import acting
from service.remote.asking import JobOrFile, Token, Url, remote_name, service_at
from service.spec import LoadedJob, load_job

exporting = typer.Typer()
exports = typer.Typer(no_args_is_help=True, help="A job's exports: what is there, what is pointed to.")
exporting.add_typer(exports, name="exports")

OneStream = Annotated[str | None, typer.Option("--stream", metavar="NAME", help="Only this stream's.")]
StreamName = Annotated[str, typer.Argument(metavar="STREAM", help="The stream's name.", show_default=False)]
Name = Annotated[str, typer.Argument(metavar="NAME", help="An export's name, or its version.", show_default=False)]


def the_stream(job: LoadedJob, name: str | None) -> str:
    """The stream called `name`, or the only one. Raises SpecError."""
    if name is not None and name not in job.spec.exports:
        raise SpecError(f"there is no stream {name!r}; {nearest(name, job.spec.exports)}", "exports")
    if name is not None:
        return name
    if len(job.spec.exports) != 1:
        streams = ", ".join(job.spec.exports) or "none"
        raise SpecError(f"name one with --stream; the job has: {streams}", "exports")
    return next(iter(job.spec.exports))


@exports.command("list")
def list_(
    job: SpecFile,
    overrides: Overrides = [],  # noqa: B006  # typer copies it
    stream: OneStream = None,
    as_json: Json = False,
) -> None:
    """Print the exports, oldest first."""
    listing.list_exports(load_job(job, overrides), stream, as_json=as_json)


@exports.command()
def show(
    job: SpecFile,
    name: Name,
    overrides: Overrides = [],  # noqa: B006
    stream: OneStream = None,
    as_json: Json = False,
) -> None:
    """Print what an export holds; as JSON, its whole manifest."""
    loaded = load_job(job, overrides)
    listing.show_export(loaded, the_stream(loaded, stream), name, as_json=as_json)


@exports.command()
def point(job: SpecFile, stream: StreamName, name: Name, overrides: Overrides = []) -> None:  # noqa: B006
    """Have current.json name an export, be it an older one, until the job points to its next."""
    pointed = listing.point_to(load_job(job, overrides), stream, name)
    print(f"{pointed.url} is current")
    if pointed.failed_gates:
        say(f"it failed its gates: {', '.join(pointed.failed_gates)}")


@exporting.command()
def export(
    job: JobOrFile,
    overrides: Overrides = [],  # noqa: B006
    stream: OneStream = None,
    kind: Annotated[
        Literal["base", "delta"] | None, typer.Option("--kind", help="Unless given, a delta where the stream has them.")
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", min=1, metavar="SECONDS", help="How long to wait.")] = 600.0,
    url: Url = None,
    token: Token = None,
) -> None:
    """Have a running job export its present state, and wait until that is complete."""
    if (name := remote_name(job, url)) is not None:
        with service_at(url, token) as client:
            print(acting.export(client, name, stream, kind, Deadline.after(timeout)))
        return
    loaded = ran(job, overrides)
    print(make_export(loaded.store, the_stream(loaded, stream), kind, Deadline.after(timeout)))
