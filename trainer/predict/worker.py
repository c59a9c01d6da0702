"""A prediction worker: reads, predicts and writes its segments one after another, each as a part.

trainer.predict.prediction_plan fixes the segments; worker r of W does the numbers r, r + W, ... that have no part yet.
Rows are only read: nothing is learnt, no row is made, no key is counted.
"""

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from headrace.config import validate
from headrace.dataset.loader.batch_loader import Loader, PassTally
from headrace.dataset.loader.dead_letters import DeadLetters
from headrace.dataset.loader.segment_reader import SegmentReader
from headrace.dataset.samples.batch import F32, Samples
from headrace.dataset.spec.config import SlotKind
from headrace.dataset.spec.schema import Schema
from headrace.dataset.stream.source import Segment
from headrace.deadline import Deadline
from headrace.durable import writing
from headrace.identity.credentials import Identity
from headrace.pserver.client.connection import ShardCaller
from headrace.pserver.client.remote import RemoteShards
from headrace.pserver.config import PartStore, ShardProcess
from headrace.pserver.protocol.shards import U64, Floats, Keys, Prepared, Shards
from headrace.pserver.server.commands import RestoreCommit
from headrace.pserver.server.embedded import EmbeddedShards
from headrace.rpc.rendezvous import renewed_identity
from headrace.seeds import derive
from headrace.trainer.checkpoint.commits import Commit, read_commit
from headrace.trainer.config import TrainerJob
from headrace.trainer.features.deduplication import tables_of
from headrace.trainer.features.kept_state import RowsOf, filled_as_of
from headrace.trainer.metrics.samples import ids_of
from headrace.trainer.metrics.tensor_totals import TensorTotal
from headrace.trainer.own_metrics import Metric, metrics_of
from headrace.trainer.predict.background import CpuLimit
from headrace.trainer.predict.commit_statistics import CommitStatistics
from headrace.trainer.predict.config import PredictionRequest, PredictWorker
from headrace.trainer.predict.fixed_batches import (
    Block,
    FixedBatch,
    FixedBatches,
    no_samples,
    shuffled,
    shuffled_slots,
)
from headrace.trainer.predict.joined_labels import CLICKS, columns_of, split
from headrace.trainer.predict.metric_inputs import OwnTotals, metric_table, targets_of
from headrace.trainer.predict.output_columns import OutputColumns, SampleNumbers
from headrace.trainer.predict.output_files import PredictionOutput, writing_part
from headrace.trainer.predict.prediction_plan import PredictionPlan, open_input, source_config
from headrace.trainer.predict.predictor import BatchOutputs, Predictor
from headrace.trainer.spec.class_rules import label_bounds_of
from headrace.trainer.spec.history_tables import history_tables
from headrace.trainer.train.commit_state import commit_in
from headrace.trainer.train.device import set_up_torch

BLOCK_BATCHES = 16
"""Full batches in a block, the unit of cutting and writing. Smaller blocks would need more padding."""
BLOCKS_AHEAD = 2
ROWS_AT_ONCE = 4096
"""Keys of one look at histories or counters: at most some 33 MB."""
RESTORE_S, OPEN_S, PULL_S, CLOSE_S = 3600.0, 60.0, 120.0, 10.0
"""Longest time to restore rows, to connect to shards, to pull rows, and to end."""
KEPT_LETTERS = 1_000_000
"""Files of dead letters that are kept: one per part, so all of them."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerParts:
    """The parts of a worker."""

    job: TrainerJob
    schema: Schema
    shards: Shards
    turn: threading.Lock
    """Held by each call that reads rows: two threads make them."""
    predictor: Predictor
    loader: Loader[Block]
    columns: OutputColumns
    output: PredictionOutput
    dead_letters: DeadLetters
    pace: CpuLimit
    own: tuple[Metric, ...]
    """The job's own metrics, where they are computed."""
    others: "ShuffledBatches"
    nothing: "BlockPredictions"
    """Zero samples: they define the columns."""


@dataclass(frozen=True, slots=True)
class BlockPredictions:
    """The predictions of one block."""

    samples: Samples
    prediction_B: Mapping[str, F32]
    tensors: Mapping[str, NDArray[Any]]
    right_B: Mapping[str, F32]
    """By task of many classes: the probability of the right one."""
    clicks: pa.Table | None = None
    without: Mapping[str, Mapping[str, F32]] = field(default_factory=dict)
    """By slot whose worth is asked for: what metrics judge, without its values."""


