"""`headrace serve`: see service.server.serve."""

from pathlib import Path
from typing import Annotated

import typer

from headrace.service.cli.arguments import Health
from headrace.service.cli.panels import Panel

app = typer.Typer()

Config = Annotated[Path, typer.Option("--config", metavar="SERVICE.TOML", help="The service's configuration.")]


@app.command(rich_help_panel=Panel.SERVICE)
def serve(config: Config = Path("service.toml"), health: Health = None) -> None:
    """Host jobs, and serve the API that creates and controls them. The jobs outlive this command.

    Example: headrace serve --config service.toml
    """
    from headrace.service.server import serve as server

    server.serve(config, health)
