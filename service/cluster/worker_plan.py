"""The processes of a job's generation, or of a prediction, and the configuration of each.

Pure, but for the secret drawn for each generation. A launcher starts them (service.cluster.runtime).
"""

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headrace.address import LOOPBACK_INTERFACE
from headrace.blob.store_address import parse as parse_store_address
from headrace.dataset.spec.schema import Schema
from headrace.identity.authority import Authority
from headrace.identity.credentials import Identity
from headrace.identity.peers import PeerRole
from headrace.pserver.config import TableSection, Wire
from headrace.rpc.channels import TlsPeer
from headrace.secrets import dump_with_secrets, with_secrets
from headrace.service.cluster.machine import input_files
from headrace.service.cluster.runtime import PYTHON, Resources, WorkerRole, WorkerSpec
from headrace.service.cluster.store import CACHE, LIVE, TRACE_PARTS
from headrace.service.spec.config import ClusterSection, WorkerResources
from headrace.service.spec.job import LoadedJob
from headrace.service.spec.launchers import launcher_of
from headrace.shared_folder import SharedFolder, digests, head_sizes
from headrace.timeline import TracePart, TraceWindow
from headrace.trainer.predict.config import PredictionRequest
from headrace.trainer.spec.history_tables import history_tables, remembered_of
from headrace.trainer.spec.join_tables import windows_of
from headrace.trainer.spec.shard_tables import tables_on_shards
from headrace.trainer.status.time_spent import STALL_SHARE

MODULES = {
    WorkerRole.SHARD: ("headrace.pserver.server.shard_server",),
    WorkerRole.TRAINER: (
        "headrace.trainer.train.assembly",
        "headrace.dataset.features.json_decoder",
        "headrace.rpc.role",
        "pyarrow.compute",
    ),
}
"""The modules that workers of a role import, also those that they import late."""
BESIDE = "headrace.trainer.predict.background"
"""The module that runs another one at the lowest priority."""


