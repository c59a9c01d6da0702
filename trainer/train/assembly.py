"""Builds one trainer from its configuration: the composition root of a trainer process."""

import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headrace.blob.signature import Signature
from headrace.blob.store_address import parse
from headrace.config import validate
from headrace.dataset.loader.batch_loader import Loader, PassReader
from headrace.dataset.loader.dead_letters import BadFraction, DeadLetters
from headrace.dataset.spec.schema import Schema
from headrace.deadline import Deadline
from headrace.errors import SpecError
from headrace.failpoints import arm
from headrace.identity.credentials import Identity
from headrace.inputs import digests
from headrace.interfaces import LOOPBACK_INTERFACE
from headrace.pserver.client.remote import RemoteShards
from headrace.pserver.config import PartStore
from headrace.pserver.consistency.modes import policy_of
from headrace.pserver.consistency.policy import Consistency
from headrace.pserver.feed import feed_server
from headrace.pserver.protocol.shards import Shards
from headrace.pserver.server.embedded import EmbeddedShards
from headrace.rpc import refusals
from headrace.rpc.rendezvous import RendezvousClient
from headrace.secrets import with_secrets
from headrace.trainer.checkpoint.commit_protocols import ManifestFacts
from headrace.trainer.checkpoint.commits import Commit, Commits
from headrace.trainer.checkpoint.committer import Committer
from headrace.trainer.checkpoint.mirror_uploader import MirrorUploader
from headrace.trainer.checkpoint.object_commits import ObjectCommits
from headrace.trainer.collectives.rank_store import meet_trainers
from headrace.trainer.collectives.ranks import Ranks, SingleRank, TorchRanks, on_rank_0
from headrace.trainer.config import NEWEST_DEFAULTS, TrainerJob, TrainSection, WorkerConfig
from headrace.trainer.dense.batch_norms import batch_norms
from headrace.trainer.dense.pipeline import PipelineDense
from headrace.trainer.dense.strategy import DenseStrategy, dense_strategy
from headrace.trainer.exports.coordinator import ExportCoordinator
from headrace.trainer.exports.pointers import newest_timeline
from headrace.trainer.features.deduplication import tables_of
from headrace.trainer.features.default_rows import DefaultRows, widths_of
from headrace.trainer.features.pass_gate import GatedReader
from headrace.trainer.features.pooling import pooling_for
from headrace.trainer.features.training_batches import BatchMaker, TrainingBatch
from headrace.trainer.fence.head_contact import watched
from headrace.trainer.journal.log import Log
from headrace.trainer.models.inference_mode import depends_on_mode
from headrace.trainer.rank0.object_head import ObjectHead
from headrace.trainer.rank0.parts import CLOSE_S, OPEN_S, RankZero, rank_zero, source_of
from headrace.trainer.rank0.recovery import RestartPoint, claim_and_recover, rerun_point
from headrace.trainer.rank0.resizing import ResizePreparation
from headrace.trainer.rank0.standby import Standby
from headrace.trainer.spec.defaults import fill_defaults
from headrace.trainer.spec.history_tables import remembered_of
from headrace.trainer.spec.join_tables import windows_of
from headrace.trainer.spec.shard_tables import tables_on_shards
from headrace.trainer.status.progress import TrainerProgress
from headrace.trainer.status.step_clock import STALL_SHARE, StepClock, WaitsFor
from headrace.trainer.train.carried_state import CarriedState
from headrace.trainer.train.close import PassCloser
from headrace.trainer.train.device_choice import fix_workspaces, pick_device
from headrace.trainer.train.exchanges import Exchanges
from headrace.trainer.train.export_setup import open_exporting, resume_exports
from headrace.trainer.train.fake_negatives import label_learnt_at_once
from headrace.trainer.train.fingerprint import comparable, fingerprint, merged_rows
from headrace.trainer.train.first_pass import read_first
from headrace.trainer.train.freed_memory import keep_freed_memory
from headrace.trainer.train.geo_exchanges import GeoExchanges, settings_in_force
from headrace.trainer.train.infer_first import InferFirst
from headrace.trainer.train.kernel_choice import KernelSchedule, agreed_schedule
from headrace.trainer.train.learning_rate import LearningRate
from headrace.trainer.train.loop import TrainLoop
from headrace.trainer.train.model_building import build_model
from headrace.trainer.train.model_feed import FeedContent, ModelFeed, open_feed
from headrace.trainer.train.observer import Observer
from headrace.trainer.train.own_metrics import own_metrics
from headrace.trainer.train.pipeline_step import PipelineStepper
from headrace.trainer.train.reading import open_reader
from headrace.trainer.train.restored_state import restore
from headrace.trainer.train.saved_state import SavedState, StateHolders
from headrace.trainer.train.step import Stepper
from headrace.trainer.train.trainer_parts import TrainerParts

