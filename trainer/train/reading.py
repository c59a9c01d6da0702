"""Opens what reads the samples of a trainer's passes, and begins to read a pass."""

from collections.abc import Mapping

from headrace.dataset.loader.batch_loader import Loader, PassReader
from headrace.dataset.loader.dead_letters import DeadLetters
from headrace.dataset.loader.kept_files import KeptFiles
from headrace.dataset.loader.kept_segments import KeptSegments, MemorySegments
from headrace.dataset.loader.pass_shuffle import RankShare
from headrace.dataset.loader.segment_reader import SegmentReader
from headrace.dataset.spec.schema import Schema
from headrace.dataset.spec.source_set import SourceSet
from headrace.dataset.stream.source import Source
from headrace.pserver.protocol.shards import Shards
from headrace.trainer.collectives.ranks import Ranks
from headrace.trainer.config import TrainerJob, WorkerConfig
from headrace.trainer.features.deduplication import tables_of
from headrace.trainer.features.history_reader import HistoryReader
from headrace.trainer.features.join_reader import JoinReader
from headrace.trainer.features.training_batches import BatchMaker, TrainingBatch
from headrace.trainer.journal.pass_plan import PassPlan
from headrace.trainer.rank0.recovery import RestartPoint
from headrace.trainer.spec.class_rules import label_bounds_of
from headrace.trainer.train.rank_messages import NextPass, broadcast


def open_reader(
    config: WorkerConfig,
    job: TrainerJob,
    schema: Schema,
    source: Source,
    dead_letters: DeadLetters,
    shards: Shards,
    instead: PassReader | None = None,
) -> PassReader:
    """Reads the source and pipe of the spec, and closes the source; GatedReaders around it join, or fill slots.

    `instead`: takes the place of source and pipe.
    """
    reader: PassReader
    if job.join is not None:
        assert instead is None, "a join gives events back to source and pipe"
        segments = _segments(config, job, schema, source, dead_letters)
        more = job.train.step_deadline, job.seed, job.sample.weight, SourceSet(job.sources)
        reader = JoinReader(segments, job.join, schema, shards, *more)
    else:
        reader = instead or _segments(config, job, schema, source, dead_letters)
    if not schema.filled:
        return reader
    tables = tables_of(schema, job.tables, job.tasks[0].label)
    return HistoryReader(reader, schema, shards, job.train.step_deadline, tables)


def _segments(
    config: WorkerConfig, job: TrainerJob, schema: Schema, source: Source, dead_letters: DeadLetters
) -> SegmentReader:
    """Reads the source and pipe of the spec."""
    masks = {task.label: task.mask for task in job.tasks if task.mask} | ({job.join.label: ""} if job.join else {})
    return SegmentReader(
        source,
        job.pipe,
        schema.emitted,
        SourceSet(job.sources),
        dead_letters,
        config.folder,
        masks=masks,
        max_outage_s=job.passes.max_outage,
        memory=job.passes.memory,
        kept=_kept(config, job, schema.emitted, masks),
        shuffles=RankShare(job.seed, config.rank, config.world) if job.passes.shuffle else None,
        labels=label_bounds_of(job),
    )


def _kept(config: WorkerConfig, job: TrainerJob, schema: Schema, masks: Mapping[str, str]) -> KeptSegments | None:
    """Where samples after the pipe are kept; None if they are not."""
    if job.passes.keep_in is not None:
        folder = config.folder / job.passes.keep_in
        return KeptFiles(folder, job.passes.keep, job.pipe, schema, SourceSet(job.sources), masks)
    return MemorySegments(job.passes.keep) if job.passes.keep else None


def read_first(
    ranks: Ranks,
    beginning: RestartPoint | None,
    maker: BatchMaker,
    loader: Loader[TrainingBatch],
    *,
    one_reader: bool = False,
) -> int | None:
    """Begin to read the first logged pass after the state of `beginning`, known on rank 0; returns its number.

    Every rank calls it. None: no such pass is logged. `one_reader`: see DenseStrategy.
    """
    logged = None if beginning is None or not beginning.replay else NextPass(beginning.replay[0].plan)
    match broadcast(ranks, logged):
        case NextPass(plan):
            read_ahead(plan, ranks, maker, loader, one_reader=one_reader)
            return plan.number
    return None


def read_ahead(
    plan: PassPlan, ranks: Ranks, maker: BatchMaker, loader: Loader[TrainingBatch], *, one_reader: bool = False
) -> None:
    """Begin to read a pass on this rank. `one_reader`: see DenseStrategy; rank 0 reads the parts of all ranks."""
    maker.expect(plan.number, plan.learn)
    segments = [each for rank in plan.segments for each in rank]
    if one_reader and ranks.rank:
        segments = []
    elif not one_reader and not loader.reads_all:
        segments = list(plan.segments[ranks.rank])
    loader.submit(plan.number, segments)
