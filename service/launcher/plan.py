"""Which processes a job needs, and what each is told: pure, but for the secret drawn per start.

The launcher starts them; what the workers do with their configuration is theirs.
"""

import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from service.spec import LoadedJob

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
    """All processes of one start of a job."""

    job: str
    folder: Path
    """Where workers run: the spec's folder."""
    run_folder: Path
    """Private files of this start: configurations, addresses, rendezvous."""
    shards: tuple[WorkerPlan, ...]
    trainers: tuple[WorkerPlan, ...]
    secret: str = field(repr=False)
    """What every call between the job's processes carries."""

    @property
    def chief(self) -> WorkerPlan:
        """Rank 0, which plans passes and answers for the job."""
        return self.trainers[0]


def plan_job(job: LoadedJob, run_folder: Path, cores: int | None = None) -> JobPlan:
    """The processes of `job`; `cores` of this machine (all, unless given) are shared equally by the trainers."""
    secret = secrets.token_hex(32)
    cluster = job.spec.cluster
    cores_each = max(1, (cores or os.cpu_count() or 1) // cluster.trainers)
    return JobPlan(
        job=job.spec.name,
        folder=job.folder,
        run_folder=run_folder,
        shards=tuple(_shard(job, run_folder, secret, number) for number in range(cluster.num_shards)),
        trainers=tuple(_trainer(job, run_folder, secret, rank, cores_each) for rank in range(cluster.trainers)),
        secret=secret,
    )


def _shard(job: LoadedJob, run_folder: Path, secret: str, number: int) -> WorkerPlan:
    name = f"shard-{number}"
    address_file = run_folder / f"{name}.address"
    config = {
        "shard": number,
        "num_shards": job.spec.cluster.num_shards,
        "num_ranks": job.spec.cluster.trainers,
        "tables": {table: section.model_dump(mode="json") for table, section in job.spec.tables.items()},
        "seed": job.spec.seed,
        "secret": secret,
        "generation": 1,
        "max_message": job.spec.cluster.max_message,
        "address_file": str(address_file),
    }
    return WorkerPlan(name=name, command=(*PYTHON, "pserver"), config=config, address_file=address_file)


def _trainer(job: LoadedJob, run_folder: Path, secret: str, rank: int, cores: int) -> WorkerPlan:
    name = f"trainer-{rank}"
    address_file = run_folder / f"{name}.address"
    world = job.spec.cluster.trainers
    config = {
        "job": job.raw,
        "folder": str(job.folder),
        "store": str(job.store),
        "rank": rank,
        "world": world,
        "rendezvous": str(run_folder / "rendezvous") if world > 1 else None,
        "secret": secret,
        "generation": 1,
        "max_message": job.spec.cluster.max_message,
        "address_file": str(address_file),
        "cores": cores,
    }
    return WorkerPlan(name=name, command=(*PYTHON, "trainer"), config=config, address_file=address_file)
