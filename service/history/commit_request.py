"""Has the running job make a commit, and waits for it."""

import time
from pathlib import Path

from headrace.deadline import Deadline
from headrace.errors import DeadlineExceeded, HeadraceError
from headrace.rpc.job_client import CALL_S, RETRY_S, JobClient, NotRunning
from headrace.rpc.role import RoleClient
from headrace.service.history.commit_lookup import continue_from, lineage
from headrace.trainer.checkpoint.commits import Commits, order_of


def make_commit(store: Path, deadline: Deadline) -> str:
    """Have a commit made of all passes closed by now; return its name once it exists.

    If the job restarts meanwhile, the new rank 0 is asked again. Raises HeadraceError if the commit fails,
    NotRunning, and DeadlineExceeded.
    """
    wanted: int | None = None

    def ask(client: RoleClient) -> str | None:
        nonlocal wanted
        version = request_commit(client)
        wanted = version if wanted is None else wanted
        _await(client, wanted, deadline)
        return _made(store, wanted)

    def late(_reason: str) -> HeadraceError:
        return DeadlineExceeded(f"out of time while {_waiting_for(wanted)}")

    try:
        return JobClient(store).poll(ask, deadline, late)
    except NotRunning:
        if wanted is None or (name := _made(store, wanted)) is None:
            raise
        return name


def request_commit(client: RoleClient) -> int:
    """Ask rank 0 for a commit; return the version it will have at least: the last closed one, or 1."""
    version = max(1, int(client.status(Deadline.after(CALL_S))["version"]))
    client.commit(Deadline.after(CALL_S))
    return version


def _waiting_for(version: int | None) -> str:
    return "waiting for rank 0 to start" if version is None else f"waiting for version {version}"


def _made(store: Path, wanted: int) -> str | None:
    """The newest commit, if it is of version `wanted` or later."""
    name = continue_from(Commits(store).names(), lineage(store))
    return name if name is not None and order_of(name)[1] >= wanted else None


def _await(client: RoleClient, wanted: int, deadline: Deadline) -> None:
    while True:
        commit = client.status(Deadline.after(CALL_S)).get("commit") or {}
        if commit.get("version", 0) >= wanted:
            return
        if commit.get("failing"):
            raise HeadraceError(f"the commit failed; the job continues and will try again: {commit['failing']}")
        deadline.check(_waiting_for(wanted))
        time.sleep(RETRY_S)
