"""The commands that look inside exports and commits, and the warm start. Reads arguments; work is done beside it."""

from typing import Annotated

import typer

from service.arguments import Overrides, SpecFile
from service.looking.importing import Asked, import_into
from service.spec import load_job

looking = typer.Typer()


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