MIRROR_END_S = 60.0
"""Longest wait at the end for the upload of the last commit to the mirror; then a warning is logged."""

HALVES = "halves"
"""Folder in the store with the predictions that the metrics of the two halves need."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trainer:
    """A trainer, ready to run."""

    loop: TrainLoop
    parts: TrainerParts
    job: TrainerJob
    store: Path
    answer: Callable[[Mapping[str, Any]], dict[str, Any]] | None
    """Answers requests to the running job. Only on rank 0."""


@contextmanager
def open_trainer(
    config: WorkerConfig,
    reader: PassReader | None = None,
    standby: Standby | None = None,
    identity: Identity | None = None,
) -> Iterator[Trainer]:
    """Everything that one trainer process needs, restored to the last state of the job. Closed in reverse order.

    `reader` replaces the source and pipe of the spec; the source still lists what there is to read. `standby`: see
    `begin_at`. `identity`: of this process, if it has one.
    """
    arm(config.faults)
    config, job = _filled(config)
    schema = Schema.of(job.slots)
    device = pick_device(job.train.device, config.local_rank, config.world)
    set_up_torch(job.train, config.cores, device)
    with ExitStack() as held:
        ranks = held.enter_context(closing(_ranks(config, device, job.train, identity)))
        arithmetic, model = fingerprint(device), build_model(job, schema, config.folder, device, ranks)
        progress = TrainerProgress(job.name, learning=job.train.learn, max_step_s=job.train.step_deadline * STALL_SHARE)
        policy = policy_of(job.train.mode, job.train.staleness, job.train.merge)
        shards = held.enter_context(closing(_shards(config, job, schema, policy, identity)))
        progress.step.unanswered = shards.unanswered
        dead_letters = DeadLetters(config.store / "dead_letters", config.rank, job.pipe.dead_letters)
        source = source_of(config, job)  # reads plans, and makes none
        reader = open_reader(config, job, schema, source, dead_letters, shards, instead=reader)
        default_rows = DefaultRows(widths_of(schema, job.tables), device)
        dense = _dense(job, model, ranks, shards, default_rows, progress.step)
        maker = _maker(job, schema, shards, dense)
        loader = held.enter_context(_loading(reader, maker, job))
        beginning = on_rank_0(ranks, lambda: begin_at(config, job, shards, standby))
        kernels = _schedule(config, job, ranks, beginning, model, arithmetic)
        reading = read_first(ranks, beginning, maker, loader, one_reader=dense.one_reader)
        rank0 = held.enter_context(_leading(config, job, schema, shards, beginning))
        rate = LearningRate(dense, job.dense)
        stepper = _stepper(job, schema, model, ranks, device, default_rows, kernels, dense)
        observer = _observer(config, job, schema, beginning, bounded=source.bounded)
        joint = (ranks, policy, shards, loader)
        limits = _close_limits(job, dead_letters, schema, bounded=source.bounded)
        closer = PassCloser(*(*joint, dense, rate, observer, progress, rank0, *limits))
        held_state = (dense, observer, closer, progress, stepper.scale, rate)
        holders = StateHolders(*held_state, CarriedState(job, schema, model, config.folder))
        restore(ranks, beginning, shards, holders, config.cache, standby)
        keeping = _keeping(config, job, schema, rank0, shards, model, holders, arithmetic, kernels, identity)
        parts = TrainerParts(
            job.train,
            job.tasks,
            *joint,
            held.enter_context(_exchanges(job, schema, ranks, policy, shards, dense, rank0, progress)),
            maker,
            stepper,
            dense,
            observer,
            closer,
            progress,
            rate,
            rank0,
            *held.enter_context(keeping),
            infer_first=_infer_first(job, shards, stepper, observer, progress, dense),
            average=job.dense.average,
            gated=reader if isinstance(reader, GatedReader) else None,
        )
        maker.begin()  # with the settings in force
        answer = None if rank0 is None else rank0.answer
        yield Trainer(TrainLoop(parts, job.seed, reading), parts, job, config.store, answer)


def _leading(
    config: WorkerConfig, job: TrainerJob, schema: Schema, shards: Shards, beginning: RestartPoint | None
) -> AbstractContextManager[RankZero | None]:
    """The parts of rank 0; None on other ranks, which have no `beginning`."""
    return nullcontext() if beginning is None else closing(rank_zero(config, job, schema, shards, beginning))


@contextmanager
def _loading(reader: PassReader, maker: BatchMaker, job: TrainerJob) -> Iterator[Loader[TrainingBatch]]:
    """Batches, read ahead. At the end none waits for rows any more."""
    sizes = job.train.batch_size, job.train.prefetch_batches, job.dense.accumulate
    loader = Loader(reader, maker.make, *sizes, reads_all=job.passes.shuffle, memory=job.passes.memory)
    try:
        yield loader
    finally:
        maker.begin()
        loader.close(Deadline.after(10.0))


def _close_limits(
    job: TrainerJob, dead_letters: DeadLetters, schema: Schema, *, bounded: bool
) -> tuple[BadFraction, DeadLetters, Schema, float, int, float]:
    """The last arguments of PassCloser. `bounded`: whether the source has an end."""
    live_from_s = time.time() if bounded else -math.inf
    return BadFraction(job.pipe.max_bad_fraction), dead_letters, schema, CLOSE_S, job.passes.max_day_jump, live_from_s


def _exchanges(
    job: TrainerJob,
    schema: Schema,
    ranks: Ranks,
    policy: Consistency,
    shards: Shards,
    dense: DenseStrategy,
    rank0: RankZero | None,
    progress: TrainerProgress,
) -> AbstractContextManager[Exchanges]:
    last = job.train.step_deadline, progress.step
    if job.train.k_steps is None:
        return closing(Exchanges(shards, policy.staleness, *last, early_rows=job.train.early_rows))
    groups = {slot.name: slot.group for slot in schema.sparse}
    settings = partial(settings_in_force, ranks, rank0, groups)
    return closing(GeoExchanges(shards, job.train.k_steps, ranks.world, dense.slices, settings, *last))


def _stepper(
    job: TrainerJob,
    schema: Schema,
    model: nn.Module,
    ranks: Ranks,
    device: torch.device,
    default_rows: DefaultRows,
    kernels: KernelSchedule,
    dense: DenseStrategy,
) -> Stepper:
    pooling = pooling_for(device, torch.get_num_threads())
    apart = job.metrics.progressive == "inference" and depends_on_mode(model)
    norms = batch_norms(job.dense.buffers, model, ranks)
    given = model, schema, job.tasks, job.train, pooling, device, default_rows, kernels
    if not isinstance(dense, PipelineDense):
        return Stepper(
            *given, norms=norms, dense=job.dense, measures_apart=apart, at_once=label_learnt_at_once(job.join)
        )
    if apart:
        raise SpecError('"inference" does not work with dense.strategy = "pipeline"', "metrics.progressive")
    stages = PipelineStepper(*given, norms=norms, dense=job.dense)
    stages.open_stages(model, job, dense, ranks)
    return stages


def _filled(config: WorkerConfig) -> tuple[WorkerConfig, TrainerJob]:
    """The configuration with the job's defaults written out, and the job with its secrets."""
    config = config.model_copy(update={"job": fill_defaults(config.job, unset=NEWEST_DEFAULTS)})
    return config, validate(TrainerJob, with_secrets(config.job, config.secrets), only_known=True)


