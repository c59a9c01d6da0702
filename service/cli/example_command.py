"""`headrace example`: copies an example to begin with."""

import json
from pathlib import Path
from typing import Annotated

import typer

from headrace.service.cli.arguments import Json
from headrace.service.cli.panels import Panel

app = typer.Typer()

Name = Annotated[str | None, typer.Argument(metavar="NAME", help="The example; none: lists them.", show_default=False)]
Folder = Annotated[
    Path | None, typer.Argument(metavar="DIR", help="A new or empty folder; default: NAME.", show_default=False)
]


@app.command(rich_help_panel=Panel.TRAIN)
def example(name: Name = None, folder: Folder = None, as_json: Json = False) -> None:
    """Copy an example job, or the dashboards and alerts ("monitoring"), into a folder of your own.

    Example: headrace example clicks my-job
    """
    from headrace.service.spec.examples import copy_example, examples

    if name is None:
        known = examples()
        print(json.dumps(known) if as_json else "\n".join(f"{each:14} {title}" for each, title in known.items()))
        return
    copied = copy_example(name, folder or Path(name))
    print(json.dumps([str(path) for path in copied]) if as_json else "\n".join(map(str, copied)))
