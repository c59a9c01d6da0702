"""A prediction worker: reads, predicts and writes its segments one after another, each as a part.

trainer.predict.prediction_plan fixes the segments; worker r of W does the numbers r, r + W, ... that have no part yet.
Rows are only read: nothing is learnt, no row is made, no key is counted.
"""

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
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
from headrace.pserver.client.connection import ShardCaller
from headrace.pserver.client.remote import RemoteShards
from headrace.pserver.config import ShardProcess
from headrace.pserver.protocol.shards import U64, Keys, Prepared, Shards
from headrace.pserver.server.commands import RestoreCommit
from headrace.pserver.server.embedded import EmbeddedShards
from headrace.seeds import derive
from headrace.trainer.checkpoint.commits import read_commit
from headrace.trainer.config import TrainerJob
from headrace.trainer.features.deduplication import tables_of
from headrace.trainer.features.kept_state import RowsOf, filled_as_of
from headrace.trainer.metrics.samples import ids_of
from headrace.trainer.metrics.tensor_totals import TensorTotal
from headrace.trainer.predict.background import CpuLimit
from headrace.trainer.predict.config import PredictWorker
from headrace.trainer.predict.fixed_batches import Block, FixedBatch, FixedBatches, no_samples, shuffled
from headrace.trainer.predict.metric_inputs import metric_table, targets_of
from headrace.trainer.predict.output_columns import OutputColumns, SampleNumbers
from headrace.trainer.predict.output_files import DEAD_LETTERS, PredictionOutput, writing_part
from headrace.trainer.predict.prediction_plan import PredictionPlan, open_input, source_config
from headrace.trainer.predict.predictor import BatchOutputs, Predictor
from headrace.trainer.spec.history_tables import history_tables
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
    nothing: "BlockPredictions"
    """Zero samples: they define the columns."""


@dataclass(frozen=True, slots=True)
class BlockPredictions:
    """The predictions of one block."""

    samples: Samples
    prediction_B: Mapping[str, F32]
    tensors: Mapping[str, NDArray[Any]]


def run(config: PredictWorker) -> None:
    """Predict all segments of this worker that have no part yet."""
    pa.set_cpu_count(1)
    plan = PredictionPlan.read(PredictionOutput(config.output).work)
    assert plan is not None, "the launcher wrote it"
    with opened(config) as parts:
        numbers = range(config.rank, len(plan.segments), config.request.trainers)
        todo = [number for number in numbers if parts.output.mark(number) is None]
        for ahead in todo[:2]:
            parts.loader.submit(ahead, [plan.segments[ahead]])
        for place, number in enumerate(todo):
            predict_segment(parts, number, plan.segments[number])
            for ahead in todo[place + 2 : place + 3]:
                parts.loader.submit(ahead, [plan.segments[ahead]])


@contextmanager
def opened(config: PredictWorker) -> Iterator[WorkerParts]:
    """Everything that a worker needs, with the version's rows and weights; closed in reverse order."""
    job, request, output = (
        validate(TrainerJob, config.job, only_known=True),
        config.request,
        PredictionOutput(config.output),
    )
    schema = Schema.of(job.slots)
    # One thread, whatever the spec says: the number of threads changes how sums are rounded.
    set_up_torch(job.train.model_copy(update={"threads": 1, "amp": "off"}), 1, torch.device("cpu"))
    columns = OutputColumns.of(request, job, schema)
    predictor = Predictor(job, schema, config.folder, columns.outputs)
    batches = FixedBatches(tables_of(schema, job.tables, None), request.batch_size)
    shapes = predictor.try_out(batches, request.batch_size)
    predictor.load(config.commit)
    none = {task.name: np.zeros(0, np.float32) for task in job.tasks}
    nothing = BlockPredictions(no_samples(schema), none, {name: values[:0] for name, values in shapes.items()})
    with ExitStack() as held:
        shards = open_shards(config, job, schema)
        held.callback(shards.close)
        kept = job.pipe.dead_letters.model_copy(update={"keep_passes": KEPT_LETTERS})
        letters = DeadLetters(config.output / DEAD_LETTERS, 0, kept)
        cut = BLOCK_BATCHES * request.batch_size
        turn = threading.Lock()
        block = partial(_block, batches, schema, kept_rows(shards, turn), request.shuffle, job.seed)
        loader = Loader(
            open_reader(config, job, schema.emitted, letters), block, cut, BLOCKS_AHEAD, memory=job.passes.memory
        )
        held.callback(lambda: loader.close(Deadline.after(CLOSE_S)))
        pace = CpuLimit(config.cores)
        yield WorkerParts(job, schema, shards, turn, predictor, loader, columns, output, letters, pace, nothing)


