"""Which service a command is for, and whether its JOB is a file here or a job there: the options, and the rule.

A JOB that ends in ".toml", or has a "/", is a job file on this machine. Any other is a job of the service at `--url`.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer

from millrace.errors import SpecError

if TYPE_CHECKING:
    from service.remote.client import Client

URL = "MILLRACE_URL"
Url = Annotated[
    str | None,
    typer.Option("--url", envvar=URL, metavar="URL", help="The service; JOB is then a job's name there."),
]
Token = Annotated[
    str | None,
    typer.Option(
        "--token", envvar="MILLRACE_TOKEN", metavar="TOKEN", help="Better by the variable: others see your options."
    ),
]
JobOrFile = Annotated[
    Path,
    typer.Argument(metavar="JOB", help="The job spec, a .toml file; or with --url a job's name.", show_default=False),
]
JobName = Annotated[str, typer.Argument(metavar="JOB", help="The job's name at the service.", show_default=False)]
Wait = Annotated[float, typer.Option("--timeout", min=1, metavar="SECONDS", help="How long to wait at most.")]


def remote_name(job: Path, url: str | None) -> str | None:
    """The name of the job at the service `url` that is meant; None where `job` is a file here. Raises SpecError."""
    text = str(job)
    if not text.endswith(".toml") and "/" not in text:
        return text if url is not None else None
    if url != os.environ.get(URL):  # said by the option
        raise SpecError(f"{text} is a job file of this machine; the service's jobs go by their names", "--url")
    return None


@contextmanager
def service_at(url: str | None, token: str | None) -> Iterator["Client"]:
    """The service at `url`. Raises SpecError where none is named."""
    from service.remote.client import Client  # not above: every command imports this module, and few need httpx

    if url is None:
        raise SpecError("which service? Say --url https://host:8080, or set MILLRACE_URL")
    with Client(url, token) as client:
        if token and not client.private:
            print("warning: this token is sent unencrypted; use https://", file=sys.stderr)
        yield client


def path_of(*parts: str) -> str:
    """The address of a resource; what stands in a part cannot lead to another one. Raises SpecError."""
    for part in parts:
        if part in ("", ".", ".."):
            raise SpecError(f"{part!r} is no name")
    return "/v1/" + "/".join(quote(part, safe="") for part in parts)
