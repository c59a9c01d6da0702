"""The commands that look inside exports and commits, and the warm start. Reads arguments; work is done beside it."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from millrace.errors import MillraceError
from millrace.printable import say
from service.arguments import Json, Overrides, SpecFile
from service.looking import difference, inspection
from service.looking.importing import Asked, import_into
from service.looking.materializing import write_base
from service.looking.places import Where
from service.spec import LoadedJob, load_job

looking = typer.Typer()

OfJob = Annotated[Path | None, typer.Option("--job", metavar="JOB.TOML", help="The names are those of its commits.")]
Top = Annotated[int, typer.Option("--top", min=0, help="How many of the rows that moved farthest are named.")]
Address = Annotated[str, typer.Argument(metavar="EXPORT", help="Its folder or s3:// address.", show_default=False)]


def _job(path: Path | None, overrides: list[str]) -> LoadedJob | None:
    return None if path is None else load_job(path, overrides)


@looking.command()
def inspect(
    name: Annotated[str, typer.Argument(help="An export's address, or a commit.", show_default=False)],
    job: OfJob = None,
    overrides: Overrides = [],  # noqa: B006  # typer copies it
    top: Top = 10,
    as_json: Json = False,
) -> None:
    """Print what an export or a commit holds, whether it is sound, what moved; exit code 1 where it is damaged."""
    if not inspection.inspect(_job(job, overrides), name, top, as_json=as_json):
        raise typer.Exit(1)


@looking.command()
def diff(
    old: Annotated[str, typer.Argument(help="An export's address, or a commit.", show_default=False)],
    new: Annotated[str, typer.Argument(help="Another one.", show_default=False)],
    job: OfJob = None,
    overrides: Overrides = [],  # noqa: B006
    top: Top = 10,
    as_json: Json = False,
) -> None:
    """Compare the whole models of two exports or commits; exit code 0: the same, 1: they differ, 2: trouble."""
    try:
        differs = difference.diff(Where(_job(job, overrides)), old, new, top, as_json=as_json)
    except MillraceError as error:
        say(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    raise typer.Exit(int(differs))


@looking.command()
def materialize(
    export: Address,
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where the base is written; made.")],
    to: Annotated[int | None, typer.Option("--to", metavar="VERSION", help="Up to this version.")] = None,
    at: Annotated[str | None, typer.Option("--at", metavar="TIME", help="Up to this event time, ISO 8601.")] = None,
) -> None:
    """Make one base of a base and its deltas."""
    write_base(export, out, to, at)


@looking.command("import")
def import_(
    job: SpecFile,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="An export, Paddle's text, or Parquet.")],
    overrides: Overrides = [],  # noqa: B006  # typer copies it
    tables: Annotated[str, typer.Option("--tables", metavar="A,B", help="Load rows of these tables only.")] = "",
    slots: Annotated[
        str | None, typer.Option("--slots", metavar="A,B=C", help="Of these slots only; B is called C in the source.")
    ] = None,
    dense: Annotated[str, typer.Option("--dense", metavar="GLOB", help="Dense tensors loaded, as in 'mlp.*'.")] = "*",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
) -> None:
    """Have a job with an empty store begin with the rows and dense tensors of another model."""
    chosen = tuple(filter(None, (name.strip() for name in tables.split(","))))
    import_into(load_job(job, overrides), Asked(source, chosen, slots, dense, dry_run))