@dataclass(frozen=True, slots=True)
class ShuffledBatches:
    """Batches of a block without the values of one slot more, by slot whose worth is asked for."""

    batches: FixedBatches
    shuffle: tuple[str, ...]
    slots: tuple[str, ...]
    seed: int

    @classmethod
    def of(cls, request: PredictionRequest, job: TrainerJob, schema: Schema) -> "ShuffledBatches":
        """Those of a request; it uses no thread."""
        slots = tuple(name for name in shuffled_slots(schema) if request.worth and name not in request.shuffle)
        return cls(batches_of(request, job, schema), request.shuffle, slots, job.seed)

    def of_block(self, samples: Samples, number: int) -> Iterator[tuple[str, tuple[FixedBatch, ...]]]:
        """By slot, the batches of a block of segment `number`."""
        for slot in self.slots:
            seen = shuffled(samples, [*self.shuffle, slot], derive(self.seed, number))
            yield slot, self.batches.block(samples, seen).batches


def batches_of(request: PredictionRequest, job: TrainerJob, schema: Schema) -> FixedBatches:
    """A cutter of batches, for one thread."""
    return FixedBatches(tables_of(schema, job.tables, None), request.batch_size)


def run(config: PredictWorker) -> None:
    """Predict all segments of this worker that have no part yet."""
    pa.set_cpu_count(1)
    with opened(config) as parts:
        plan = PredictionPlan.read(parts.output.place)
        if plan is None:  # another run of this request was quicker, and has completed the output
            return
        numbers = range(config.rank, len(plan.segments), config.request.trainers)
        finished = parts.output.marks(numbers)
        todo = [number for number in numbers if number not in finished]
        for ahead in todo[:2]:
            parts.loader.submit(ahead, [plan.segments[ahead]])
        for place, number in enumerate(todo):
            predict_segment(parts, number, plan.segments[number])
            for ahead in todo[place + 2 : place + 3]:
                parts.loader.submit(ahead, [plan.segments[ahead]])


@contextmanager
def opened(config: PredictWorker) -> Iterator[WorkerParts]:
    """Everything that a worker needs, with the version's rows and weights; closed in reverse order."""
    job, request = validate(TrainerJob, config.job, only_known=True), config.request
    scratch = config.live / "unfinished"
    output = PredictionOutput(config.output, scratch)
    for folder in (output.work, config.live):
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
    schema = Schema.of(job.slots)
    # One thread, whatever the spec says: the number of threads changes how sums are rounded.
    set_up_torch(job.train.model_copy(update={"threads": 1, "amp": "off"}), 1, torch.device("cpu"))
    columns = OutputColumns.of(request, job, schema)
    predictor = Predictor(job, schema, config.folder, columns.outputs)
    batches, others = batches_of(request, job, schema), ShuffledBatches.of(request, job, schema)
    shapes = predictor.try_out(batches, request.batch_size)
    commit = commit_of(config)
    predictor.load(commit.folder)
    none = {task.name: np.zeros(0, np.float32) for task in job.tasks}
    tensors = {name: values[:0] for name, values in shapes.items()}
    nothing = BlockPredictions(no_samples(schema), none, tensors, {}, without=dict.fromkeys(others.slots, none))
    with ExitStack() as held:
        identity = held.enter_context(renewed_identity(config.launcher, config.credentials))
        shards = open_shards(config, job, schema, commit, identity)
        held.callback(shards.close)
        kept = job.pipe.dead_letters.model_copy(update={"keep_passes": KEPT_LETTERS})
        letters = DeadLetters(output.place.letters, 0, kept)
        cut = BLOCK_BATCHES * request.batch_size
        turn = threading.Lock()
        known = held.enter_context(CommitStatistics(commit, schema, job.tables, config.live / "statistics"))
        block = partial(_block, batches, schema, kept_rows(shards, turn, known), request.shuffle, job)
        loader = Loader(
            open_reader(config, job, schema.emitted, letters), block, cut, BLOCKS_AHEAD, memory=job.passes.memory
        )
        held.callback(lambda: loader.close(Deadline.after(CLOSE_S)))
        pace = CpuLimit(config.cores)
        own = metrics_of(job.metrics.own, config.folder) if request.metrics else ()
        yield WorkerParts(
            job, schema, shards, turn, predictor, loader, columns, output, letters, pace, own, others, nothing
        )


