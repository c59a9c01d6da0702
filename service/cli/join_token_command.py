"""`headrace join-token`: the token by which workers of other machines join a job."""

from typing import Annotated

import typer

from headrace.service.cli.arguments import Overrides, SpecFile
from headrace.service.cli.panels import Panel

app = typer.Typer()


@app.command(rich_help_panel=Panel.CLUSTER)
def join_token(
    job: SpecFile,
    overrides: Overrides = [],  # noqa: B006  # typer copies it
    rotate: Annotated[
        bool, typer.Option("--rotate", help="Replace it: no further worker joins with the old one.")
    ] = False,
) -> None:
    """Print the token with which workers of other machines join the job. Made at the first call.

    Call it on the machine of `headrace run`. Whoever has the token may run workers of the job and read its rows: copy
    it to the machines of the workers, with mode 600.

    Example: headrace join-token job.toml > join_token
    """
    from headrace.identity.authority import open_authority
    from headrace.identity.join_token import open_token, rotate_token
    from headrace.service.cluster.store import identity_folder
    from headrace.service.spec.job import load_job

    loaded = load_job(job, overrides)
    folder = identity_folder(loaded.store)
    authority = open_authority(folder, loaded.spec.name)
    print(rotate_token(folder, authority) if rotate else open_token(folder, authority))
