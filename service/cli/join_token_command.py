"""`headrace join-token`: the token by which workers of other machines join a job."""

from typing import Annotated

import typer

from headrace.identity.authority import open_authority
from headrace.identity.join_token import open_token, rotate_token
from headrace.service.cli.arguments import Overrides, SpecFile
from headrace.service.cluster.store import identity_folder
from headrace.service.spec.job import load_job


def join_token(
    job: SpecFile,
    overrides: Overrides = [],  # noqa: B006  # typer copies it
    rotate: Annotated[
        bool, typer.Option("--rotate", help="Replace it: no further worker joins with the old one.")
    ] = False,
) -> None:
    """Print the job's join token for `headrace worker`, on the machine of `headrace run`; made at the first call.

    Who has it may run workers of the job and read its rows: copy it to the machines of the workers, with mode 600.
    """
    loaded = load_job(job, overrides)
    folder = identity_folder(loaded.store)
    authority = open_authority(folder, loaded.spec.name)
    print(rotate_token(folder, authority) if rotate else open_token(folder, authority))