def _block(
    batches: FixedBatches,
    schema: Schema,
    rows_of: RowsOf,
    shuffle: Sequence[str],
    job: TrainerJob,
    number: int,
    emitted: Samples,
) -> Block:
    """A block of segment `number`, with all slots that the job fills as of the version, and without clicks."""
    impressions, clicks = (emitted, None) if job.join is None else split(emitted, job.join)
    samples = filled_as_of(impressions, schema, rows_of)
    return replace(batches.block(samples, shuffled(samples, shuffle, derive(job.seed, number))), clicks=clicks)


def kept_rows(shards: Shards, turn: threading.Lock, known: CommitStatistics) -> RowsOf:
    """Reads rows of histories and counters on the loader's thread, and statistics of rows. Each look takes `turn`, as
    each pull does: a pull in its middle would make shards forget its keys."""

    def rows_of(table: str, group: int, keys_U: U64) -> F32:
        if table in known:
            return known.of(table, keys_U)
        found = []
        for begin in range(0, max(1, len(keys_U)), ROWS_AT_ONCE):
            some_U = keys_U[begin : begin + ROWS_AT_ONCE]
            keys = Keys(some_U, np.full(len(some_U), group, np.uint16))
            with turn:
                found.append(shards.look({table: keys}, Deadline.after(PULL_S))[table])
        return np.concatenate(found)

    return rows_of


def commit_of(config: PredictWorker) -> Commit:
    """The commit, with its dense weights on this machine. Raises CommitDamaged, PartsUnavailable."""
    if config.uploaded is None:
        return read_commit(config.commit)
    return commit_in(config.uploaded, config.live / "commit")


def open_shards(
    config: PredictWorker, job: TrainerJob, schema: Schema, commit: Commit, identity: Identity | None
) -> Shards:
    """The rows of the commit: on shards that hold them, or restored in this process."""
    tables = {**job.tables, **history_tables(schema)}
    if config.shards:
        return RemoteShards(
            config.shards,
            tables,
            ShardCaller(
                rank=config.rank,
                world=config.request.trainers,
                generation=config.generation,
                secret=config.secret,
                max_message_bytes=config.max_message,
                identity=identity,
                wire=config.request.wire,
                silent_s=config.node_timeout,
            ),
            Deadline.after(OPEN_S),
        )
    groups = {slot.name: slot.group for slot in schema.sparse}
    parts = None
    if config.uploaded is not None:
        parts = PartStore(address=config.uploaded["manifest"]["objects_at"], cache=config.live / "parts")
    live, wire = config.live / "rows", config.request.wire
    shards = EmbeddedShards(ShardProcess.alone(tables, job.seed, live=live, groups=groups, wire=wire, parts=parts))
    shards.call(RestoreCommit(commit.folder, commit.shards, commit.version), Deadline.after(RESTORE_S))
    return shards


def open_reader(config: PredictWorker, job: TrainerJob, schema: Schema, letters: DeadLetters) -> SegmentReader:
    """The input through the job's pipe: one process, and labels may be absent.

    Those that no loss takes reject their events as in training, unless nothing is measured.
    """
    return SegmentReader(
        open_input(config.request.input, job, config.folder),
        job.pipe.model_copy(update={"processes": 1}),
        schema,
        source_config(config.request.input, job),
        letters,
        config.folder,
        masks=masks_of(job, schema),
        max_outage_s=job.passes.max_outage,
        memory=job.passes.memory,
        labels=label_bounds_of(job) if config.request.metrics else (),
    )


def masks_of(job: TrainerJob, schema: Schema) -> dict[str, str]:
    """Labels that may be missing: those of type float, and those that may be missing in training."""
    masks = {task.label: task.mask for task in job.tasks if task.mask}
    floats = [task.label for task in job.tasks if getattr(schema.by_name[task.label].entry, "type", "") == "float"]
    return {**masks, **dict.fromkeys(floats, "")}


