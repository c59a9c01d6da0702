"""`headrace demo`: a job that learns beside a frozen twin; see service.server.demo."""

from pathlib import Path
from typing import Annotated

import typer

from headrace.service.cli.arguments import Overrides
from headrace.service.cli.panels import Panel

app = typer.Typer()


@app.command(rich_help_panel=Panel.TRAIN)
def demo(
    events: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="End after this many events; default: at Ctrl-C.")
    ] = None,
    overrides: Overrides = [],  # noqa: B006  # typer copies it
    listen: Annotated[
        str | None,
        typer.Option("--listen", metavar="HOST:PORT", help="Serve the API and the live page, as at 127.0.0.1:8080."),
    ] = None,
) -> None:
    """Watch a job learn from a simulated click stream, next to a copy that never learns.

    Everything is in runs/demo of the current folder, which each demo begins anew.

    Example: headrace demo --events 200000
    """
    from headrace.service.server.demo import run_demo

    raise typer.Exit(run_demo(events, overrides, listen, Path.cwd() / "runs" / "demo"))
