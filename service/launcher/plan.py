"""Which processes a generation of a job needs, and what each is told: pure, but for the secret drawn per generation.

The launcher starts them; what the workers do with their configuration is theirs.
"""

import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dataset.schema import Schema
from service.spec import LoadedJob
from service.store import LIVE
from trainer.stalls import STALL_SHARE

PYTHON = (sys.executable, "-P", "-m")
"""-P: a file of the user's folder must not stand in for a package of Millrace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """One process: `<command> --config <file>`."""

    name: str
    """For people: "shard-0", "trainer-1"."""
    command: tuple[str, ...]
    config: Mapping[str, Any] = field(repr=False)
    """What it is told, as JSON; a trainer's lacks the shards' addresses, which are known once those run."""
    address_file: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """All processes of one generation of a job."""

    job: str
    generation: int
    folder: Path
    """Where workers run: the spec's folder."""
    run_folder: Path
    """Private files of this generation: configurations, addresses, rendezvous."""
    shards: tuple[WorkerPlan, ...]
    trainers: tuple[WorkerPlan, ...]
    max_silent_s: float
    """The chief stands still where it does not answer for longer."""
    secret: str = field(repr=False)
    """What every call between the job's processes carries."""

    @property
    def chief(self) -> WorkerPlan:
        """Rank 0, which plans passes and answers for the job."""
        return self.trainers[0]


def plan_job(
    job: LoadedJob, run_folder: Path, cores: int | None = None, *, generation: int, until: str | None = None
) -> JobPlan:
    """The processes of generation `generation` of `job`.

    `cores` of this machine (all, unless given) are shared equally by the trainers. `until` = "logged": train what the
    log holds, commit, and end.
    """
    secret = secrets.token_hex(32)
    cluster = job.spec.cluster
    cores_each = max(1, (cores or os.cpu_count() or 1) // cluster.trainers)
    told = {"secret": secret, "generation": generation, "max_message": cluster.max_message}
    return JobPlan(
        job=job.spec.name,
        generation=generation,
        folder=job.folder,
        run_folder=run_folder,
        shards=tuple(_shard(job, run_folder, told, number) for number in range(cluster.num_shards)),
        trainers=tuple(
            _trainer(job, run_folder, {**told, "cores": cores_each, "until": until}, rank)
            for rank in range(cluster.trainers)
        ),
        max_silent_s=job.spec.train.step_deadline * STALL_SHARE,
        secret=secret,
    )


def _live(job: LoadedJob, generation: int, shard: int) -> str:
    """Where a shard of a generation keeps the rows it works on."""
    return str(job.store / LIVE / f"g{generation}-shard-{shard}")


def _shard(job: LoadedJob, run_folder: Path, told: Mapping[str, Any], number: int) -> WorkerPlan:
    name = f"shard-{number}"
    address_file = run_folder / f"{name}.address"
    config = {
        **told,
        "shard": number,
        "num_shards": job.spec.cluster.num_shards,
        "num_ranks": job.spec.cluster.trainers,
        "tables": {table: section.model_dump(mode="json") for table, section in job.spec.tables.items()},
        "groups": {slot.name: slot.group for slot in Schema.of(job.spec.slots).sparse},
        "seed": job.spec.seed,
        "mode": job.spec.train.mode,
        "live": _live(job, told["generation"], number),
        "address_file": str(address_file),
    }
    return WorkerPlan(name=name, command=(*PYTHON, "pserver"), config=config, address_file=address_file)


def _trainer(job: LoadedJob, run_folder: Path, told: Mapping[str, Any], rank: int) -> WorkerPlan:
    name = f"trainer-{rank}"
    address_file = run_folder / f"{name}.address"
    cluster = job.spec.cluster
    config = {
        **told,
        "job": job.full,
        "secrets": job.secrets,
        "folder": str(job.folder),
        "store": str(job.store),
        "rank": rank,
        "world": cluster.trainers,
        "rendezvous": str(run_folder / "rendezvous") if cluster.trainers > 1 else None,
        "live": None if cluster.num_shards else _live(job, told["generation"], 0),
        "address_file": str(address_file),
    }
    return WorkerPlan(name=name, command=(*PYTHON, "trainer"), config=config, address_file=address_file)
