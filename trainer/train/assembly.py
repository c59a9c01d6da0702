"""Builds one trainer from its configuration: the composition root of a trainer process."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from headrace.address import LOOPBACK_INTERFACE
from headrace.codec import plain
from headrace.config import validate
from headrace.dataset.loader.batch_loader import Loader, PassReader
from headrace.dataset.loader.dead_letters import DeadLetters
from headrace.dataset.spec.schema import Schema
from headrace.deadline import Deadline
from headrace.errors import SpecError
from headrace.failpoints import arm
from headrace.identity.credentials import Identity
from headrace.pserver.client.connection import GREETING_S, ShardCaller
from headrace.pserver.client.remote import RemoteShards
from headrace.pserver.config import PartStore, ShardProcess
from headrace.pserver.consistency.policy import policy_of
from headrace.pserver.feed import feed_server
from headrace.pserver.protocol.shards import Shards
from headrace.pserver.server.embedded import EmbeddedShards
from headrace.pserver.server.step_floats import StepFloats
from headrace.rpc import refusals
from headrace.rpc.rendezvous import RendezvousClient
from headrace.secrets import with_secrets
from headrace.shared_folder import digests
from headrace.trainer.checkpoint.commit_source import STORE_S, open_source
from headrace.trainer.checkpoint.commits import Commit, ManifestFacts
from headrace.trainer.checkpoint.committer import CommitHooks, CommitSteps, Committer
from headrace.trainer.collectives.rank_store import meet_trainers
from headrace.trainer.collectives.ranks import Ranks, SingleRank, TorchRanks, on_rank_0
from headrace.trainer.config import NEWEST_DEFAULTS, TrainerJob, TrainSection, WorkerConfig
from headrace.trainer.dense.batch_norms import batch_norms
from headrace.trainer.dense.pipeline import PipelineDense
from headrace.trainer.dense.strategy import Around, DenseStrategy, dense_strategy
from headrace.trainer.device_copies import DeviceCopies
from headrace.trainer.exports.coordinator import ExportCoordinator
from headrace.trainer.exports.pointers import newest_timeline
from headrace.trainer.features.deduplication import tables_of
from headrace.trainer.features.default_rows import DefaultRows, widths_of
from headrace.trainer.features.pooling import pooling_for
from headrace.trainer.features.training_batches import BatchMaker, TrainingBatch
from headrace.trainer.job_status import Status
from headrace.trainer.journal.succession import watched
from headrace.trainer.models.contract import Declared
from headrace.trainer.models.module_checks import depends_on_mode
from headrace.trainer.own_metrics import metrics_of
from headrace.trainer.rank0.closes import CloseDuties, RankZeroCloses
from headrace.trainer.rank0.parts import OPEN_S, RankZero, rank_zero, source_of
from headrace.trainer.rank0.recovery import Recovery, RestartPoint, rerun_point
from headrace.trainer.rank0.resizing import Standby
from headrace.trainer.spec.changes import SHARDS, TRAINERS
from headrace.trainer.spec.defaults import fill_defaults
from headrace.trainer.spec.history_tables import remembered_of
from headrace.trainer.spec.join_tables import windows_of
from headrace.trainer.spec.shard_tables import tables_on_shards
from headrace.trainer.status.freshness import is_replay
from headrace.trainer.status.progress import TrainerProgress
from headrace.trainer.status.time_spent import STALL_SHARE, WaitsFor
from headrace.trainer.train.close import PassCloser
from headrace.trainer.train.commit_state import CarriedState, SavedState, StateHolders, restore
from headrace.trainer.train.device import (
    comparable,
    fingerprint,
    merged_rows,
    pick_device,
    set_up_torch,
)
from headrace.trainer.train.device_rows import placed_tables
from headrace.trainer.train.duties import Duties, RankZeroDuties, Written
from headrace.trainer.train.exchanges import Exchanges, GeoExchanges, settings_in_force
from headrace.trainer.train.exporting import open_exporting, resume_exports
from headrace.trainer.train.infer_first import InferFirst
from headrace.trainer.train.kernel_choice import KernelSchedule, agreed_schedule
from headrace.trainer.train.learning_rate import LearningRate
from headrace.trainer.train.live_index import LiveIndex
from headrace.trainer.train.loop import TrainerParts, TrainLoop
from headrace.trainer.train.losses import label_learnt_at_once
from headrace.trainer.train.mixed_precision import Precision
from headrace.trainer.train.model_building import build_model
from headrace.trainer.train.model_feed import FeedContent, open_feed
from headrace.trainer.train.observer import Observer
from headrace.trainer.train.pipeline_step import PipelineStepper
from headrace.trainer.train.reading import gated_in, open_reader, read_first, readers_of
from headrace.trainer.train.row_exchange import Devices, PeerShards, served_shard
from headrace.trainer.train.step import Stepper, StepSettings
from headrace.trainer.train.trainer_setup import Setup

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
    rank0: RankZero | None
    committer: Committer | None
    """None in a rerun, too."""
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
    beginning: RestartPoint | None = None,
) -> Iterator[Trainer]:
    """Everything that one trainer process needs, restored to the last state of the job. Closed in reverse order.

    `reader` replaces the source and pipe of the spec; the source still lists what there is to read. `standby`: see
    `begin_at`. `identity`: of this process, if it has one. `beginning`: replaces `begin_at`; then nothing is written.
    """
    arm(config.faults)
    config, job = _filled(config)
    with ExitStack() as held:
        setup = held.enter_context(_set_up(config, job, identity))
        schema, ranks, shards, progress = setup.schema, setup.ranks, setup.shards, setup.progress
        arithmetic, model = fingerprint(setup.device), build_model(job, schema, config.folder, setup.device, ranks)
        dead_letters = DeadLetters(config.store / "dead_letters", config.rank, job.pipe.dead_letters)
        source = source_of(config, job)  # reads plans, and makes none
        held.enter_context(nullcontext() if reader is None else closing(source))
        reader = open_reader(setup, source, dead_letters, instead=reader)
        default_rows = DefaultRows(widths_of(schema, job.tables), setup.device)
        dense = _dense(setup, model, default_rows)
        maker = _maker(setup, dense)
        loader = held.enter_context(_loading(reader, maker, job))
        beginning = beginning or on_rank_0(ranks, lambda: begin_at(config, job, shards, standby))
        kernels = _schedule(setup, beginning, model, arithmetic)
        reading = read_first(ranks, beginning, maker, loader, num_stages=dense.num_stages)
        rank0 = held.enter_context(_rank0(setup, beginning))
        rate = LearningRate(dense, job.dense, by_pass=not setup.policy.meets_in_steps)
        stepper = _stepper(setup, model, default_rows, kernels, dense)
        observer = _observer(setup, beginning, bounded=source.bounded)
        closes = _closes(setup, rank0, observer, replay=is_replay(job.sources.values(), bounded=source.bounded))
        closer = PassCloser(setup, loader, dense, rate, observer, closes, dead_letters, Declared.of(model).forget)
        holders = StateHolders(
            dense=dense,
            observer=observer,
            closes=closes,
            progress=progress,
            scale=stepper.scale,
            rate=rate,
            carried=CarriedState(job, schema, model, config.folder),
        )
        restore(ranks, beginning, shards, holders, config.cache, standby)
        written = held.enter_context(_written(setup, rank0, model, holders, closer, arithmetic, kernels))
        parts = TrainerParts(
            train=job.train,
            tasks=job.tasks,
            ranks=ranks,
            policy=setup.policy,
            shards=shards,
            loader=loader,
            exchanges=held.enter_context(_exchanges(setup, dense, rank0)),
            maker=maker,
            stepper=stepper,
            dense=dense,
            observer=observer,
            closer=closer,
            progress=progress,
            rate=rate,
            duties=_duties(setup, rank0, closes, written, model, holders),
            infer_first=_infer_first(setup, stepper, observer, dense),
            average=job.dense.average,
            gated=gated_in(reader),
        )
        maker.begin()  # with the settings in force
        answer = None if rank0 is None else rank0.answer
        yield Trainer(TrainLoop(parts, job.seed, reading), parts, rank0, written.committer, job, config.store, answer)


@contextmanager
def _set_up(config: WorkerConfig, job: TrainerJob, identity: Identity | None) -> Iterator[Setup]:
    """The process itself, and its connections to the other ranks and to the shards."""
    device = pick_device(job.train.device, config.local_rank, config.world)
    set_up_torch(job.train, config.cores, device)
    schema, train = Schema.of(job.slots), job.train
    policy = policy_of(train.mode, train.staleness, train.merge, train.max_ahead)
    with (
        _own_shard(config, job, device) as floats,
        closing(_ranks(config, device, job.train, identity)) as ranks,
        closing(_shards(config, job, schema, identity, device, _devices(ranks, device, floats))) as shards,
        readers_of(config, job, schema, identity) as readers,
    ):
        progress = TrainerProgress(job.name, learning=job.train.learn, max_step_s=job.train.step_deadline * STALL_SHARE)
        progress.step.unanswered = shards.unanswered
        yield Setup(
            config=config,
            job=job,
            schema=schema,
            device=device,
            ranks=ranks,
            policy=policy,
            shards=shards,
            progress=progress,
            identity=identity,
            readers=readers,
        )
        if floats is not None:  # rank 0 may need the shards of others until now; it holds the store of meetings
            ranks.meet()
            ranks.sum(np.zeros(1, np.int64))


def _duties(
    setup: Setup,
    rank0: RankZero | None,
    closes: CloseDuties,
    written: Written,
    model: nn.Module,
    holders: StateHolders,
) -> Duties:
    if rank0 is None:
        return Duties()
    live = None
    if holders.observer.found is not None:
        content = FeedContent.of(setup.config, setup.job, setup.schema, rank0, model, holders)
        live = LiveIndex(content, setup.shards.look)
    return RankZeroDuties(setup, rank0, closes, written, live)


def _rank0(setup: Setup, beginning: RestartPoint | None) -> AbstractContextManager[RankZero | None]:
    """The parts of rank 0; None on other ranks, which have no `beginning`."""
    if beginning is None:
        return nullcontext()
    return closing(rank_zero(setup.config, setup.job, setup.schema, setup.shards, beginning))


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


def _exchanges(setup: Setup, dense: DenseStrategy, rank0: RankZero | None) -> AbstractContextManager[Exchanges]:
    train, shards = setup.job.train, setup.shards
    last = train.step_deadline, setup.progress.step
    if train.k_steps is None:
        return closing(Exchanges(shards, setup.policy.staleness, *last, early_rows=train.early_rows))
    groups = {slot.name: slot.group for slot in setup.schema.sparse}
    settings = partial(settings_in_force, setup.ranks, rank0, groups)
    copies = train.k_steps, setup.ranks.world, dense.slices, settings
    return closing(GeoExchanges(shards, *copies, *last, staleness=setup.policy.staleness))


def _stepper(
    setup: Setup, model: nn.Module, default_rows: DefaultRows, kernels: KernelSchedule, dense: DenseStrategy
) -> Stepper:
    job, ranks, device = setup.job, setup.ranks, setup.device
    copies = DeviceCopies(device)
    pooling = pooling_for(device, torch.get_num_threads(), copies, rows_on_device=job.train.rows == "device")
    apart = _measures_apart(job, model)
    norms = batch_norms(job.dense.buffers, model, ranks)
    settings = StepSettings(
        schema=setup.schema,
        tasks=job.tasks,
        train=job.train,
        dense=job.dense,
        measures_apart=apart,
        at_once=None if isinstance(dense, PipelineDense) else label_learnt_at_once(job.join),
    )
    parts = model, settings, pooling, device
    if not isinstance(dense, PipelineDense):
        return Stepper(*parts, default_rows=default_rows, kernels=kernels, norms=norms, copies=copies)
    if apart:
        raise SpecError('"inference" does not work with dense.strategy = "pipeline"', "metrics.progressive")
    stages = PipelineStepper(*parts, default_rows=default_rows, kernels=kernels, norms=norms, copies=copies)
    stages.open_stages(model, job, dense, ranks)
    return stages


def _measures_apart(job: TrainerJob, model: nn.Module) -> bool:
    return job.metrics.progressive == "inference" and depends_on_mode(model)


def _filled(config: WorkerConfig) -> tuple[WorkerConfig, TrainerJob]:
    """The configuration with the job's defaults written out, and the job with its secrets."""
    config = config.model_copy(update={"job": fill_defaults(config.job, unset=NEWEST_DEFAULTS)})
    return config, validate(TrainerJob, with_secrets(config.job, config.secrets), only_known=True)