def _observer(
    config: WorkerConfig, job: TrainerJob, schema: Schema, beginning: RestartPoint | None, *, bounded: bool
) -> Observer:
    halves = config.store / HALVES if job.metrics.halves and bounded else None
    exclusive = nullcontext if beginning is None or beginning.joblog is None else beginning.joblog.exclusive
    return Observer(job, schema, halves, exclusive, own_metrics(job.metrics.own, config.folder))


def begin_at(config: WorkerConfig, job: TrainerJob, shards: Shards, standby: Standby | None) -> RestartPoint:
    """Rank 0: the point from which the job continues. Claims the generation, except in a rerun.

    With `standby` it first waits until a resize has acted, while the shards take over rows.
    """
    if standby is not None:
        standby.follow(shards)
    if config.rerun is not None:
        return rerun_point(config.rerun.store, config.rerun.commit, config.job)
    facts = {"world": config.world, "shards": len(config.shards)}
    mirror, logged_only = _mirror(config, job), config.until is not None
    taken = partial(newest_timeline, job.name, job.exports, config.store, config.folder)
    head = None
    if job.store.parts == "object":
        assert mirror is not None, "the spec needs a mirror"
        head = ObjectHead.open(mirror, config.generation, job.store.log_mirror, _signature(config, job))
    claim = (config.store, config.generation, config.job, mirror, facts)
    checked, handed = (None, None) if standby is None else (standby.checked, standby.handed)
    begin = partial(claim_and_recover, *claim, world=config.world, logged_only=logged_only, taken=taken)
    return begin(head=head, checked=checked, handed=handed)


