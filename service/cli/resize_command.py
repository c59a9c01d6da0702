"""`headrace resize`: a running job goes on with other numbers of workers."""

import json
from typing import Annotated

import typer

from headrace.deadline import Deadline
from headrace.service.cli.arguments import Json, Overrides
from headrace.service.cli.history_commands import load_run
from headrace.service.cli.panels import Panel
from headrace.service.cli.progress import work_progress
from headrace.service.cli.targets import JobOrFile, Token, Url, Wait, path_of, remote_name, service_at

app = typer.Typer()

MOVE_S = 900.0
"""As service.cluster.resizing has it."""


@app.command(rich_help_panel=Panel.OPERATE)
def resize(
    job: JobOrFile,
    shards: Annotated[
        int | None,
        typer.Option("--shards", min=0, metavar="N", help="Shard processes; 0: the shard lives in the trainer."),
    ] = None,
    trainers: Annotated[int | None, typer.Option("--trainers", min=1, metavar="W", help="Trainer processes.")] = None,
    overrides: Overrides = [],  # noqa: B006  # typer copies it
    timeout: Wait = MOVE_S,
    url: Url = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Change the number of shards and trainers of a running job. Waits until the new workers train.

    The numbers override the job file, also after a restart, until the job file changes the same key.

    Example: headrace resize job.toml --shards 4 --trainers 2
    """
    if (name := remote_name(job, url)) is not None:
        numbers = {"shards": shards, "trainers": trainers}
        body = {key: number for key, number in numbers.items() if number is not None}
        with service_at(url, token) as client:
            found = client.carry_out(path_of("jobs", name, "resize"), body, Deadline.after(timeout))
    else:
        from headrace.codec import plain
        from headrace.service.cluster.resizing import resize as resize_job

        store = load_run(job, overrides).store
        with work_progress("starting the new workers"):
            found = plain(resize_job(store, shards, trainers, Deadline.after(timeout)))
    if as_json:
        print(json.dumps(found, indent=2))
        return
    print(f"shards {found['shards'] or 'embedded'}, trainers {found['trainers']}, after version {found['version']}")
