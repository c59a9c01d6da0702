"""The commands that inspect exports and commits, and the warm start. They read arguments and print."""

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.errors import HeadraceError, SpecError
from headrace.printable import print_printable
from headrace.service.cli.arguments import Json, Overrides, SpecFile
from headrace.service.cli.panels import Panel
from headrace.service.cli.progress import counted, work_progress

if TYPE_CHECKING:
    from headrace.service.spec.job import LoadedJob

app = typer.Typer()

OfJob = Annotated[Path | None, typer.Option("--job", metavar="JOB.TOML", help="The names are commits of this job.")]
Top = Annotated[
    int, typer.Option("--top", min=0, metavar="N", help="How many of the rows that moved farthest to name.")
]
Address = Annotated[
    str, typer.Argument(metavar="EXPORT", help="Its folder or its address in an object store.", show_default=False)
]


def _job(path: Path | None, overrides: list[str]) -> "LoadedJob | None":
    from headrace.service.spec.job import load_job

    return None if path is None else load_job(path, overrides)


@app.command(rich_help_panel=Panel.LOOK)
def inspect(
    name: Annotated[str, typer.Argument(help="An export's address, or a commit.", show_default=False)],
    job: OfJob = None,
    overrides: Overrides = [],  # noqa: B006  # typer copies it
    top: Top = 10,
    as_json: Json = False,
) -> None:
    """Print what an export or a commit contains, whether it is sound, and what moved. Exit code 1 if it is damaged.

    Example: headrace inspect runs/clicks/exports/serving/clicks
    """
    from headrace.service.history.inspection import inspect

    if not inspect(_job(job, overrides), name, top, as_json=as_json):
        raise typer.Exit(1)


@app.command(rich_help_panel=Panel.LOOK)
def diff(
    old: Annotated[str, typer.Argument(help="An export's address, or a commit.", show_default=False)],
    new: Annotated[str, typer.Argument(help="Another export or commit.", show_default=False)],
    job: OfJob = None,
    overrides: Overrides = [],  # noqa: B006
    top: Top = 10,
    as_json: Json = False,
) -> None:
    """Compare the whole models of two exports or commits. Exit code 0: equal, 1: different, 2: an error.

    Example: headrace diff 16 17 --job job.toml
    """
    from headrace.service.history import model_comparison, model_state

    try:
        with model_state.ModelSource(_job(job, overrides)).states(old, new) as (before, after):
            found = model_comparison.compare(before, after, top)
    except HeadraceError as error:
        print_printable(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    if as_json:
        print(json.dumps(found.message(), indent=2))
    else:
        for line in model_comparison.format_difference(found):
            print_printable(line)
    raise typer.Exit(int(found.differs))


@app.command(rich_help_panel=Panel.SERVE)
def materialize(
    export: Address,
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where to write the base; created.")],
    to: Annotated[int | None, typer.Option("--to", metavar="VERSION", help="Up to this version.")] = None,
    at: Annotated[str | None, typer.Option("--at", metavar="TIME", help="Up to this event time, ISO 8601.")] = None,
    as_json: Json = False,
) -> None:
    """Merge a base and its deltas into one base.

    Example: headrace materialize s3://models/clicks --out merged
    """
    from headrace.service.history import model_state
    from headrace.service.monitor.lines import count
    from headrace.trainer.exports.materialize import at_time, at_version
    from headrace.trainer.exports.materialize import materialize as write_export
    from headrace.trainer.exports.reader import open_export

    if to is not None and at is not None:
        raise SpecError("give --to or --at, not both")
    with model_state.export_folder() as folder:
        last = open_export(export, folder)
        if to is not None:
            last = at_version(last, to)
        elif at is not None:
            last = at_time(last, seconds_of(at))
        with work_progress("merging", "rows") as progress:
            manifest = write_export(last, out.absolute(), progress.count)
    rows = sum(int(table["rows"]) for table in manifest["tables"].values())
    if as_json:
        print(
            json.dumps({"folder": str(out), "name": manifest["name"], "rows": rows, "why": manifest["why"]}, indent=2)
        )
    else:
        print_printable(f"{out}: {manifest['name']}, {count(rows)} rows, {manifest['why']}")


def seconds_of(text: str) -> float:
    """Unix seconds of a time in ISO 8601; UTC unless the text has an offset. Raises SpecError."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise SpecError(f"{text!r} is not a time; write it as 2024-05-01T12:00:00", "--at") from error
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


@app.command("import", rich_help_panel=Panel.OPERATE)
def import_(
    job: SpecFile,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="An export, Paddle's text, or Parquet.")],
    overrides: Overrides = [],  # noqa: B006  # typer copies it
    tables: Annotated[str, typer.Option("--tables", metavar="A,B", help="Load rows of these tables only.")] = "",
    slots: Annotated[
        str | None, typer.Option("--slots", metavar="A,B=C", help="Only these slots; B has the name C in the source.")
    ] = None,
    dense: Annotated[str, typer.Option("--dense", metavar="GLOB", help="Dense tensors to load, as in 'mlp.*'.")] = "*",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be done.")] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Remove the run in the store, if the import succeeds.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Give a job with an empty store the rows and dense tensors of another model.

    Example: headrace import job.toml s3://models/clicks --dry-run
    """
    from headrace.service.exports.model_import import ImportRequest, import_into
    from headrace.service.spec.job import load_job

    chosen = tuple(filter(None, (name.strip() for name in tables.split(","))))
    request = ImportRequest(source, chosen, slots, dense, dry_run, fresh)
    import_into(load_job(job, overrides), request, as_json=as_json, counting=counted("importing", "rows"))