def _observer(setup: Setup, beginning: RestartPoint | None, *, bounded: bool) -> Observer:
    job, config = setup.job, setup.config
    halves = config.store / HALVES if job.metrics.halves and bounded else None
    exclusive = nullcontext if beginning is None or beginning.joblog is None else beginning.joblog.exclusive
    return Observer(job, setup.schema, halves, exclusive, metrics_of(job.metrics.own, config.folder))


def begin_at(config: WorkerConfig, job: TrainerJob, shards: Shards, standby: Standby | None) -> RestartPoint:
    """Rank 0: the point from which the job continues. Claims the generation, except in a rerun.

    With `standby` it first waits until a resize has acted, while the shards take over rows.
    """
    if standby is not None:
        standby.follow(shards)
    if config.rerun is not None:
        return rerun_point(config.rerun, config.job)
    source = open_source(
        *(job.store, config.store, job.name, config.folder, Deadline.after(STORE_S)),
        generation=config.generation,
        checked=None if standby is None else standby.checked,
    )
    return Recovery(
        config.store,
        config.generation,
        config.job,
        source=source,
        facts={"world": config.world, "shards": len(config.shards)},
        world=config.world,
        chosen=None if config.elastic is None else {SHARDS: len(config.shards), TRAINERS: config.world},
        logged_only=config.until is not None,
        taken=partial(newest_timeline, job.name, job.exports, config.store, config.folder),
        handed=None if standby is None else standby.handed,
    ).begin()


