"""`headrace worker`: joins a running job and runs its workers, one after another; see service.cluster.agent."""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer

from headrace import logs
from headrace.address import parse_address
from headrace.errors import Refused, SpecError
from headrace.lifecycle import stop_flag
from headrace.service.cli.arguments import Health
from headrace.service.cli.panels import Panel

app = typer.Typer()

RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
"""Variables of the environment that torchrun and indexed jobs set."""


@app.command(rich_help_panel=Panel.CLUSTER)
def worker(
    join: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the launcher listens: `cluster.listen`.")],
    token_file: Annotated[
        Path, typer.Option(metavar="FILE", help="The job's join token; the head has it in STORE/identity/join_token.")
    ],
    role: Annotated[
        Literal["trainer", "shard", "reader"] | None,
        typer.Option(help="Run this kind of worker only; RANK then counts within it. Default: any."),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the job file's generator and data here; default: as at the head."),
    ] = None,
    wait: Annotated[
        str, typer.Option(metavar="DURATION", help="Longest wait for a launcher that does not answer, such as 5m.")
    ] = "5m",
    health: Health = None,
) -> None:
    """Join a job whose `cluster.launcher` is "external", and run one of its workers until the job ends.

    Start one for each trainer, shard and reader, in any order, by hand or by torchrun. RANK, WORLD_SIZE and LOCAL_RANK
    choose the worker where they are set: trainers first, then shards, then readers. Exit codes: that of the job; 75 to
    be started again.

    Example: headrace worker --join head:7070 --token-file join_token
    """
    from headrace.http.open_pages import health_served
    from headrace.identity.join_token import StaleToken, read_token
    from headrace.rpc.joining import AgentFacts
    from headrace.service.cluster.agent import Agent, Joined
    from headrace.service.cluster.machine import cores_here, machine_id

    logs.setup("worker")
    _check_address(join)
    _check_private(token_file)
    to = Joined(
        address=join,
        token=read_token(token_file),
        folder=None if folder is None else folder.resolve(),
        wait_s=_seconds(wait),
    )
    rank, world, local_rank = ranks_of(os.environ)
    facts = AgentFacts(
        id=secrets.token_hex(16),
        machine=machine_id(),
        role=role,
        rank=rank,
        world=world,
        local_rank=local_rank,
        cores=cores_here(),
    )
    try:
        with stop_flag() as stopping, Agent(to, facts, stopping) as agent, health_served(health, agent.lacks):
            code = agent.run()
    except StaleToken:
        raise Refused(
            f"the launcher at {join} refused the join token in {token_file}: it was rotated, or is of another job; "
            "copy the present one from the head"
        ) from None
    raise typer.Exit(code)


def ranks_of(environment: Mapping[str, str]) -> tuple[int | None, int, int | None]:
    """Rank, world and local rank that an orchestrator gave, as far as it did. Raises SpecError."""
    given = {name: environment[name] for name in RANKS if environment.get(name)}
    if wrong := [f"{name}={text!r}" for name, text in given.items() if not text.isdecimal()]:
        raise SpecError(f"{', '.join(wrong)} in the environment is not a number; unset it, or set it to a rank")
    numbers = {name: int(text) for name, text in given.items()}
    if ("RANK" in numbers) != ("WORLD_SIZE" in numbers):
        raise SpecError(f"{' '.join(numbers)} is set in the environment; set both RANK and WORLD_SIZE, or neither")
    return numbers.get("RANK"), numbers.get("WORLD_SIZE", 0), numbers.get("LOCAL_RANK")


def _check_private(token_file: Path) -> None:
    if token_file.exists() and (mode := token_file.stat().st_mode & 0o777) & 0o077:
        raise SpecError(f"{token_file}: others may read the join token (mode {mode:o}); `chmod 600` it")


def _seconds(wait: str) -> float:
    from headrace.config import parse_duration

    try:
        return parse_duration(wait)
    except (ValueError, OverflowError) as error:
        raise SpecError(f"--wait {error}") from None


def _check_address(join: str) -> None:
    try:
        parse_address(join, "127.0.0.1:7070")
    except ValueError as error:
        raise SpecError(f"--join {error}") from None
