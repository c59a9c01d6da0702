"""The processes of a job's generation, or of a prediction, and the configuration of each.

Pure, but for the secret drawn for each generation. A launcher starts them (service.cluster.runtime).
"""

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from headrace.address import LOOPBACK_INTERFACE
from headrace.dataset.spec.schema import Schema
from headrace.identity.authority import Authority
from headrace.identity.credentials import Identity
from headrace.identity.peers import PeerRole
from headrace.pserver.config import TableSection, Wire
from headrace.rpc import unix_sockets
from headrace.rpc.channels import TlsPeer
from headrace.secrets import dump_with_secrets, with_secrets
from headrace.service.cluster.machine import input_files, stream_files
from headrace.service.cluster.runtime import MODULES, PYTHON, Resources, WorkerRole, WorkerSpec
from headrace.service.cluster.store import CACHE, LIVE, TRACE_PARTS, TRACE_REQUEST
from headrace.service.spec.config import ClusterSection, WorkerResources
from headrace.service.spec.job import LoadedJob, row_workers
from headrace.service.spec.launchers import launcher_of
from headrace.shared_folder import SharedFolder, digests, head_sizes
from headrace.timeline import TracePart, TraceWindow
from headrace.trainer.predict.config import PredictionRequest
from headrace.trainer.spec.class_rules import label_bounds_of, masks_of
from headrace.trainer.spec.device_rules import check_device_rows
from headrace.trainer.spec.history_tables import history_tables, remembered_of
from headrace.trainer.spec.join_tables import windows_of
from headrace.trainer.spec.shard_tables import tables_on_shards
from headrace.trainer.status.time_spent import STALL_SHARE

BESIDE = "headrace.trainer.predict.background"
"""The module that runs another one at the lowest priority."""


