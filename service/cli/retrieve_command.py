"""The command `retrieve`. It reads arguments; service.predict.retrieval does the work."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from headrace.errors import SpecError
from headrace.printable import print_printable
from headrace.service.cli.arguments import Json, Overrides
from headrace.service.cli.panels import Panel
from headrace.service.cli.prediction_commands import LIVE, Export, VersionOf, cancelled_by_signal, place_of
from headrace.service.cli.progress import work_progress

app = typer.Typer()


@app.command(rich_help_panel=Panel.SERVE)
def retrieve(
    job: Annotated[Path, typer.Argument(metavar="JOB.TOML", help="The job file, with [retrieval].")],
    users: Annotated[
        list[str],
        typer.Option("--users", metavar="FILE", help="A user in each line: JSON with its slots. Repeat it for more."),
    ],
    output: Annotated[
        str, typer.Option("--output", metavar="DIR", help="Folder for the Parquet, or an address in an object store.")
    ],
    k: Annotated[int, typer.Option("--k", min=1, metavar="N", help="Most items of each user.")] = 10,
    version: VersionOf = LIVE,
    export: Export = None,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, metavar="N", help="Threads that search. Default: one a core.")
    ] = None,
    segment_users: Annotated[
        int,
        typer.Option(
            "--segment-users", min=1, metavar="N", help="Users of one output file. A crash repeats unfinished files."
        ),
    ] = 20_000,
    overrides: Overrides = [],  # noqa: B006  # typer copies it
    as_json: Json = False,
) -> None:
    """Find the best items for many users with one version, and write Parquet. When killed, it continues if run again.

    Example: headrace retrieve job.toml --users users.jsonl --k 100 --output candidates
    """
    from headrace.config import validate
    from headrace.service.monitor.lines import count
    from headrace.service.predict.retrieval import retrieve as carry_out
    from headrace.service.predict.worker_group import PredictionCancelled
    from headrace.service.spec.job import load_job
    from headrace.trainer.predict.batch_retrieval import MAX_THREADS, BatchRetrieval

    if export is not None and version != LIVE:
        raise SpecError("give --version or --export, not both")
    request = {
        "users": [str(Path(path).expanduser().absolute()) for path in users],
        "output": place_of(output, here=True),
        "version": export or version,
        "k": k,
        "segment_users": segment_users,
        "threads": threads or min(os.cpu_count() or 1, MAX_THREADS),
    }
    loaded = load_job(job, overrides)
    with work_progress("retrieving") as progress, cancelled_by_signal() as cancelled:

        def check() -> None:
            if cancelled.is_set():
                raise PredictionCancelled

        manifest = carry_out(loaded, validate(BatchRetrieval, request), progress, check)
    if as_json:
        print(json.dumps(manifest, indent=2))
        return
    print_printable(f"{output}: items of {count(manifest['users'])} users, version {manifest['version']['version']}")