def _schedule(
    config: WorkerConfig,
    job: TrainerJob,
    ranks: Ranks,
    beginning: RestartPoint | None,
    model: nn.Module,
    arithmetic: Mapping[str, str],
) -> KernelSchedule:
    logged_only = config.until is not None
    return agreed_schedule(ranks, beginning, model, job.train, arithmetic, config.matmul, logged_only=logged_only)


@contextmanager
def _keeping(
    config: WorkerConfig,
    job: TrainerJob,
    schema: Schema,
    rank0: RankZero | None,
    shards: Shards,
    model: nn.Module,
    holders: StateHolders,
    arithmetic: Mapping[str, str],
    kernels: KernelSchedule,
    identity: Identity | None,
) -> Iterator[tuple[Committer | None, ExportCoordinator | None, ModelFeed | None]]:
    """Apply settings and waiting operations on every rank; on rank 0, except in a rerun: commits, exports, the feed."""
    arithmetic = {**arithmetic, **merged_rows(job.dense)}
    with ExitStack() as held:
        exporting, committer, feed = None, None, None
        if rank0 is not None and rank0.beginning.joblog is not None:
            parts = (schema, rank0, shards, model, holders.dense, holders.observer, holders.progress, arithmetic)
            exporting = held.enter_context(open_exporting(config, job, *parts))
        holders.closer.begin(None if rank0 is None else rank0.begin(holders.closer.day))
        if rank0 is not None and rank0.contact is not None:
            held.enter_context(watched(rank0.contact, config.node_timeout))
        if rank0 is not None and exporting is not None:
            capture = partial(_capture, config, rank0, holders, kernels)
            changes_since = partial(_changes_since, rank0.resizing, exporting)
            committing = _committing(config, job, rank0, shards, holders, arithmetic, capture, changes_since)
            committer = held.enter_context(committing)
            if rank0.resizing is not None:
                rank0.resizing.begin(committer)
            resume_exports(exporting, rank0, committer)
            content = FeedContent.of(config, job, schema, rank0, model, holders)
            feed = held.enter_context(open_feed(content, shards, rank0, config, identity))
        yield committer, exporting, feed


