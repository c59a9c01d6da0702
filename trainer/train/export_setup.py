"""Builds the exports of a job from their parts, on rank 0."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

from torch import nn

from headrace.dataset.features.served_events import describe_features
from headrace.dataset.spec.schema import Schema
from headrace.deadline import Deadline
from headrace.pserver.protocol.shards import F32, Keys, Shards
from headrace.trainer.checkpoint.commits import Commit
from headrace.trainer.checkpoint.committer import Committer
from headrace.trainer.config import TrainerJob, WorkerConfig
from headrace.trainer.dense.strategy import DenseStrategy
from headrace.trainer.exports.coordinator import ExportCoordinator
from headrace.trainer.exports.export_settings import STAGES, ExportSettings
from headrace.trainer.exports.exporter_process import ExporterProcess
from headrace.trainer.exports.request import ExporterConfig, ExportRequest
from headrace.trainer.rank0.parts import RankZero
from headrace.trainer.spec.changes import schema_of
from headrace.trainer.status.progress import TrainerProgress
from headrace.trainer.train.export_stage import ExportStager
from headrace.trainer.train.observer import Observer

LOOK_S = 60.0
"""Longest time to read the rows of the golden predictions."""


@contextmanager
def open_exporting(
    config: WorkerConfig,
    job: TrainerJob,
    schema: Schema,
    rank0: RankZero,
    shards: Shards,
    model: nn.Module,
    dense: DenseStrategy,
    observer: Observer,
    progress: TrainerProgress,
    arithmetic: Mapping[str, str],
) -> Iterator[ExportCoordinator]:
    """The decider that exports, added to the operator; its process ends with the context.

    Traces the model, once, if the job has exports.
    """

    def look(keys: Mapping[str, Keys]) -> Mapping[str, F32]:
        return shards.look(keys, Deadline.after(LOOK_S))

    def stage(request: ExportRequest, folder: Path) -> None:
        assert stager is not None, "there are streams"
        stager.stage(request, folder)

    stager = None
    if job.exports:
        scratch = config.store / STAGES / "template"
        features = describe_features(job.pipe, schema)
        stager = ExportStager(model, schema, job.tables, job.tasks, job.exports, scratch, dense.tensors, look, features)
        observer.watch(stager.saw)
    guards = rank0.guards
    setting = ExportSettings(
        job=job.name,
        store=config.store,
        folder=config.folder,
        timeline=rank0.beginning.timeline,
        fingerprint=arithmetic,
        timed=next(iter(job.sources.values())).event_time.kind != "none",
        streams=job.exports,
        schema=schema,
        tables=lambda: rank0.operator.tables,
        clicks_unmatched=lambda: progress.clicks.share_unmatched,
        held=lambda: () if guards is None else guards.held,
        forks=lambda: sum(bool(found) for _, found in rank0.chronicle.compared),
        stage=stage,
        trouble=rank0.trouble,
        exclusive=nullcontext if rank0.beginning.joblog is None else rank0.beginning.joblog.exclusive,
        other_slots=_has_other_slots(rank0.beginning.commit, schema),
    )
    configuration = ExporterConfig(store=config.store, generation=config.generation, faults=config.faults)
    exporting = ExportCoordinator(setting, ExporterProcess(configuration), rank0.operator.note)
    rank0.operator.add(exporting)
    try:
        yield exporting
    finally:
        exporting.close()


def _has_other_slots(commit: Commit | None, schema: Schema) -> bool:
    """Whether a commit was made with other inputs of the model than those of `schema`."""
    if commit is None:
        return False
    then = schema_of(commit.state["spec"])
    one, other = ([(slot.shape, slot.group) for slot in (*each.sparse, *each.dense)] for each in (then, schema))
    return one != other


def resume_exports(exporting: ExportCoordinator, rank0: RankZero, committer: Committer) -> None:
    """Resume the exports that were cut, once everything is restored; see ExportCoordinator.begin."""
    beginning = rank0.beginning
    replayed = [operation for logged in beginning.replay for operation in logged.operations]
    version = 0 if beginning.commit is None else beginning.commit.version
    exporting.begin(committer, [*replayed, *beginning.waiting], version)