def _schedule(
    setup: Setup, beginning: RestartPoint | None, model: nn.Module, arithmetic: Mapping[str, str]
) -> KernelSchedule:
    config, train = setup.config, setup.job.train
    logged_only = config.until is not None
    return agreed_schedule(setup.ranks, beginning, model, train, arithmetic, config.matmul, logged_only=logged_only)


@contextmanager
def _written(
    setup: Setup,
    rank0: RankZero | None,
    model: nn.Module,
    holders: StateHolders,
    closer: PassCloser,
    arithmetic: Mapping[str, str],
    kernels: KernelSchedule,
) -> Iterator[Written]:
    """Apply settings and waiting operations on every rank; on rank 0, except in a rerun: commits, exports, the feed."""
    config, job, shards = setup.config, setup.job, setup.shards
    arithmetic = {**arithmetic, **merged_rows(job.dense)}
    with ExitStack() as held:
        exporting = None
        if rank0 is not None and rank0.beginning.joblog is not None:
            exporting = held.enter_context(open_exporting(setup, rank0, model, holders, arithmetic))
        closer.begin(None if rank0 is None else rank0.begin(closer.day))
        if rank0 is not None and rank0.contact is not None:
            held.enter_context(watched(rank0.contact, config.node_timeout))
        if rank0 is None or exporting is None:
            yield Written()
            return
        capture = partial(_capture, config, rank0, holders, kernels)
        committing = _committing(setup, rank0, holders, arithmetic, capture, partial(_changes_since, rank0, exporting))
        committer = held.enter_context(committing)
        if rank0.resizing is not None:
            rank0.resizing.begin(committer)
        resume_exports(exporting, rank0, committer)
        content = FeedContent.of(config, job, setup.schema, rank0, model, holders)
        feed = held.enter_context(open_feed(content, shards, rank0, config, setup.identity))
        yield Written(committer, exporting, feed)