def preloaded(cluster: ClusterSection) -> list[str]:
    """The modules that the workers of a job import.

    Shards and readers start first, so they are forked before torch is loaded.
    """
    shards = MODULES[WorkerRole.SHARD] if cluster.num_shards else ()
    readers = MODULES[WorkerRole.READER] if cluster.readers else ()
    return [*shards, *readers, *MODULES[WorkerRole.TRAINER]]


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
    """Their configurations lack the addresses of shards and readers, which are known once those run."""
    readers: tuple[WorkerSpec, ...] = ()
    max_silent_s: float
    """Rank 0 stands still where it does not answer for longer."""
    secret: str = field(repr=False)
    """Every call between the job's processes carries it."""
    head: Identity | None = None
    """The identity of the launcher, for calls to rank 0; None where all processes are on this machine."""

    @property
    def servers(self) -> tuple[WorkerSpec, ...]:
        """The workers that serve the trainers, and start before them."""
        return self.shards + self.readers

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
    head: Identity | None = None
    """By which the launcher has the shards read their rows: that of the first predictor, which does not run yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionHosts:
    """The machines of a prediction as far as its processes depend on them; by default, this one."""

    generation: int = 1
    """That of the first try."""
    same_machine: bool = True
    authority: Authority | None = None
    """The job's, where processes reach each other between machines."""
    sees: SharedFolder | None = None
    """The store, which every machine must see."""
    sees_output: SharedFolder | None = None
    """The folder of the output, which every machine must see."""
    uploaded: Mapping[str, Any] | None = None
    """Name and manifest of the commit, of which each process fetches its part from the object store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionFolders:
    """The folders of a prediction. `live` and `private` are new, and for their owner only."""

    output: str
    """Address of the output."""
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
    cores_each = max(1, (cores or os.cpu_count() or 1) // cluster.num_trainers)
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
    of_readers = {} if same_machine else head_sizes(stream_files(job), job.folder)
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
            {**common, "num_ranks": cluster.num_trainers},
            [_live(job, generation, shard) for shard in range(cluster.num_shards)],
            parts=_part_stores(job, suffix, cluster.num_shards),
            resources=_resources(cluster.resources.shard),
        ),
        readers=_readers(job, run_folder, common, of_readers),
        trainers=tuple(_trainer(job, run_folder, of_ranks, rank, suffix) for rank in range(cluster.num_trainers)),
        max_silent_s=job.spec.train.step_deadline * STALL_SHARE,
        secret=secret,
    )
    if job.spec.train.rows == "device":
        check_device_rows(job.spec, row_workers(cluster))  # an earlier resize may have given other numbers
        plan = _with_shards_inside(plan)
    plan = _traced(plan, trace, job.store)
    if authority is None:
        return plan
    head = authority.identity(authority.name(generation, PeerRole.HEAD, 0))
    return replace(_certified(plan, authority) if same_machine else plan, head=head)


def _with_shards_inside(plan: JobPlan) -> JobPlan:
    """The plan, with each shard in the process of the trainer of its number."""
    if not plan.shards:
        return plan
    sockets = [plan.run_folder / f"{shard.name}.socket" for shard in plan.shards]
    addresses = [unix_sockets.address_of(socket) for socket in sockets]
    trainers = tuple(
        replace(
            trainer,
            config={**trainer.config, "shard": {**shard.config, "socket": str(socket)}, "shards": addresses},
        )
        for trainer, shard, socket in zip(plan.trainers, plan.shards, sockets, strict=True)
    )
    return replace(plan, trainers=trainers, shards=())


def _traced(plan: JobPlan, window: TraceWindow | None, store: Path) -> JobPlan:
    """The plan, with a timeline of each worker in a file of the store: of `window`, and where one is requested."""

    def trace(spec: WorkerSpec) -> Mapping[str, Any]:
        file = store / TRACE_PARTS / f"g{plan.generation}-{spec.name}.json"
        part = TracePart(window=window, file=file, request=store / TRACE_REQUEST)
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

    shards, readers, trainers = (tuple(map(told, each)) for each in (plan.shards, plan.readers, plan.trainers))
    return replace(plan, shards=shards, readers=readers, trainers=trainers)


def plan_prediction(
    job: LoadedJob,
    request: PredictionRequest,
    folders: PredictionFolders,
    cores: float,
    *,
    beside: bool,
    hosts: PredictionHosts = PredictionHosts(),
) -> PredictionWorkers:
    """The processes of a try of a prediction, which share `cores`; `beside`: at the lowest priority."""
    secret, cluster = secrets.token_hex(32), job.spec.cluster
    there, generation = request.on == "cluster", hosts.generation
    command = (*PYTHON, BESIDE) if beside else PYTHON
    common = {
        "secret": secret,
        "generation": generation,
        "max_message": cluster.max_message,
        "node_timeout": cluster.node_timeout,
        "sees": None if hosts.sees is None else hosts.sees.model_dump(mode="json"),
    }

    def live(name: str) -> str:
        return str(folders.live / name if hosts.same_machine else job.store / LIVE / f"g{generation}-{name}")

    config = {
        **common,
        "job": with_secrets(job.full, job.secrets),
        "folder": str(job.folder),
        "output": folders.output,
        "commit": str(folders.commit),
        "uploaded": hosts.uploaded,
        "request": dump_with_secrets(request),
        "cores": cores / request.trainers,
        "sees_output": None if hosts.sees_output is None else hosts.sees_output.model_dump(mode="json"),
    }
    resources = _resources(cluster.resources.trainer) if there else Resources(cores=cores / request.trainers)
    authority = hosts.authority
    return PredictionWorkers(
        generation=generation,
        wire=request.wire,
        shards=_shards(
            job,
            {**job.spec.tables, **history_tables(Schema.of(job.spec.slots))},
            folders.private,
            {
                **common,
                "wire": request.wire,
                "num_ranks": request.trainers,
                "interface": LOOPBACK_INTERFACE if authority is None else cluster.interface,
            },
            [live(f"shard-{shard}") for shard in range(request.num_shards)],
            command=command,
            parts=None if hosts.uploaded is None else _part_stores(job, ".predict", request.num_shards),
            resources=_resources(cluster.resources.shard) if there else None,
        ),
        predictors=tuple(
            WorkerSpec(
                role=WorkerRole.PREDICTOR,
                number=rank,
                command=(*command, "headrace.trainer.predict"),
                config={**config, "rank": rank, "live": live(f"predictor-{rank}")},
                folder=job.folder,
                run_folder=folders.private,
                resources=resources,
            )
            for rank in range(request.trainers)
        ),
        secret=secret,
        head=None if authority is None else authority.identity(authority.name(generation, PeerRole.PREDICTOR, 0)),
    )


def cache_names(job: LoadedJob) -> list[str]:
    """The folders in CACHE of the processes that fetch their files of a commit themselves."""
    if job.spec.store.parts != "object":
        return []
    shards = [f"{WorkerRole.SHARD}-{number}" for number in range(job.cluster.num_shards)]
    return [*shards, *(f"{WorkerRole.TRAINER}-{rank}" for rank in range(1, job.cluster.num_trainers))]


def _part_stores(job: LoadedJob, suffix: str, num_shards: int) -> list[dict[str, Any]] | None:
    """By shard, where its parts of commits are (pserver.config.PartStore); None: in the folder that rank 0 names."""
    if (address := job.spec.store.objects_at(job.folder)) is None:
        return None
    caches = job.store / CACHE
    shards = range(num_shards)
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
        "max_ahead": job.spec.train.max_ahead,
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


def _readers(
    job: LoadedJob, run_folder: Path, common: Mapping[str, Any], inputs: Mapping[str, int]
) -> tuple[WorkerSpec, ...]:
    """The readers of a job, which know the stream alone. `inputs`: their files, which trainers then need not have."""
    spec, cluster = job.spec, job.cluster
    full = with_secrets(job.full, job.secrets)
    config = {
        **{key: common[key] for key in ("secret", "generation", "interface")},
        **{key: full[key] for key in ("name", "seed", "sources", "pipe", "slots")},
        "num_readers": cluster.readers,
        "num_ranks": cluster.trainers,
        "masks": masks_of(spec),
        "labels": [asdict(each) for each in label_bounds_of(spec)],
        "max_outage": spec.passes.max_outage,
        "memory": spec.passes.memory,
        "folder": str(job.folder),
        "inputs": inputs,
        "digests": digests(inputs, job.folder),
    }
    return tuple(
        WorkerSpec(
            role=WorkerRole.READER,
            number=number,
            command=(*PYTHON, "headrace.dataset.reader"),
            config={**config, "reader": number},
            folder=job.folder,
            run_folder=run_folder,
            resources=_resources(cluster.resources.reader),
        )
        for number in range(cluster.readers)
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
        "world": cluster.num_trainers,
        "live": None if cluster.num_shards else _live(job, common["generation"], 0),
        "cache": str(job.store / CACHE / f"{name}{suffix}")
        if (name := f"{WorkerRole.TRAINER}-{rank}") in cache_names(job)
        else None,
        "matmul": job.kernels,
        "ends_after": job.ends_after,
        "elastic": None if (elastic := job.spec.cluster.elastic) is None else (elastic.min, elastic.max),
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
