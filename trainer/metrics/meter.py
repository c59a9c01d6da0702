"""The meter of a job: it turns batches into metrics of the pass, the window and the life of the job.

Every rank adds its batches and closes each pass. The result on rank 0 does not depend on how samples were distributed
over ranks, steps and batches. Sums are the work of `trainer.metrics.totals`; this module composes them.

Order of collectives at a close, on all ranks: one gather (tensors, times, candidates of slices, samples), one sum
(values of slices, from rank 0 to all), one sum (totals).
"""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace import documents
from headrace.trainer.config import MetricsSection, TaskSection
from headrace.trainer.metrics.auc import sum_group_aucs
from headrace.trainer.metrics.halves import Exclusive, StreamHalves, countable
from headrace.trainer.metrics.measures import Measures, measures, reliability, set_gauc
from headrace.trainer.metrics.ranking import GroupMeasures
from headrace.trainer.metrics.samples import Columns, ObservedBatch, SampleBuffer
from headrace.trainer.metrics.scope import Scope
from headrace.trainer.metrics.slices import NUM_BUCKETS as SLICE_BUCKETS
from headrace.trainer.metrics.slices import Candidates, SliceRows, choose
from headrace.trainer.metrics.tensor_totals import TensorTotal
from headrace.trainer.metrics.totals import I64, add_samples, empty
from headrace.trainer.metrics.window import PastPasses, TimeCounts
from headrace.trainer.own_metrics import Metric


