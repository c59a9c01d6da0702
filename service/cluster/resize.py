"""Has a running job go on with other numbers of workers (`headrace resize`), and waits until they train.

Rank 0 logs the request, and its generation ends after the close at which it acts (trainer.rank0.operations). The
launcher starts the next one with the new numbers (service.cluster.generation_plans).
"""

from dataclasses import dataclass
from pathlib import Path

from headrace.deadline import Deadline
from headrace.errors import HeadraceError
from headrace.rpc.job_client import CALL_S, JobClient, NotRunning, Unfinished
from headrace.rpc.role import RoleClient
from headrace.trainer.spec.changes import SHARDS, TRAINERS

MOVE_S = 900.0
"""Longest time to wait for the new workers."""


@dataclass(frozen=True, slots=True)
class Resized:
    """The numbers of workers that a job goes on with."""

    version: int
    """The close of this version is the first after the request."""
    shards: int
    """0: the shard lives in the trainer."""
    trainers: int


def resize(store: Path, shards: int | None, trainers: int | None, deadline: Deadline) -> Resized:
    """Have the job that runs in `store` go on with these numbers of workers; None: as many as now.

    Returns once the new workers train. Raises SpecError for numbers that cannot be, NotRunning where the request was
    never sent, and Unfinished where it is not known that the new workers train.
    """
    client = JobClient(store)
    version = client.carry_out({"op": "resize", "shards": shards, "trainers": trainers}, deadline)

    def late(reason: str) -> HeadraceError:
        return Unfinished(f"logged at version {version}, but the new workers do not train yet; {reason}".rstrip("; "))

    try:
        found = client.poll(_new_workers, deadline, late)
    except NotRunning:
        raise Unfinished(
            f"logged at version {version}; the run has ended, and the next one has these numbers"
        ) from None
    return Resized(version, found["shards"], found["trainers"])


def _new_workers(client: RoleClient) -> dict[str, int] | None:
    """The numbers of the running workers, once they are those of the newest resize, restored, and do not replay."""
    status = client.status(Deadline.after(CALL_S))
    workers: dict[str, int] = status.get("workers", {})
    wanted = status.get("overrides", {})
    if status.get("state") in ("replaying", "restarting") or not workers:
        return None
    same = wanted.get(SHARDS) in (None, workers["shards"]) and wanted.get(TRAINERS) in (None, workers["trainers"])
    return workers if same else None