def preloaded(cluster: ClusterSection) -> list[str]:
    """The modules that the workers of a job import.

    The shards start first, so they are forked before torch is loaded.
    """
    shards = MODULES[WorkerRole.SHARD] if cluster.num_shards else ()
    return [*shards, *MODULES[WorkerRole.TRAINER]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRole:
    """The part of a generation in the life of its job."""

    until: str | None = None
    """"logged": it trains what the log holds, commits, and ends."""
    stands_by: str | None = None
    """The id of a resize: these workers stand by until it has acted; their files are apart from those of others."""
    prepared: bool = False
    """Whether workers will stand by when this generation is resized."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """The processes of one generation of a job."""

    job: str
    generation: int
    run_folder: Path
    """Private files of this generation: configurations and sockets."""
    shards: tuple[WorkerSpec, ...]
    trainers: tuple[WorkerSpec, ...]
    """Their configurations lack the addresses of the shards, which are known once those run."""
    max_silent_s: float
    """Rank 0 stands still where it does not answer for longer."""
    secret: str = field(repr=False)
    """Every call between the job's processes carries it."""
    head: Identity | None = None
    """The identity of the launcher, for calls to rank 0; None where all processes are on this machine."""

    @property
    def rank0(self) -> WorkerSpec:
        """Rank 0, which plans passes and answers for the job."""
        return self.trainers[0]

    @property
    def to_rank0(self) -> TlsPeer | None:
        """The name of rank 0 and the launcher's identity, for calls to it; None on one machine."""
        return None if self.head is None else TlsPeer(self.head, self.head.current.peer(PeerRole.TRAINER, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionWorkers:
    """The processes of one try of a prediction."""

    generation: int
    shards: tuple[WorkerSpec, ...]
    predictors: tuple[WorkerSpec, ...]
    """Their configurations lack the addresses of the shards, which are known once those run."""
    wire: Wire
    """How rows travel."""
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionFolders:
    """The folders of a prediction. `live` and `private` are new, and for their owner only."""

    output: Path
    commit: Path
    """The commit whose rows and weights are read."""
    live: Path
    """For the rows while they are open."""
    private: Path
    """For configurations and sockets."""


def plan_job(
    job: LoadedJob,
    run_folder: Path,
    cores: int | None = None,
    *,
    generation: int,
    role: GenerationRole = GenerationRole(),
    authority: Authority | None = None,
    sees: SharedFolder | None = None,
    trace: TraceWindow | None = None,
) -> JobPlan:
    """The processes of generation `generation` of `job`, with certificates of `authority` if there is one.

    Another launcher than the local one signs those of its workers when they join.

    `cores` of this machine (all, unless given) are shared equally by the trainers. `sees`: the store, where each worker
    must check that its machine sees it. `trace`: the steps of which every process records a timeline.
    """
    secret = secrets.token_hex(32)
    cluster = job.cluster
    cores_each = max(1, (cores or os.cpu_count() or 1) // cluster.trainers)
    common = {
        "secret": secret,
        "generation": generation,
        "max_message": cluster.max_message,
        "node_timeout": cluster.node_timeout,
        "wire": cluster.wire,
        "interface": LOOPBACK_INTERFACE if authority is None else cluster.interface,
        "sees": None if sees is None else sees.model_dump(mode="json"),
    }
    same_machine = launcher_of(cluster).same_machine  # then all trainers read the same files anyway
    inputs = {} if same_machine else head_sizes(input_files(job), job.folder)
    suffix = "" if role.stands_by is None else f".g{generation}"
    of_ranks = {**common, "cores": cores_each, "until": role.until, "inputs": inputs}
    of_ranks |= {"stands_by": role.stands_by, "prepares_resizes": role.prepared}
    plan = JobPlan(
        job=job.spec.name,
        generation=generation,
        run_folder=run_folder,
        shards=_shards(
            job,
            tables_on_shards(job.spec.tables, job.spec.dense, job.spec.slots, job.spec.join),
            run_folder,
            {**common, "num_ranks": cluster.trainers},
            [_live(job, generation, shard) for shard in range(cluster.num_shards)],
            parts=_part_stores(job, suffix),
            resources=_resources(cluster.resources.shard),
        ),
        trainers=tuple(_trainer(job, run_folder, of_ranks, rank, suffix) for rank in range(cluster.trainers)),
        max_silent_s=job.spec.train.step_deadline * STALL_SHARE,
        secret=secret,
    )
    plan = plan if trace is None else _traced(plan, trace, job.store / TRACE_PARTS)
    if authority is None:
        return plan
    head = authority.identity(authority.name(generation, PeerRole.HEAD, 0))
    return replace(_certified(plan, authority) if same_machine else plan, head=head)


def _traced(plan: JobPlan, window: TraceWindow, folder: Path) -> JobPlan:
    """The plan, with a timeline of each worker in a file of `folder`."""

    def trace(spec: WorkerSpec) -> Mapping[str, Any]:
        part = TracePart(window=window, file=folder / f"g{plan.generation}-{spec.name}.json")
        return {"trace": part.model_dump(mode="json")}

    return _with_config(plan, trace)


def _certified(plan: JobPlan, authority: Authority) -> JobPlan:
    """The plan with credentials for each worker, all of this machine."""

    def credentials(spec: WorkerSpec) -> Mapping[str, Any]:
        name = authority.name(plan.generation, PeerRole(spec.role.value), spec.number)
        return {"credentials": authority.credentials(name).model_dump(mode="json")}

    return _with_config(plan, credentials)


def _with_config(plan: JobPlan, more: Callable[[WorkerSpec], Mapping[str, Any]]) -> JobPlan:
    """The plan, with `more` of each worker in its configuration."""

    def told(spec: WorkerSpec) -> WorkerSpec:
        return replace(spec, config={**spec.config, **more(spec)})

    return replace(plan, shards=tuple(map(told, plan.shards)), trainers=tuple(map(told, plan.trainers)))


def plan_prediction(
    job: LoadedJob, request: PredictionRequest, folders: PredictionFolders, cores: float, *, beside: bool
) -> PredictionWorkers:
    """The processes of a prediction, which share `cores`; `beside`: at the lowest priority.

    Each prediction has processes of its own, so its generation is 1.
    """
    secret, generation = secrets.token_hex(32), 1
    max_message = job.spec.cluster.max_message
    command = (*PYTHON, BESIDE) if beside else PYTHON
    config = {
        "job": with_secrets(job.full, job.secrets),
        "folder": str(job.folder),
        "output": str(folders.output),
        "commit": str(folders.commit),
        "request": dump_with_secrets(request),
        "secret": secret,
        "cores": cores / request.trainers,
        "max_message": max_message,
        "live": str(folders.live / "live"),
    }
    return PredictionWorkers(
        generation=generation,
        wire=request.wire,
        shards=_shards(
            job,
            {**job.spec.tables, **history_tables(Schema.of(job.spec.slots))},
            folders.private,
            {
                "secret": secret,
                "generation": generation,
                "max_message": max_message,
                "wire": request.wire,
                "num_ranks": request.trainers,
            },
            [str(folders.live / f"live-{shard}") for shard in range(request.num_shards)],
            command=command,
        ),
        predictors=tuple(
            WorkerSpec(
                role=WorkerRole.PREDICTOR,
                number=rank,
                command=(*command, "headrace.trainer.predict"),
                config={**config, "rank": rank},
                folder=job.folder,
                run_folder=folders.private,
                resources=Resources(cores=cores / request.trainers),
            )
            for rank in range(request.trainers)
        ),
        secret=secret,
    )


def cache_names(job: LoadedJob) -> list[str]:
    """The folders in CACHE of the processes that fetch their files of a commit themselves."""
    if job.spec.store.parts != "object":
        return []
    shards = [f"{WorkerRole.SHARD}-{number}" for number in range(job.cluster.num_shards)]
    return [*shards, *(f"{WorkerRole.TRAINER}-{rank}" for rank in range(1, job.cluster.trainers))]


def _part_stores(job: LoadedJob, suffix: str) -> list[dict[str, Any]] | None:
    """By shard, where its parts of commits are (pserver.config.PartStore); None: in the folder that rank 0 names."""
    mirror = job.spec.store.mirror
    if job.spec.store.parts != "object" or mirror is None:
        return None
    address, caches = parse_store_address(mirror, job.folder).text, job.store / CACHE
    shards = range(job.cluster.num_shards)
    return [{"address": address, "cache": str(caches / f"{WorkerRole.SHARD}-{shard}{suffix}")} for shard in shards]


def _live(job: LoadedJob, generation: int, shard: int) -> str:
    """The folder of a shard of a generation for its rows."""
    return str(job.store / LIVE / f"g{generation}-shard-{shard}")


def _shards(
    job: LoadedJob,
    tables: Mapping[str, TableSection],
    run_folder: Path,
    common: Mapping[str, Any],
    live: list[str],
    *,
    command: tuple[str, ...] = PYTHON,
    parts: Sequence[Mapping[str, Any]] | None = None,
    resources: Resources | None = None,
) -> tuple[WorkerSpec, ...]:
    """One shard for each folder of `live`; `common`: what all have; `parts`: by shard."""
    schema = Schema.of(job.spec.slots)
    config = {
        **common,
        "num_shards": len(live),
        "tables": {table: section.model_dump(mode="json") for table, section in tables.items()},
        "histories": {
            name: kept
            for name, kept in remembered_of(schema).items()
            if (kept if isinstance(kept, str) else name) in tables
        },
        "joins": {name: window_s for name, window_s in windows_of(job.spec.join).items() if name in tables},
        "groups": {slot.name: slot.group for slot in schema.sparse},
        "seed": job.spec.seed,
        "mode": job.spec.train.mode,
        "merge": job.spec.train.merge.model_dump(mode="json"),
    }
    return tuple(
        WorkerSpec(
            role=WorkerRole.SHARD,
            number=number,
            command=(*command, "headrace.pserver"),
            config={**config, "shard": number, "live": folder, "parts": None if parts is None else parts[number]},
            folder=job.folder,
            run_folder=run_folder,
            resources=resources or Resources(),
        )
        for number, folder in enumerate(live)
    )


def _trainer(job: LoadedJob, run_folder: Path, common: Mapping[str, Any], rank: int, suffix: str) -> WorkerSpec:
    """`suffix`: of the folder for files of commits."""
    cluster = job.cluster
    config = {
        **common,
        "job": job.full,
        "secrets": job.secrets,
        "folder": str(job.folder),
        "store": str(job.store),
        "rank": rank,
        "local_rank": rank,
        "world": cluster.trainers,
        "live": None if cluster.num_shards else _live(job, common["generation"], 0),
        "cache": str(job.store / CACHE / f"{name}{suffix}")
        if (name := f"{WorkerRole.TRAINER}-{rank}") in cache_names(job)
        else None,
        "matmul": job.kernels,
    }
    return WorkerSpec(
        role=WorkerRole.TRAINER,
        number=rank,
        command=(*PYTHON, "headrace.trainer.train"),
        config=config,
        folder=job.folder,
        run_folder=run_folder,
        inputs=digests(common["inputs"], job.folder),
        resources=_resources(cluster.resources.trainer),
    )


def _resources(section: WorkerResources) -> Resources:
    return Resources(cores=section.cores, memory_bytes=section.memory, gpus=section.gpus)
