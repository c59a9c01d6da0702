"""Pass-wise "infer, then train": all batches of a pass are predicted by the model at the beginning of the pass.

Paddle's online trainer reports these metrics of a pass; here they are additional to the progressive metrics
(trainer.metrics). Training is not affected: rows are only read, the model is in inference mode, and torch's generators
are seeded afterwards (trainer.train.loop). Batches are kept in bounded memory until they are learnt from, so nothing is
read twice. Of a pass that does not fit, the rest is learnt without being predicted first and is left out of these
metrics.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext

from headrace.dataset.samples.batch import Ragged
from headrace.deadline import Deadline
from headrace.pserver.protocol.shards import Floats, Keys, Shards
from headrace.trainer.config import MetricsSection
from headrace.trainer.features.training_batches import NO_SLICES, TrainingBatch, micro_batches, prepared
from headrace.trainer.status.time_spent import StepClock, WaitsFor
from headrace.trainer.train.observer import Observer
from headrace.trainer.train.step import StepFacts, Stepper

log = logging.getLogger(__name__)


def num_bytes(batch: TrainingBatch) -> int:
    """Approximate memory of a batch; the same at every run."""
    samples, total = batch.samples, 0
    for column in samples.sparse.values():
        assert isinstance(column, Ragged)
        total += column.values_N.nbytes + column.offset_B1.nbytes
        total += 0 if column.weights_N is None else column.weights_N.nbytes
    arrays = [*samples.dense.values(), *samples.meta.values(), samples.event_B, samples.time_s_B]
    arrays += [*batch.label_B.values(), *batch.weight_B.values()]
    for look in batch.lookups:
        arrays += [look.keys.keys_U, look.keys.group_U, look.inverse_N, look.order_N, look.start_U1]
        arrays += [look.show_U, look.click_U, *look.lengths.values()]
        arrays += [each for each in (look.cell_N, look.scale_N) if each is not None]
    return total + sum(array.nbytes for array in arrays)


def announced_ahead(
    shards: Shards, batches: Iterator[TrainingBatch], *, learn: bool, slices: Mapping[str, Keys] = NO_SLICES
) -> Iterator[TrainingBatch]:
    """Yield the batches; the keys of each are announced to the shards one batch ahead."""
    last = None
    for batch in batches:
        found = prepared(shards, batch, learn=learn, slices=slices)
        if last is not None:
            yield last
        last = found
    if last is not None:
        yield last


class InferFirst:
    """Used on the loop's thread, the only one that announces batches where this is in use."""

    def __init__(
        self,
        shards: Shards,
        stepper: Stepper,
        observer: Observer,
        metrics: MetricsSection,
        step_s: float,
        clock: StepClock,
        slices: Mapping[str, Keys] = NO_SLICES,
        predicting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`step_s`: longest time of a pull. `slices`: see BatchMaker. `predicting`: as of DenseStrategy."""
        self._slices, self._predicting = slices, predicting
        self._shards, self._stepper, self._observer, self._clock = shards, stepper, observer, clock
        self._max_bytes, self._step_s = metrics.infer_first_memory, step_s

    def first(
        self, batches: Iterator[TrainingBatch], agree: Callable[[TrainingBatch | None], StepFacts]
    ) -> Iterator[TrainingBatch]:
        """Predict a whole pass; return its batches, in the same order, to be learnt from.

        All ranks call `agree` for each step, with their batch or None, until no rank has one. So no rank begins to
        learn before every rank has predicted.
        """
        kept: deque[TrainingBatch] = deque()
        coming = announced_ahead(self._shards, self._keep(batches, kept), learn=False)
        batch, step = next(coming, None), 0
        while (common := agree(batch)).more:
            with self._predicting():
                if batch is not None:
                    self._predict(batch, common.weight, step)
            if batch is not None:
                self._clock.at(WaitsFor.PIPE)
                batch = next(coming, None)
            step += 1
        return announced_ahead(self._shards, self._drained(kept, batches), learn=True, slices=self._slices)

    def _predict(self, batch: TrainingBatch, weight: Mapping[str, float], step: int) -> None:
        self._clock.at(WaitsFor.SHARDS)
        rows: Mapping[str, Floats] = self._shards.pull(batch.prepared, Deadline.after(self._step_s))
        self._clock.at(WaitsFor.MODEL)
        for each in micro_batches(batch):
            self._observer.infer(each, self._stepper.predict(each, rows, weight), step)

    def _keep(self, batches: Iterator[TrainingBatch], kept: deque[TrainingBatch]) -> Iterator[TrainingBatch]:
        size = 0
        while size < self._max_bytes and (batch := next(batches, None)) is not None:
            size += num_bytes(batch)
            kept.append(batch)
            yield batch

    def _drained(self, kept: deque[TrainingBatch], rest: Iterator[TrainingBatch]) -> Iterator[TrainingBatch]:
        """Yield the kept batches, releasing each one, and then the rest of the pass."""
        while kept:
            yield kept.popleft()
        left = 0
        for batch in rest:
            left += len(batch.samples)
            yield batch
        if left:
            log.warning(
                "infer_first: %d samples of the pass were not predicted before it was learnt from, because "
                "metrics.infer_first_memory was full; they are missing in its counts",
                left,
            )