def predict_segment(parts: WorkerParts, number: int, segment: Segment) -> None:
    """Make one part. Passes on the errors of reading."""
    numbering = SampleNumbers(parts.columns.traced)
    totals: dict[str, TensorTotal] = {}
    empty, own = _tables(parts, segment, parts.nothing, numbering), OwnTotals(parts.own, parts.job.tasks)
    clicks, num_samples = None if parts.job.join is None else CLICKS, 0
    with writing_part(parts.output, number, empty[0].schema, empty[1].schema, clicks) as written:
        for predicted in _predicted(parts, number, totals):
            tables = _tables(parts, segment, predicted, numbering)
            written.add(*tables, predicted.clicks)
            num_samples += len(predicted.samples)
            own.add(tables[1])
    letters = parts.dead_letters.publish(number)
    facts = {**facts_of(parts.loader.tally(number), totals), "own": own.to_json()}
    if clicks is not None:  # labels are known once all parts exist
        tensors = {name: total for name, total in facts["tensors"].items() if name != "loss"}
        facts |= {"num_samples": num_samples, "own": None, "tensors": tensors}
    parts.output.finish(number, written, facts, letters)
    log.info("part %d is complete: %s, %d to %d", number, segment.partition, segment.begin, segment.end)


def facts_of(tally: PassTally, totals: Mapping[str, TensorTotal]) -> dict[str, Any]:
    """Facts for a part's mark."""
    return {
        "num_events": tally.num_events,
        "num_samples": tally.num_samples,
        "num_judged": tally.num_judged,
        "rejected": dict(sorted(tally.rejected.items())),
        "tensors": {name: total.to_json() for name, total in sorted(totals.items())},
    }


def _predicted(parts: WorkerParts, number: int, totals: dict[str, TensorTotal]) -> Iterator[BlockPredictions]:
    """Predictions of the blocks of segment `number`, in order; adds the model's tensors to `totals`."""
    for block in parts.loader.batches(number):
        if not block.batches:  # clicks alone
            yield replace(parts.nothing, clicks=block.clicks)
            continue
        outputs: list[BatchOutputs] = []
        for each in _outputs(parts, block.batches):
            outputs.append(each)
            for name, values in each.measured.items():
                totals.setdefault(name, TensorTotal()).add(values)
        yield BlockPredictions(
            block.samples,
            joined_of([each.prediction_B for each in outputs]),
            joined_of([each.tensors for each in outputs]),
            joined_of([each.right_B for each in outputs]),
            block.clicks,
            {
                slot: joined_of([{**each.prediction_B, **each.right_B} for each in _outputs(parts, batches)])
                for slot, batches in parts.others.of_block(block.samples, number)
            },
        )


def _outputs(parts: WorkerParts, batches: Sequence[FixedBatch]) -> Iterator[BatchOutputs]:
    for batch, rows in _with_rows(parts.shards, parts.turn, batches):
        yield parts.predictor.predict(batch, rows)
        parts.pace.rest()


def joined_of(batches: Sequence[Mapping[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    """The values of batches, one after another, by name."""
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def _with_rows(
    shards: Shards, turn: threading.Lock, batches: Sequence[FixedBatch]
) -> Iterator[tuple[FixedBatch, Mapping[str, Floats]]]:
    """Batches with their rows, as inference reads them; shards prepare the rows of the next batch meanwhile."""
    following: Prepared | None = None
    for place, batch in enumerate(batches):
        prepared = following or shards.prepare(batch.keys, learn=False)
        with turn:
            rows = shards.pull(prepared, Deadline.after(PULL_S))
        more = batches[place + 1 : place + 2]
        following = shards.prepare(more[0].keys, learn=False) if more else None
        yield batch, rows


def _tables(
    parts: WorkerParts, segment: Segment, predicted: BlockPredictions, numbering: SampleNumbers
) -> tuple[pa.Table, pa.Table]:
    """Rows of a block for the part, and inputs of metrics."""
    samples, job = predicted.samples, parts.job
    values = {**predicted.prediction_B, **predicted.tensors}
    table = parts.columns.table(segment, samples, numbering.number(samples.event_B), values)
    label_B, weight_B = targets_of(samples, job.tasks, job.sample.weight)
    by, slices = job.metrics.gauc_by, job.metrics.slices
    group_B = None if by is None else ids_of(column_of(parts.schema, samples, by))
    slice_values = {slot: column_of(parts.schema, samples, slot) for slot in slices}
    judged = {**predicted.prediction_B, **predicted.right_B}
    observed = metric_table(job.tasks, judged, label_B, weight_B, group_B, slice_values, predicted.without)
    for name, column in (columns_of(samples, job.join) if job.join is not None else {}).items():
        observed = observed.append_column(name, column)
    return table, observed


def column_of(schema: Schema, samples: Samples, slot: str) -> NDArray[Any]:
    """One value per sample of a meta or sparse slot, as in trainer.train.observer."""
    if schema.by_name[slot].kind is SlotKind.META:
        return samples.meta[slot]
    return samples.sparse[slot].first_B()