def _block(
    batches: FixedBatches,
    schema: Schema,
    rows_of: RowsOf,
    shuffle: Sequence[str],
    seed: int,
    number: int,
    emitted: Samples,
) -> Block:
    """A block of segment `number`, with histories and counters as of the version."""
    samples = filled_as_of(emitted, schema, rows_of)
    return batches.block(samples, shuffled(samples, shuffle, derive(seed, number)))


def kept_rows(shards: Shards, turn: threading.Lock) -> RowsOf:
    """Reads rows of histories and counters on the loader's thread. Each look takes `turn`, as each pull does: a pull
    in its middle would make shards forget its keys."""

    def rows_of(table: str, group: int, keys_U: U64) -> F32:
        found = []
        for begin in range(0, max(1, len(keys_U)), ROWS_AT_ONCE):
            some_U = keys_U[begin : begin + ROWS_AT_ONCE]
            keys = Keys(some_U, np.full(len(some_U), group, np.uint16))
            with turn:
                found.append(shards.look({table: keys}, Deadline.after(PULL_S))[table])
        return np.concatenate(found)

    return rows_of


def open_shards(config: PredictWorker, job: TrainerJob, schema: Schema) -> Shards:
    """The rows of the commit: on shards that hold them, or restored in this process."""
    tables = {**job.tables, **history_tables(schema)}
    if config.shards:
        return RemoteShards(
            config.shards,
            tables,
            ShardCaller(
                rank=config.rank,
                world=config.request.trainers,
                generation=1,
                secret=config.secret,
                max_message_bytes=config.max_message,
                wire=config.request.wire,
            ),
            Deadline.after(OPEN_S),
        )
    groups = {slot.name: slot.group for slot in schema.sparse}
    shards = EmbeddedShards(
        ShardProcess.alone(tables, job.seed, live=config.live, groups=groups, wire=config.request.wire)
    )
    commit = read_commit(config.commit)
    shards.call(RestoreCommit(commit.folder, commit.shards, commit.version), Deadline.after(RESTORE_S))
    return shards


def open_reader(config: PredictWorker, job: TrainerJob, schema: Schema, letters: DeadLetters) -> SegmentReader:
    """The input through the job's pipe: one process, and labels may be absent."""
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
    empty = _tables(parts, segment, parts.nothing, numbering)
    with writing_part(parts.output, number, *(table.schema for table in empty)) as written:
        for predicted in _predicted(parts, parts.loader.batches(number), totals):
            written.add(*_tables(parts, segment, predicted, numbering))
    parts.dead_letters.publish(number)
    parts.output.finish(number, written, facts_of(parts.loader.tally(number), totals))
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


def _predicted(
    parts: WorkerParts, blocks: Iterator[Block], totals: dict[str, TensorTotal]
) -> Iterator[BlockPredictions]:
    """Predictions of blocks, in order; adds the model's tensors to `totals`."""
    for block in blocks:
        outputs: list[BatchOutputs] = []
        for batch, rows in _with_rows(parts.shards, parts.turn, block.batches):
            outputs.append(parts.predictor.predict(batch, rows))
            for name, values in outputs[-1].measured.items():
                totals.setdefault(name, TensorTotal()).add(values)
            parts.pace.rest()
        yield BlockPredictions(
            block.samples,
            {name: np.concatenate([each.prediction_B[name] for each in outputs]) for name in outputs[0].prediction_B},
            {name: np.concatenate([each.tensors[name] for each in outputs]) for name in outputs[0].tensors},
        )


def _with_rows(
    shards: Shards, turn: threading.Lock, batches: Sequence[FixedBatch]
) -> Iterator[tuple[FixedBatch, Mapping[str, F32]]]:
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
    return table, metric_table(job.tasks, predicted.prediction_B, label_B, weight_B, group_B, slice_values)


def column_of(schema: Schema, samples: Samples, slot: str) -> NDArray[Any]:
    """One value per sample of a meta or sparse slot, as in trainer.train.observer."""
    if schema.by_name[slot].kind is SlotKind.META:
        return samples.meta[slot]
    return samples.sparse[slot].first_B()