class Reduce(Protocol):
    """The collectives that metrics need; `trainer.collectives.ranks.Ranks` has them.

    Every rank makes the same calls in the same order, with the same names, types and, in `sum`, sizes.
    """

    def sum(self, array: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sum over ranks, on all of them."""
        ...

    def gather(self, columns: Mapping[str, NDArray[Any]]) -> list[dict[str, NDArray[Any]]] | None:
        """On rank 0 the columns of all ranks, by rank; None elsewhere."""
        ...


class LocalReduce:
    """One rank."""

    def sum(self, array: NDArray[np.int64]) -> NDArray[np.int64]:
        return array

    def gather(self, columns: Mapping[str, NDArray[Any]]) -> list[dict[str, NDArray[Any]]] | None:
        return [dict(columns)]


NUM_BUCKETS = 65_536
OTHER = "other"
"""Name in a slice's report of all values without their own metrics."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MeterState:
    """The state of a meter in a commit."""

    arrays: Mapping[str, I64]
    facts: Mapping[str, Any]
    """JSON."""


class Meter:
    """Used by one thread."""

    def __init__(
        self,
        config: MetricsSection,
        tasks: Sequence[TaskSection],
        *,
        timed: bool,
        halves_folder: Path | None = None,
        exclusive: Exclusive = nullcontext,
        own: Sequence[Metric] = (),
    ) -> None:
        """`timed`: whether samples have event times. `halves_folder`: rank 0's folder for the samples of the halves;
        None: halves are not measured. Both are the same on all ranks. `exclusive`: the lock for writing there."""
        self._tasks = tuple((task.name, task.loss != "mse") for task in tasks)
        self._timed, self._grouped, self._own = timed, config.gauc_by is not None, tuple(own)
        self._ranking = GroupMeasures(config.at_k, calibration=config.group_calibration)
        self._times = TimeCounts(config.window)
        self._part_s = self._times.part_s if timed else None
        """Seconds of one part of the window; None: a part is a pass."""
        self._slices = {slot: SliceRows(self._tasks, config.max_slice_values) for slot in config.slices}
        self._max_slice_values = config.max_slice_values
        keeps = self._grouped or halves_folder is not None
        self._samples = SampleBuffer([name for name, _ in self._tasks], self._grouped) if keeps else None
        self._halves = (
            None if halves_folder is None else StreamHalves(halves_folder, self._tasks, self._grouped, exclusive)
        )
        self._pass = self._new_scope()
        """Totals of the current pass on this rank; after its close, those of all ranks."""
        self._past = PastPasses(self._pass, self._part_s)
        self._closed = True

    def _new_scope(self) -> Scope:
        totals = {f"task/{name}": empty(1, NUM_BUCKETS) for name, _ in self._tasks}
        for slot in self._slices:
            totals |= {f"slice/{slot}/{n}": empty(self._max_slice_values + 1, SLICE_BUCKETS) for n, _ in self._tasks}
        carried = frozenset(totals)
        for metric in self._own:
            totals |= {f"own/{metric.name}/{name}": np.zeros((1, metric.size), np.int64) for name, _ in self._tasks}
        if self._ranking.any:
            totals |= {
                f"groups/{n}": np.zeros((1, self._ranking.size), np.int64) for n, is_bce in self._tasks if is_bce
            }
        return Scope(totals, carried)

    # -- batches

    def add(self, observed: ObservedBatch) -> None:
        """Add a batch. Must be called before the batch is learnt."""
        self._open()
        num_samples = len(observed.prediction_B[self._tasks[0][0]])
        row_B = np.zeros(num_samples, np.int64)
        for name, is_bce in self._tasks:
            columns = observed.prediction_B[name], observed.label_B[name], observed.weight_B[name]
            add_samples(*columns, row_B, is_bce, self._pass.totals[f"task/{name}"])
            for metric in self._own:
                metric.add(*columns, self._pass.totals[f"own/{metric.name}/{name}"][0])
        for slot, rows in self._slices.items():
            rows.add(observed.slices[slot], observed.prediction_B, observed.label_B, observed.weight_B)
        for name, values in observed.tensors.items():
            self._pass.tensors.setdefault(name, TensorTotal()).add(values)
        if self._timed and observed.time_s_B is not None:
            self._times.add(observed.time_s_B)
        if self._samples is not None:
            self._samples.add(observed)

    def _open(self) -> None:
        if self._closed:
            self._pass.clear()
            self._closed = False

    # -- the close

    def close_pass(self, reduce: Reduce, *, again: bool = False) -> dict[str, Any] | None:
        """Close the pass on all ranks. On rank 0, add it to window and life, and return its metrics; None elsewhere.

        `again`: its samples were learnt in an earlier epoch, so they are not added to window, life and halves.
        """
        self._open()
        self._pass.carry()
        heard = reduce.gather(self._message())
        known = self._choose(heard, reduce)
        for slot, rows in self._slices.items():
            for task, rows_RW in rows.take(known[slot]).items():
                self._pass.totals[f"slice/{slot}/{task}"] = rows_RW
        self._sum(reduce)
        self._closed = True
        if heard is None:
            return None
        self._pass.tensors = _merge_tensors(heard)
        if self._samples is not None:
            self._exact(self._samples.in_order(heard), again=again)
        if not again:
            self._past.add(self._pass, _merge_times(heard))
        return self.report_pass()

    def _message(self) -> Columns:
        candidates = {slot: rows.candidates() for slot, rows in self._slices.items()}
        samples = self._samples.take() if self._samples is not None else {}
        return _columns_of(self._pass.tensors, self._times.take(), candidates) | dict(samples)

    def _choose(self, heard: Sequence[Columns] | None, reduce: Reduce) -> dict[str, list[int]]:
        """Ids of the values of each slice, chosen by rank 0 and sent to all."""
        if not self._slices:
            return {}
        table = np.zeros((len(self._slices), 1 + self._max_slice_values), np.int64)
        if heard is not None:
            for row, (slot, rows) in zip(table, self._slices.items(), strict=True):
                said = [_candidates_of(columns, slot) for columns in heard]
                ids = choose(rows.known, said, self._max_slice_values)
                texts = {value: text for each in said for value, text in each.text.items()}
                rows.texts |= {value: texts[value] for value in ids if value in texts}
                row[0] = len(ids)
                row[1 : 1 + len(ids)] = np.array(ids, np.uint64).view(np.int64)
        table = reduce.sum(table.reshape(-1)).reshape(table.shape)
        return {
            slot: row[1 : 1 + int(row[0])].copy().view(np.uint64).tolist()
            for row, slot in zip(table, self._slices, strict=True)
        }

    def _sum(self, reduce: Reduce) -> None:
        totals = self._pass.totals
        flat = reduce.sum(np.concatenate([rows_RW.reshape(-1) for rows_RW in totals.values()]))
        begin = 0
        for name, rows_RW in totals.items():
            totals[name] = flat[begin : begin + rows_RW.size].reshape(rows_RW.shape).copy()
            begin += rows_RW.size
        self._pass.carry()

    def _exact(self, rows_N: NDArray[Any], *, again: bool) -> None:
        """Compute what needs every sample: AUCs of groups, and the file of the halves."""
        for task, (name, is_bce) in enumerate(self._tasks):
            if self._grouped and is_bce:
                columns = [rows_N[f"{column}{task}"] for column in ("prediction", "label", "weight")]
                counted_N = countable(*columns)
                sums = sum_group_aucs(rows_N["group"][counted_N], columns[0][counted_N], columns[1][counted_N])
                set_gauc(self._pass.totals[f"task/{name}"][0], *sums)
                if self._ranking.any:
                    of_groups = rows_N["group"][counted_N], columns[0][counted_N], columns[1][counted_N]
                    self._ranking.add(*of_groups, self._pass.totals[f"groups/{name}"][0])
        if self._halves is not None and not again:
            self._halves.append(rows_N)

    # -- reports of rank 0

    def report(self) -> dict[str, Any]:
        """{"pass": {task: measures}, "window": ..., "life": ..., "tensors": {"pass": {tensor: ...}, ...}}."""
        scopes = {"pass": self._pass, "window": self._past.window.total(self._pass), "life": self._past.life}
        report: dict[str, Any] = {name: self._of(scope) for name, scope in scopes.items()}
        return report | {"tensors": {name: _of_tensors(scope) for name, scope in scopes.items()}}

    def report_pass(self) -> dict[str, Any]:
        """{task: measures} of the last closed pass."""
        return self._of(self._pass)

    def halves(self) -> dict[str, dict[str, Measures]] | None:
        """{"first": {task: measures}, "last": ...}, exact; None if halves are not measured."""
        return None if self._halves is None else self._halves.measures()

    def fingerprint(self) -> bytes:
        """Digest of the last closed pass, 32 bytes: equal if all its sums are equal."""
        digest = hashlib.sha256()
        for name, rows_RW in sorted(self._pass.totals.items()):
            digest.update(name.encode() + b"\0" + rows_RW.astype("<i8").tobytes())
        tensors = {name: total.to_json() for name, total in self._pass.tensors.items()}
        digest.update(json.dumps(tensors, sort_keys=True).encode())
        return digest.digest()

    def _of(self, scope: Scope) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, is_bce in self._tasks:
            row: dict[str, Any] = dict(measures(scope.totals[f"task/{name}"][0], is_bce))
            row |= self._ranking.report(scope.totals[f"groups/{name}"][0]) if is_bce and self._ranking.any else {}
            row |= {"reliability": reliability(scope.totals[f"task/{name}"][0])} if is_bce else {}
            row |= {m.name: m.value(scope.totals[f"own/{m.name}/{name}"][0]) for m in self._own}
            if self._slices:
                row["slices"] = {slot: self._of_slice(scope, slot, name, is_bce) for slot in self._slices}
            found[name] = row
        return found

    def _of_slice(self, scope: Scope, slot: str, task: str, is_bce: bool) -> dict[str, Measures]:
        rows_RW = scope.totals[f"slice/{slot}/{task}"]
        texts = (self._slices[slot].texts[value] for value in self._slices[slot].known)
        names = [OTHER, *(repr(text) if text == OTHER else text for text in texts)]
        found = {name: measures(rows_W, is_bce) for name, rows_W in zip(names, rows_RW, strict=False)}
        for each in found.values():
            for grouped in ("gauc", "gauc_groups"):
                each.pop(grouped, None)
        return found

    # -- restarts

    def state(self) -> MeterState:
        """The state of window and life, on rank 0 between passes."""
        assert self._closed, "a pass is open"
        arrays, past = self._past.state()
        facts = {
            "sizes": self._pass.sizes(),
            **past,
            "slices": {
                slot: [[str(value), rows.texts[value]] for value in rows.known] for slot, rows in self._slices.items()
            },
            "halves": 0 if self._halves is None else self._halves.num_samples,
            "halves_of": None if self._halves is None else self._halves.layout,
        }
        return MeterState(arrays, facts)

    def load_state(self, state: MeterState) -> None:
        """Continue from a saved state, on every rank. Metrics that it lacks, or has in other sizes, start anew."""
        facts, sizes = state.facts, self._pass.sizes()
        kept = _kept(facts["sizes"], sizes)
        self._pass, self._closed = self._new_scope(), True
        self._past = PastPasses(self._pass, self._part_s)
        self._past.load(state.arrays, facts, kept)
        for slot, rows in self._slices.items():
            if any(f"slice/{slot}/{name}" in kept for name, _ in self._tasks):
                rows.texts = {int(value): text for value, text in facts["slices"][slot]}
                rows.know(list(rows.texts))
        if self._halves is not None:
            before = self._halves.layout if facts["sizes"] == sizes else []  # older states lack it
            if facts["halves"] and facts.get("halves_of", before) != self._halves.layout:
                self._halves.lose()
            self._halves.resume(int(facts["halves"]))


def _kept(saved: Mapping[str, list[int]], own: Mapping[str, list[int]]) -> set[str]:
    """Names of totals that continue. The others are logged."""
    kept = {name for name, size in own.items() if saved.get(name) == size}
    if others := sorted({*own, *saved} - kept):
        log.warning("saved metrics are of other tasks, slices or sizes than the spec's: %s", _anew(others))
    return kept


def _anew(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{', '.join(names[:5])}{more}; these start anew or are dropped, the rest continues"


def _of_tensors(scope: Scope) -> dict[str, Measures]:
    return {name: total.measures() for name, total in sorted(scope.tensors.items())}


# -- messages of ranks to rank 0 at a close, as columns of bytes with JSON. Nothing is pickled.


def _columns_of(
    tensors: Mapping[str, TensorTotal], parts: Mapping[int, int], candidates: Mapping[str, Candidates]
) -> dict[str, NDArray[Any]]:
    """The message of one rank. It has the same names and types on every rank."""
    said = {
        "tensors": {name: total.to_json() for name, total in tensors.items()},
        "parts": {str(part): count for part, count in parts.items()},
        "slices": {
            slot: [[str(value), count, each.text[value]] for value, count in each.count.items()]
            for slot, each in candidates.items()
        },
    }
    return {"said": np.frombuffer(json.dumps(said).encode(), np.uint8)}


def _said(columns: Columns) -> dict[str, Any]:
    return documents.parse_object(columns["said"].tobytes(), "what a trainer measured")


def _merge_tensors(ranks: Sequence[Columns]) -> dict[str, TensorTotal]:
    """Totals of the tensors of all ranks."""
    merged: dict[str, TensorTotal] = {}
    for columns in ranks:
        for name, row in _said(columns)["tensors"].items():
            merged.setdefault(name, TensorTotal()).merge(TensorTotal.of_json(row))
    return merged


def _merge_times(ranks: Sequence[Columns]) -> dict[int, int]:
    """Number of samples of all ranks by part of the window."""
    merged: dict[int, int] = {}
    for columns in ranks:
        for part, count in _said(columns)["parts"].items():
            merged[int(part)] = merged.get(int(part), 0) + count
    return merged


def _candidates_of(columns: Columns, slot: str) -> Candidates:
    """A rank's candidates for the values of a slice."""
    rows = _said(columns)["slices"][slot]
    return Candidates({int(v): count for v, count, _ in rows}, {int(v): text for v, _, text in rows})