@contextmanager
def _committing(
    setup: Setup,
    rank0: RankZero,
    holders: StateHolders,
    arithmetic: Mapping[str, str],
    capture: Callable[[Mapping[str, Tensor]], SavedState],
    changes_since: Callable[[], int | None],
) -> Iterator[Committer]:
    """The committer of rank 0, shown in the status. The context ends when a commit in progress is complete."""
    config, job, shards = setup.config, setup.job, setup.shards
    beginning, planner = rank0.beginning, rank0.planner
    assert beginning.joblog is not None and beginning.source is not None, "claimed"
    origin = ManifestFacts(job.name, beginning.timeline, config.generation, config.world, arithmetic)

    def show(positions: Mapping[str, int]) -> None:
        if planner is not None:
            planner.commit(positions)

    store = beginning.source.commit_store(beginning.joblog, job.commit.keep, beginning.base)
    resizing = rank0.resizing
    keeps_all = (lambda: False) if resizing is None else (lambda: resizing.keeps_commits)
    hooks = CommitHooks(capture, show, changes_since, keeps_all)
    committer = Committer(CommitSteps(store, job.commit, origin, beginning.joblog, shards, hooks, beginning.base))
    if (handed := beginning.commit) is not None and handed is not beginning.base:
        # a rerun needs a commit where the number of trainers changes
        committer.begins_after(handed.version, at_once=handed.manifest.world != config.world)
    changed = changed_arithmetic(beginning.commit, arithmetic)
    holders.progress.with_more = partial(_with_rank0, config, rank0, holders.closes, committer, changed)
    try:
        yield committer
    finally:
        committer.close()
        store.stop(Deadline.after(MIRROR_END_S))