@contextmanager
def _committing(
    config: WorkerConfig,
    job: TrainerJob,
    rank0: RankZero,
    shards: Shards,
    holders: StateHolders,
    arithmetic: Mapping[str, str],
    capture: Callable[[Mapping[str, Tensor]], SavedState],
    changes_since: Callable[[], int | None],
) -> Iterator[Committer]:
    """The committer of rank 0, shown in the status. The context ends when a commit in progress is complete."""
    beginning, planner = rank0.beginning, rank0.planner
    assert beginning.joblog is not None, "claimed"
    origin = ManifestFacts(job.name, beginning.timeline, config.generation, config.world, arithmetic)

    def show(positions: Mapping[str, int]) -> None:
        if planner is not None:
            planner.commit(positions)

    mirror, objects = None, None
    if (head := beginning.head) is None:
        mirror = _uploader(config, job, beginning, beginning.joblog)
    else:
        objects = ObjectCommits(head.store, head.sequence, beginning.base, job.store.gc_grace)
    whose = (config.store, job.commit, origin, beginning.joblog, shards)
    begun = (capture, show, beginning.base, mirror)
    resizing = rank0.resizing
    keeps_all = (lambda: False) if resizing is None else (lambda: resizing.keeps_commits)
    committer = Committer(*whose, *begun, changes_since=changes_since, objects=objects, keeps_all=keeps_all)
    if (handed := beginning.commit) is not None and handed is not beginning.base:
        # a rerun needs a commit where the number of trainers changes
        committer.begins_after(handed.version, at_once=handed.manifest["world"] != config.world)
    changed = changed_arithmetic(beginning.commit, arithmetic)
    holders.progress.says = partial(_status_lines, config, rank0, shards, committer, changed)
    try:
        yield committer
    finally:
        committer.close()
        if mirror is not None and not mirror.stop(Deadline.after(MIRROR_END_S)):
            log.warning(
                "the mirror lacks the last commit: the next run uploads it first; %s", mirror.status()["trouble"]
            )


def _changes_since(resizing: ResizePreparation | None, exporting: ExportCoordinator) -> int | None:
    """The oldest version since which an export or a resize needs the changes in the next commit."""
    needs = (exporting.changes_since(), None if resizing is None else resizing.changes_since())
    return min((version for version in needs if version is not None), default=None)


def _mirror(config: WorkerConfig, job: TrainerJob) -> str | None:
    """The full address of the mirror."""
    return None if job.store.mirror is None else parse(job.store.mirror, config.folder).text


def _signature(config: WorkerConfig, job: TrainerJob) -> Signature:
    """Signs what rank 0 writes to the mirror."""
    return Signature.of(job.store.key, job.name, config.folder)


def _uploader(config: WorkerConfig, job: TrainerJob, beginning: RestartPoint, joblog: Log) -> MirrorUploader | None:
    """Copies commits to the mirror, first the restored one, whose upload may not have ended before."""
    uri = _mirror(config, job)
    if uri is None:
        return None

    def check_generation() -> None:
        with joblog.exclusive():
            pass

    holders, signature = Commits(config.store).holders, _signature(config, job)
    uploader = MirrorUploader(uri, config.store, job.commit.keep, holders, check_generation, signature)
    if beginning.base is not None:
        uploader.offer(beginning.base)
    return uploader


def _capture(
    config: WorkerConfig, rank0: RankZero, holders: StateHolders, kernels: KernelSchedule, dense: Mapping[str, Tensor]
) -> SavedState:
    """Rank 0, between passes: what a commit holds beside the rows. `dense`: the tensors that were consolidated."""
    known = rank0.beginning.known if rank0.planner is None else rank0.planner.known
    skips = rank0.beginning.skips if rank0.planner is None else rank0.planner.skips
    facts = {
        "spec": config.job,
        "partitions": [each.message() for each in known.values()],
        "skips": [list(skip) for skip in skips],
        "operations": rank0.operator.state(),
        "matmul": kernels.saved(holders.progress.version),
    }
    return holders.capture(rank0.chronicle.needed_from, facts, dense)


def changed_arithmetic(commit: Commit | None, now: Mapping[str, str]) -> list[str]:
    """Differences between the arithmetic of `commit` and the present one, in words; sums may depend on them."""
    then: Mapping[str, str] = now if commit is None else comparable(commit, now)
    changed = [f"{name} was {then.get(name)}, is {now.get(name)}" for name in now if then.get(name) != now[name]]
    if changed:
        log.warning("from now on sums may be rounded differently: %s", "; ".join(changed))
    return changed


def _status_lines(
    config: WorkerConfig, rank0: RankZero, shards: Shards, committer: Committer, changed: Sequence[str]
) -> dict[str, Any]:
    """Rank 0: lines of the status about log, operations, commits and recovery."""
    beginning, chronicle = rank0.beginning, rank0.chronicle
    return {
        "generation": config.generation,
        "interface": None if config.interface == LOOPBACK_INTERFACE else config.interface,
        "refused": dict(Counter(refusals.PROCESS.counts()) + Counter(shards.refused())),
        "timeline": beginning.timeline,
        "commit": committer.status(),
        "restored": None if beginning.base is None else beginning.base.name,
        "passed_over": dict(beginning.passed_over),
        "forked": chronicle.forked or bool(changed),
        "trouble": chronicle.trouble or rank0.trouble(),
        "missing": "; ".join(chronicle.missing),
        "operations": rank0.operator.status(),
        "overrides": dict(rank0.operator.overrides),
        "workers": {"trainers": config.world, "shards": len(config.shards)},
        "resizing": None if rank0.resizing is None else rank0.resizing.progress(),
    }


