"""Records each batch before it is learnt: predictions for the metrics, days, event times and signals for the close."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.samples.batch import Samples
from headrace.dataset.spec.config import SlotKind
from headrace.dataset.spec.schema import Schema
from headrace.pserver.config import TableSection
from headrace.trainer.collectives.ranks import Ranks
from headrace.trainer.config import TrainerJob
from headrace.trainer.features.deduplication import tables_of
from headrace.trainer.features.training_batches import TrainingBatch
from headrace.trainer.metrics.found_items import Clicks, RetrievalMeter
from headrace.trainer.metrics.halves import Exclusive
from headrace.trainer.metrics.meter import Meter, MeterState
from headrace.trainer.metrics.samples import ObservedBatch, ids_of
from headrace.trainer.own_metrics import Metric
from headrace.trainer.rank0.closes import SECONDS_PER_DAY
from headrace.trainer.rank0.shrink_guard import CLICK, SHOW, SLOT, signal
from headrace.trainer.status.freshness import EventTimes, EventTimesCollector
from headrace.trainer.train.forward_result import ForwardResult


class SignalsCollector:
    """Collects the signals that occur, batch by batch. One that came is not looked for again until `take`."""

    def __init__(self, schema: Schema, tables: Mapping[str, TableSection], click: str | None) -> None:
        """`click`: the label that counts as a click in tables that name none."""
        self._looks: dict[str, Callable[[Samples], bool]] = {}
        for table in tables_of(schema, tables, click):
            self._looks |= {signal(SLOT, slot.name): partial(_has_ids, slot.name) for slot in table.slots}
            for kind, column in ((SHOW, table.show), (CLICK, table.click)):
                if column is not None:
                    self._looks[signal(kind, table.name)] = partial(_has_values, column)
        self._awaited = sorted(self._looks)

    def add(self, samples: Samples) -> None:
        """Add a batch."""
        if self._awaited:
            self._awaited = [name for name in self._awaited if not self._looks[name](samples)]

    def take(self) -> list[str]:
        """Return the signals since the last call, sorted, and forget them."""
        came = sorted(self._looks.keys() - self._awaited)
        self._awaited = sorted(self._looks)
        return came


def _has_ids(slot: str, samples: Samples) -> bool:
    return len(samples.sparse[slot].values_N) > 0


def _has_values(column: str, samples: Samples) -> bool:
    return bool(np.nan_to_num(samples.meta[column]).any())


INFER_FIRST = "infer_first"
"""Key of the metrics of trainer.train.infer_first in reports, closes and commits."""
RETRIEVAL = "retrieval"
"""Key of the state of `Observer.found` in commits."""


class Observer:
    """The observer of one rank. `observe` and `infer` are called in steps, the rest at a close."""

    def __init__(
        self,
        job: TrainerJob,
        schema: Schema,
        halves_folder: Path | None,
        exclusive: Exclusive = nullcontext,
        own: Sequence[Metric] = (),
    ) -> None:
        event_time = next(iter(job.sources.values())).event_time
        self._timed = event_time.kind != "none"
        self._schema, self._metrics = schema, job.metrics
        of_job = partial(Meter, job.metrics, job.tasks, timed=self._timed, own=own)
        self._meter = of_job(halves_folder=halves_folder, exclusive=exclusive)
        self._infer_first = of_job() if job.metrics.infer_first else None
        found, self._item = job.retrieval, "" if job.retrieval is None else job.retrieval.items.slot
        self.found = None
        """Measures which items of clicks are found, in a job that retrieves items."""
        if found is not None and found.measure:
            self.found = RetrievalMeter(found.at, found.measure, job.metrics.window, timed=self._timed)
        self._first = job.tasks[0].name
        self._days: dict[int, int] = {}
        self._times_s: tuple[float, float] | None = None
        self._times = EventTimesCollector()
        self._signals = SignalsCollector(schema, job.tables, job.tasks[0].label)
        self._watchers: tuple[Callable[[Samples], None], ...] = ()

    def watch(self, watcher: Callable[[Samples], None]) -> None:
        """Call `watcher` with the samples of each batch from now on."""
        self._watchers += (watcher,)

    def observe(self, batch: TrainingBatch, forward: ForwardResult, step: int) -> None:
        """Record a batch."""
        for watcher in self._watchers:
            watcher(batch.samples)
        self._signals.add(batch.samples)
        if self._timed:
            self._take_times(batch.samples.time_s_B)
        self._meter.add(self._observed(batch, forward, step))
        if self._infer_first is None:
            self._look_for(batch, forward)

    def infer(self, batch: TrainingBatch, forward: ForwardResult, step: int) -> None:
        """Record the predictions of the model at the beginning of the pass, if they are measured."""
        if self._infer_first is not None:
            self._infer_first.add(self._observed(batch, forward, step))
            self._look_for(batch, forward)

    def _look_for(self, batch: TrainingBatch, forward: ForwardResult) -> None:
        """Have the items of positive samples looked for."""
        if self.found is None or forward.user_BV is None:
            return
        samples, at_P = batch.samples, np.flatnonzero(batch.label_B[self._first] > 0)
        sign_B, user_PV = samples.sparse[self._item].first_B(), forward.user_BV[at_P]
        times = samples.time_s_B[at_P] if self._timed else None
        self.found.add(Clicks(samples.event_B[at_P], user_PV, sign_B[at_P], times))

    def _observed(self, batch: TrainingBatch, forward: ForwardResult, step: int) -> ObservedBatch:
        samples, group, slices = batch.samples, self._metrics.gauc_by, self._metrics.slices
        return ObservedBatch(
            step,
            forward.prediction_B,
            batch.label_B,
            batch.weight_B,
            samples.time_s_B if self._timed else None,
            None if group is None else ids_of(self._column(samples, group)),
            {slot: self._column(samples, slot) for slot in slices},
            forward.tensors,
        )

    def take_days(self) -> dict[int, int]:
        """Return the UTC days of the pass's event times with their counts, and forget them."""
        days, self._days = self._days, {}
        return days

    def take_signals(self) -> list[str]:
        """Return which inputs of row statistics occurred in the pass, and forget them."""
        return self._signals.take()

    def take_times_s(self) -> tuple[float, float] | None:
        """Return the lowest and highest event time of the pass, unix seconds, and forget them."""
        times_s, self._times_s = self._times_s, None
        return times_s

    def take_times(self) -> EventTimes:
        """Return a summary of the event times of the pass, and forget them."""
        return self._times.take()

    def close_pass(self, ranks: Ranks, *, again: bool = False) -> dict[str, Any]:
        """Collective: reduce the pass. Returns the metrics of pass, window and life on rank 0, nothing elsewhere.

        `again`: see Meter.
        """
        closed = self._meter.close_pass(ranks, again=again)
        if self._infer_first is not None:
            self._infer_first.close_pass(ranks, again=again)
        if self.found is not None:
            self.found.close_pass(ranks, again=again)
        return {} if closed is None else self._report()

    def fingerprints(self) -> dict[str, str]:
        """Rank 0: hashes of the metrics of the last closed pass, by the kind of metrics."""
        found = {"metrics": self._meter.fingerprint().hex()}
        return found if self._infer_first is None else found | {INFER_FIRST: self._infer_first.fingerprint().hex()}

    def state(self) -> MeterState:
        """Rank 0, between passes: the state of the metrics that a commit holds."""
        state = self._meter.state()
        for key, meter in self._more():
            more = meter.state()
            arrays = {f"{key}/{name}": array for name, array in more.arrays.items()}
            state = MeterState({**state.arrays, **arrays}, {**state.facts, key: more.facts})
        return state

    def _more(self) -> list[tuple[str, Meter | RetrievalMeter]]:
        """The meters beside the first one, by their keys in commits."""
        both = ((INFER_FIRST, self._infer_first), (RETRIEVAL, self.found))
        return [(key, meter) for key, meter in both if meter is not None]

    def load_state(self, state: MeterState) -> None:
        """Continue from a commit, on every rank. Metrics that it does not hold start anew."""
        self._meter.load_state(state)
        for key, meter in self._more():
            if (facts := state.facts.get(key)) is not None:
                arrays = {n.removeprefix(f"{key}/"): a for n, a in state.arrays.items() if n.startswith(f"{key}/")}
                meter.load_state(MeterState(arrays, facts))

    def _report(self) -> dict[str, Any]:
        report = self._meter.report()
        for span, measures in {} if self.found is None else self.found.reports().items():
            report[span][self._first] |= measures
        return report if self._infer_first is None else report | {INFER_FIRST: self._infer_first.report()}

    def report(self) -> dict[str, Any]:
        """Rank 0: the metrics of pass, window, life and halves."""
        return self._report() | {"halves": self._meter.halves()}

    def _take_times(self, time_s_B: NDArray[np.float64]) -> None:
        known = time_s_B[np.isfinite(time_s_B)]
        if not len(known):
            return
        self._times.add(known)
        days, counts = np.unique(known // SECONDS_PER_DAY, return_counts=True)
        for day, count in zip(days.tolist(), counts.tolist(), strict=True):
            self._days[int(day)] = self._days.get(int(day), 0) + count
        low_s, high_s = float(known.min()), float(known.max())
        times_s = self._times_s or (low_s, high_s)
        self._times_s = min(times_s[0], low_s), max(times_s[1], high_s)

    def _column(self, samples: Samples, slot: str) -> NDArray[Any]:
        """(B,) values of a meta slot, or the first id of a sparse slot in each sample, 0 if it has none."""
        if self._schema.by_name[slot].kind is SlotKind.META:
            return samples.meta[slot]
        return samples.sparse[slot].first_B()
