"""The commands for a job's exports. They read arguments and print; the other modules do the work."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from headrace.deadline import Deadline
from headrace.errors import SpecError
from headrace.printable import print_printable
from headrace.service.cli.arguments import Json, Overrides, SpecFile
from headrace.service.cli.history_commands import load_run
from headrace.service.cli.targets import JobOrFile, Token, Url, remote_name, service_at
from headrace.service.client import job_actions
from headrace.service.exports import export_list
from headrace.service.exports.export_request import make_export
from headrace.service.monitor.lines import count, pending_text
from headrace.service.spec.job import LoadedJob, load_job
from headrace.validation import nearest

WIDE = 240
"""Columns of a table that is not printed to a terminal."""

exporting = typer.Typer()
exports = typer.Typer(no_args_is_help=True, help="A job's exports: list, show, choose the current one.")
exporting.add_typer(exports, name="exports")

OneStream = Annotated[str | None, typer.Option("--stream", metavar="NAME", help="Only this stream.")]
StreamName = Annotated[str, typer.Argument(metavar="STREAM", help="The stream's name.", show_default=False)]
Name = Annotated[str, typer.Argument(metavar="NAME", help="An export's name, or its version.", show_default=False)]


def choose_stream(job: LoadedJob, name: str | None) -> str:
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
    list_exports(load_job(job, overrides), stream, as_json=as_json)


@exports.command()
def show(
    job: SpecFile,
    name: Name,
    overrides: Overrides = [],  # noqa: B006
    stream: OneStream = None,
    as_json: Json = False,
) -> None:
    """Print what an export contains; as JSON, its whole manifest."""
    loaded = load_job(job, overrides)
    show_export(loaded, choose_stream(loaded, stream), name, as_json=as_json)


@exports.command()
def point(job: SpecFile, stream: StreamName, name: Name, overrides: Overrides = []) -> None:  # noqa: B006
    """Have current.json name an export, also an older one, until the job's next export replaces it."""
    pointed = export_list.make_current(load_job(job, overrides), stream, name)
    print(f"{pointed.url} is current")
    if pointed.failed_gates:
        print_printable(f"it failed its gates: {', '.join(pointed.failed_gates)}")


@exporting.command()
def export(
    job: JobOrFile,
    overrides: Overrides = [],  # noqa: B006
    stream: OneStream = None,
    kind: Annotated[
        Literal["base", "delta"] | None, typer.Option("--kind", help="Default: a delta, if the stream has deltas.")
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1, metavar="SECONDS", help="Longest time to wait.")
    ] = 600.0,
    url: Url = None,
    token: Token = None,
) -> None:
    """Have a running job export its present state, and wait until the export is complete."""
    if (name := remote_name(job, url)) is not None:
        with service_at(url, token) as client:
            print(job_actions.export(client, name, stream, kind, Deadline.after(timeout)))
        return
    loaded = load_run(job, overrides)
    print(make_export(loaded.store, choose_stream(loaded, stream), kind, Deadline.after(timeout)))


# Print


def list_exports(job: LoadedJob, name: str | None, *, as_json: bool) -> None:
    """Print the exports in order of time, one row each."""
    with export_list.open_streams(job, name) as streams:
        entries = [entry for stream in streams for entry in export_list.entries_of(stream)]
    if as_json:
        print(json.dumps(entries, indent=2))
    elif not entries:
        print("there are no exports yet")
    else:
        console = Console(highlight=False)
        (console if console.is_terminal else Console(highlight=False, width=WIDE)).print(_table(entries))


def _table(entries: Iterable[Mapping[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("stream", "export", "made at", "rows", "deleted", "pending", "bytes", ""):
        table.add_column(heading, justify="right" if heading in ("rows", "deleted", "pending", "bytes") else "left")
    for entry in entries:
        counts = [count(entry[key]) for key in ("rows", "tombstones", "pending", "bytes")]
        path = f"{entry['timeline']}/{entry['name']}"
        table.add_row(entry["stream"], path, entry["made_at"] or "-", *counts, _remark(entry))
    return table


def _remark(entry: Mapping[str, Any]) -> str:
    remarks = []
    if entry["current"]:
        remarks.append("current")
    if not entry["complete"]:
        remarks.append("not complete")
    if entry["damaged"]:
        remarks.append(f"damaged: {entry['damaged']}")
    if entry["failed_gates"]:
        remarks.append(f"failed gates: {', '.join(entry['failed_gates'])}")
    return "; ".join(remarks)


def show_export(job: LoadedJob, stream: str, text: str, *, as_json: bool) -> None:
    """Print what an export contains; as JSON, its whole manifest."""
    found = export_list.export_details(job, stream, text)
    for line in [json.dumps(found.manifest, indent=2)] if as_json else _details(found):
        print_printable(line)


def _details(shown: export_list.CompleteExport) -> Iterator[str]:
    manifest, parent = shown.manifest, shown.manifest["parent"]
    yield f"{shown.url}{' (current)' if shown.current else ''}"
    yield f"  {manifest['kind']} of version {manifest['version']}, made {manifest['made_at']}: {manifest['why']}"
    if parent is not None:
        yield f"  builds on {parent['timeline']}/{parent['name']}"
    for name, table in manifest["tables"].items():
        yield (
            f"  table {name}: {count(table['rows'])} rows, {count(table['tombstones'])} deleted, "
            f"{pending_text(table)}; {count(table['model_rows'])} rows in the model; {table['dtype']}"
        )
    for gate, found in manifest["gates"].items():
        yield f"  gate {gate}: {'passed' if found['passed'] else 'failed: ' + found['why']}"
    yield f"  files: {len(manifest['files'])}, {count(sum(file['bytes'] for file in manifest['files'].values()))} bytes"