def set_up_torch(train: TrainSection, cores: int, device: torch.device) -> None:
    """Fix the threads and choose deterministic algorithms, so that two runs agree bit for bit."""
    torch.set_num_threads(train.threads or cores)
    torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms loads torch's compiler, too
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    keep_freed_memory()
    fix_workspaces(device, os.environ)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif train.amp == "float16":
        raise SpecError('"float16" is for GPUs; use "bfloat16" or "off" on a CPU', "train.amp")


def _ranks(config: WorkerConfig, device: torch.device, train: TrainSection, identity: Identity | None) -> Ranks:
    if config.launcher is None:
        assert config.world == 1, "several trainers meet at their launcher"
        return SingleRank()
    inputs = digests(config.inputs, config.folder)
    client = RendezvousClient(config.launcher, identity)
    store = meet_trainers(client, config.rank, config.world, inputs, config.interface, train.step_deadline)
    if store is None:
        return SingleRank()
    return TorchRanks(config.rank, config.world, store, config.interface, device, train.step_deadline)


def _shards(
    config: WorkerConfig, job: TrainerJob, schema: Schema, policy: Consistency, identity: Identity | None
) -> Shards:
    groups = {slot.name: slot.group for slot in schema.sparse}
    tables = tables_on_shards(job.tables, job.dense, job.slots, job.join)
    if not config.shards:
        parts = PartStore(address=str(_mirror(config, job))) if job.store.parts == "object" else None
        own = (config.cores, config.live, groups, config.generation, policy, parts)
        feed_at = feed_server.endpoint_of(config.interface, identity)
        filled = {"histories": remembered_of(schema), "joins": windows_of(job.join)}
        return EmbeddedShards(tables, job.seed, *own, feed_at=feed_at, wire=config.wire, **filled)  # type: ignore[arg-type]
    return RemoteShards(
        config.shards,
        tables,
        rank=config.rank,
        world=config.world,
        generation=config.generation,
        secret=config.secret,
        deadline=Deadline.after(OPEN_S),
        max_message_bytes=config.max_message,
        identity=identity,
        wire=config.wire,
        silent_s=config.node_timeout,
    )


def _dense(
    job: TrainerJob, model: nn.Module, ranks: Ranks, shards: Shards, default_rows: DefaultRows, clock: StepClock
) -> DenseStrategy:
    return dense_strategy(
        model,
        job.dense,
        ranks,
        shards,
        default_rows.parameters,
        step_s=job.train.step_deadline,
        awaiting=lambda: clock.awaiting(WaitsFor.SHARDS),
        seed=job.seed,
    )


def _maker(job: TrainerJob, schema: Schema, shards: Shards, dense: DenseStrategy) -> BatchMaker:
    """The loader's thread announces keys to the shards; with `infer_first` the loop does so, twice for each batch,
    and in mode "geo" for several batches at once."""
    tables = tables_of(schema, job.tables, job.tasks[0].label)
    prepares = not job.metrics.infer_first and job.train.k_steps is None
    micro_batch = job.train.batch_size if job.dense.accumulate > 1 else None
    slots = tables, job.tasks, job.sample.weight
    return BatchMaker(*slots, shards, prepares=prepares, slices=dense.slices, waits=True, micro_batch=micro_batch)


def _infer_first(
    job: TrainerJob,
    shards: Shards,
    stepper: Stepper,
    observer: Observer,
    progress: TrainerProgress,
    dense: DenseStrategy,
) -> InferFirst | None:
    """None unless the spec asks for it."""
    if not job.metrics.infer_first:
        return None
    clock, step_s = progress.step, job.train.step_deadline
    return InferFirst(shards, stepper, observer, job.metrics, step_s, clock, dense.slices)