def _changes_since(rank0: RankZero, exporting: ExportCoordinator) -> int | None:
    """The oldest version since which an export or a resize needs the changes in the next commit."""
    needs = (exporting.changes_since(), None if rank0.resizing is None else rank0.resizing.changes_since())
    return min((version for version in needs if version is not None), default=None)


def _capture(
    config: WorkerConfig, rank0: RankZero, holders: StateHolders, kernels: KernelSchedule, dense: Mapping[str, Tensor]
) -> SavedState:
    """Rank 0, between passes: what a commit holds beside the rows. `dense`: the tensors that were consolidated."""
    known = rank0.beginning.known if rank0.planner is None else rank0.planner.known
    skips = rank0.beginning.skips if rank0.planner is None else rank0.planner.skips
    facts = {
        "spec": config.job,
        "partitions": plain(list(known.values())),
        "skips": [list(skip) for skip in skips],
        "operations": rank0.operator.state(),
        "matmul": kernels.saved(holders.progress.version),
    }
    return holders.capture(rank0.replay_log.needed_from, facts, dense)


def changed_arithmetic(commit: Commit | None, now: Mapping[str, str]) -> list[str]:
    """Differences between the arithmetic of `commit` and the present one, in words; sums may depend on them."""
    then: Mapping[str, str] = now if commit is None else comparable(commit, now)
    changed = [f"{name} was {then.get(name)}, is {now.get(name)}" for name in now if then.get(name) != now[name]]
    if changed:
        log.warning("from now on sums may be rounded differently: %s", "; ".join(changed))
    return changed


def _with_rank0(
    config: WorkerConfig,
    rank0: RankZero,
    closes: CloseDuties,
    committer: Committer,
    changed: Sequence[str],
    status: Status,
) -> Status:
    """Rank 0: the status with the figures of log, operations, commits and recovery."""
    beginning, replay_log = rank0.beginning, rank0.replay_log
    readers = {"readers": len(config.readers)} if config.readers else {}
    return replace(
        status,
        generation=config.generation,
        interface=None if config.interface == LOOPBACK_INTERFACE else config.interface,
        refused=dict(Counter(refusals.PROCESS.counts()) + Counter(closes.refused)),
        timeline=beginning.timeline,
        commit=committer.status(),
        restored=None if beginning.base is None else beginning.base.name,
        passed_over=dict(beginning.passed_over),
        forked=replay_log.forked or bool(changed),
        trouble=replay_log.trouble or rank0.trouble(),
        missing="; ".join(replay_log.missing),
        operations=rank0.operator.status(),
        overrides=dict(rank0.operator.job.overrides),
        workers={"trainers": config.world, "shards": len(config.shards)} | readers,
        resizing=None if rank0.resizing is None else rank0.resizing.progress(),
    )


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


