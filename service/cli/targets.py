"""The options that name a service, and the rule whether JOB is a file on this machine or a job of a service.

A JOB that ends in ".toml" or contains a "/" is a job file on this machine. Any other is a job at `--url`.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.errors import SpecError
from headrace.service.python.rest_paths import path_of as path_of

if TYPE_CHECKING:
    from headrace.service.python.rest_client import ServiceClient

URL = "HEADRACE_URL"
Url = Annotated[
    str | None,
    typer.Option("--url", envvar=URL, metavar="URL", help="Address of a service. JOB is then the name of a job there."),
]
Token = Annotated[
    str | None,
    typer.Option(
        "--token",
        envvar="HEADRACE_TOKEN",
        metavar="TOKEN",
        help="API token. Prefer the environment variable: other users can see command lines.",
    ),
]
JobOrFile = Annotated[
    Path,
    typer.Argument(metavar="JOB", help="The job file, ending in .toml; with --url a job's name.", show_default=False),
]
JobName = Annotated[str, typer.Argument(metavar="JOB", help="Name of the job at the service.", show_default=False)]
OPTIONS = {"overrides": "--set", "worth": "--worth"}
"""Options that need the job file, by parameter."""
Wait = Annotated[float, typer.Option("--timeout", min=1, metavar="SECONDS", help="Longest time to wait.")]


def remote_name(job: Path, url: str | None) -> str | None:
    """The name of the job at the service `url`; None if `job` is a file on this machine. Raises SpecError."""
    text = str(job)
    if not text.endswith(".toml") and "/" not in text:
        return text if url is not None else None
    if url != os.environ.get(URL):  # given as an option
        raise SpecError(f"{text} is a job file on this machine; use the name of a job of the service", "--url")
    return None


def only_here(**options: object) -> None:
    """Raise SpecError for an option that is given and needs the job file."""
    for name, value in options.items():
        if value:
            raise SpecError("needs a job file on this machine, not a job of a service", OPTIONS[name])


@contextmanager
def service_at(url: str | None, token: str | None) -> Iterator["ServiceClient"]:
    """A client of the service at `url`. Raises SpecError if there is no URL."""
    from headrace.service.python.rest_client import (
        ServiceClient,  # imported late: every command imports this module, and few need httpx
    )

    if url is None:
        raise SpecError("no service given; use --url https://host:8080, or set HEADRACE_URL")
    with ServiceClient(url, token) as client:
        if token and not client.private:
            print("warning: this token is sent unencrypted; use https://", file=sys.stderr)
        yield client
