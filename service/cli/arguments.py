"""Arguments that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

SpecFile = Annotated[Path, typer.Argument(metavar="JOB.TOML", help="The job spec.", show_default=False)]
Overrides = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Put a value in the spec's place, as in a.b=1.")
]
Health = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Answer probes of an orchestrator here: /live and /ready, without tokens."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
