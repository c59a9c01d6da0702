"""Opens what reads the samples of a trainer's passes, and begins to read a pass."""

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager

from headrace.dataset.loader.batch_loader import Loader, PassReader
from headrace.dataset.loader.dead_letters import DeadLetters
from headrace.dataset.loader.kept_files import KeptFiles
from headrace.dataset.loader.kept_segments import KeptSegments, MemorySegments
from headrace.dataset.loader.pass_shuffle import RankShare
from headrace.dataset.loader.segment_reader import SegmentReader
from headrace.dataset.reader.client import ReaderCaller, RemoteParts
from headrace.dataset.spec.schema import Schema
from headrace.dataset.spec.source_set import SourceSet
from headrace.dataset.stream.source import Source
from headrace.identity.credentials import Identity
from headrace.rpc.rendezvous import RendezvousClient
from headrace.trainer.collectives.ranks import Ranks
from headrace.trainer.config import TrainerJob, WorkerConfig
from headrace.trainer.features.cross_reader import CrossReader
from headrace.trainer.features.deduplication import tables_of
from headrace.trainer.features.history_reader import HistoryReader
from headrace.trainer.features.join_reader import JoinReader
from headrace.trainer.features.pass_gate import GatedReader
from headrace.trainer.features.training_batches import BatchMaker, TrainingBatch
from headrace.trainer.journal.pass_plan import PassPlan
from headrace.trainer.rank0.recovery import RestartPoint
from headrace.trainer.spec.class_rules import label_bounds_of, masks_of
from headrace.trainer.train.rank_messages import NextPass, broadcast
from headrace.trainer.train.trainer_setup import Setup


def open_reader(
    setup: Setup, source: Source, dead_letters: DeadLetters, instead: PassReader | None = None
) -> PassReader:
    """Reads the source and pipe of the spec, and closes the source; GatedReaders around it join, or fill slots.

    `instead`: takes the place of source and pipe.
    """
    job, schema, shards = setup.job, setup.schema, setup.shards
    reader: PassReader
    if job.join is not None:
        assert instead is None, "a join gives events back to source and pipe"
        segments = _segments(setup, source, dead_letters)
        more = job.train.step_deadline, job.seed, job.sample.weight, SourceSet(job.sources)
        reader = JoinReader(segments, job.join, schema, shards, *more)
    else:
        reader = instead or _segments(setup, source, dead_letters)
    if schema.remembered:
        tables = tables_of(schema, job.tables, job.tasks[0].label)
        reader = HistoryReader(reader, schema.uncrossed, shards, job.train.step_deadline, tables)
    return CrossReader(reader, schema) if schema.crossed else reader


def gated_in(reader: PassReader) -> GatedReader | None:
    """The reader among those of `open_reader` that waits for a pass to be open; None: none does."""
    inner = reader.reader if isinstance(reader, CrossReader) else reader
    return inner if isinstance(inner, GatedReader) else None


@contextmanager
def readers_of(
    config: WorkerConfig, job: TrainerJob, schema: Schema, identity: Identity | None
) -> Iterator[RemoteParts | None]:
    """The readers of the job; None where the trainer runs source and pipe itself."""
    if not config.readers:
        yield None
        return
    caller = ReaderCaller(rank=config.rank, generation=config.generation, secret=config.secret, identity=identity)
    more = () if config.launcher is None else (RendezvousClient(config.launcher, identity).find,)
    with closing(RemoteParts(config.readers, caller, schema.emitted, job.pipe.processes, *more)) as readers:
        yield readers


def _segments(setup: Setup, source: Source, dead_letters: DeadLetters) -> SegmentReader:
    """Reads the source and pipe of the spec."""
    config, job, schema = setup.config, setup.job, setup.schema.emitted
    masks = masks_of(job)
    stages = job.dense.num_stages(config.world)
    share = RankShare(job.seed, config.rank // stages, config.world // stages)
    return SegmentReader(
        source,
        job.pipe,
        schema,
        SourceSet(job.sources),
        dead_letters,
        config.folder,
        masks=masks,
        max_outage_s=job.passes.max_outage,
        memory=job.passes.memory,
        kept=_kept(config, job, schema, masks),
        shuffles=share if job.passes.shuffle else None,
        labels=label_bounds_of(job),
        parts=setup.readers,
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
    num_stages: int = 1,
) -> int | None:
    """Begin to read the first logged pass after the state of `beginning`, known on rank 0; returns its number.

    Every rank calls it. None: no such pass is logged. `num_stages`: see DenseStrategy.
    """
    logged = None if beginning is None or not beginning.replay else NextPass(beginning.replay[0].plan)
    match broadcast(ranks, logged):
        case NextPass(plan):
            read_ahead(plan, ranks, maker, loader, num_stages=num_stages)
            return plan.number
    return None


def read_ahead(
    plan: PassPlan, ranks: Ranks, maker: BatchMaker, loader: Loader[TrainingBatch], *, num_stages: int = 1
) -> None:
    """Begin to read a pass on this rank. `num_stages`: see DenseStrategy."""
    maker.expect(plan.number, plan.learn)
    mine = range(ranks.rank, ranks.rank + num_stages)
    if ranks.rank % num_stages:
        mine = range(0)
    elif loader.reads_all:
        mine = range(ranks.world)
    loader.submit(plan.number, [each for rank in mine for each in plan.segments[rank]])