def _own_shard(
    config: WorkerConfig, job: TrainerJob, device: torch.device
) -> AbstractContextManager[StepFloats | None]:
    """Serve the shard in this process, where there is one that others reach: before they are met."""
    if config.shard is None:
        return nullcontext()
    return served_shard(config.shard, placed_tables(job.tables, device, job.train.rows_memory))


def _devices(ranks: Ranks, device: torch.device, floats: StepFloats | None) -> Devices | None:
    return None if floats is None else Devices(ranks, device, floats)


def _shards(
    config: WorkerConfig,
    job: TrainerJob,
    schema: Schema,
    identity: Identity | None,
    device: torch.device,
    devices: Devices | None,
) -> Shards:
    tables = tables_on_shards(job.tables, job.dense, job.slots, job.join)
    if not config.shards:
        address = job.store.objects_at(config.folder)
        parts = None if address is None else PartStore(address=address)
        alone = ShardProcess.alone(
            tables,
            job.seed,
            histories=remembered_of(schema),
            joins=windows_of(job.join),
            groups={slot.name: slot.group for slot in schema.sparse},
            mode=job.train.mode,
            merge=job.train.merge,
            max_ahead=job.train.max_ahead,
            wire=config.wire,
            generation=config.generation,
            live=config.live,
            parts=parts,
        )
        on_device = job.tables if job.train.rows == "device" else {}
        placed = placed_tables(on_device, device, job.train.rows_memory)
        return EmbeddedShards(alone, config.cores, feed_server.endpoint_of(config.interface, identity), placed)
    caller = ShardCaller(
        rank=config.rank,
        world=config.world,
        generation=config.generation,
        secret=config.secret,
        max_message_bytes=config.max_message,
        identity=identity,
        wire=config.wire,
        silent_s=config.node_timeout,
        greeting_s=GREETING_S if devices is None else config.node_timeout,  # other trainers have more to do
    )
    opening = config.shards, tables, caller, Deadline.after(OPEN_S)
    return RemoteShards(*opening) if devices is None else PeerShards(*opening, job.tables.keys(), devices)


def _dense(setup: Setup, model: nn.Module, default_rows: DefaultRows) -> DenseStrategy:
    job, clock = setup.job, setup.progress.step
    around = Around(
        setup.shards,
        job.train.step_deadline,
        lambda: clock.awaiting(WaitsFor.SHARDS),
        job.seed,
        forwards=2 if _measures_apart(job, model) else 1,
        types=Precision(job.train, setup.device).forward,
        in_step=setup.policy.meets_in_steps,
    )
    return dense_strategy(model, job.dense, setup.ranks, default_rows.parameters, around)


def _maker(setup: Setup, dense: DenseStrategy) -> BatchMaker:
    """The loader's thread announces keys to the shards; with `infer_first` the loop does so, twice for each batch,
    and in mode "geo" for several batches at once."""
    job = setup.job
    tables = tables_of(setup.schema, job.tables, job.tasks[0].label)
    prepares = not job.metrics.infer_first and job.train.k_steps is None
    micro_batch = job.train.batch_size if job.dense.accumulate > 1 else None
    slots = tables, job.tasks, job.sample.weight
    return BatchMaker(*slots, setup.shards, prepares=prepares, slices=dense.slices, waits=True, micro_batch=micro_batch)


def _closes(setup: Setup, rank0: RankZero | None, observer: Observer, *, replay: bool) -> CloseDuties:
    if rank0 is None:
        return CloseDuties()
    whole = setup.job, setup.schema, setup.policy, rank0, setup.progress, observer.report
    return RankZeroCloses(*whole, world=setup.ranks.world, replay=replay)


def _infer_first(setup: Setup, stepper: Stepper, observer: Observer, dense: DenseStrategy) -> InferFirst | None:
    """None unless the spec asks for it."""
    job = setup.job
    if not job.metrics.infer_first:
        return None
    clock, step_s = setup.progress.step, job.train.step_deadline
    return InferFirst(setup.shards, stepper, observer, job.metrics, step_s, clock, dense.slices, dense.predicting)
