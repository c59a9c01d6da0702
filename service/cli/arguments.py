"""Arguments that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

SpecFile = Annotated[Path, typer.Argument(metavar="JOB.TOML", help="The job file.", show_default=False)]
Overrides = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key of the job file, for example train.batch_size=256. Repeat it for more keys.",
    ),
]
Health = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT", help="Answer an orchestrator's probes at this address: /live and /ready, without tokens."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
