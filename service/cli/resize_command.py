"""`headrace resize`: a running job goes on with other numbers of workers."""

from typing import Annotated

import typer

from headrace.deadline import Deadline
from headrace.service.cli.arguments import Overrides
from headrace.service.cli.history_commands import load_run
from headrace.service.cli.targets import JobOrFile, Token, Url, Wait, remote_name, service_at
from headrace.service.client import job_actions
from headrace.service.cluster.resize import MOVE_S
from headrace.service.cluster.resize import resize as resize_job


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
) -> None:
    """Have a running job go on with other numbers of shards and trainers; return once these train.

    The numbers override the job file, also after a restart, until the job file changes the same key.
    """
    if (name := remote_name(job, url)) is not None:
        with service_at(url, token) as client:
            found = job_actions.resize(client, name, shards, trainers, Deadline.after(timeout))
    else:
        store = load_run(job, overrides).store
        found = resize_job(store, shards, trainers, Deadline.after(timeout)).message()
    print(f"shards {found['shards'] or 'embedded'}, trainers {found['trainers']}, after version {found['version']}")
