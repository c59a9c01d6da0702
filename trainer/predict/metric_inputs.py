"""Stores the inputs of metrics for each part, and computes the metrics once all parts exist. Imports no torch.

The columns of a part are an Arrow file: "<n>.prediction", "<n>.label" and "<n>.weight" of task n, "group",
"slice.<slot>", and "<n>.without.<slot>", the prediction of task n without the values of a slot.
All parts pass through one meter in order, as one pass. So metrics do not depend on which worker made a part.

Shapes: B samples.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headrace.dataset.samples.batch import F32, Samples
from headrace.trainer.config import MetricsSection, TaskSection
from headrace.trainer.features.training_batches import targets
from headrace.trainer.metrics.meter import LocalReduce, Meter
from headrace.trainer.metrics.samples import ObservedBatch
from headrace.trainer.metrics.tensor_totals import TensorTotal
from headrace.trainer.own_metrics import Metric
from headrace.trainer.predict.joined_labels import JoinedLabels

GROUP, SLICE, PREDICTION, WITHOUT = "group", "slice.", "prediction", "without."


def targets_of(
    samples: Samples, tasks: Sequence[TaskSection], weight_slot: str | None
) -> tuple[dict[str, F32], dict[str, F32]]:
    """(B,) labels and weights by task; both are 0 where a label is missing or masked. One of many classes has label 1,
    as its prediction is the probability of the right one."""
    label_B, weight_B = targets(samples, tasks, weight_slot)
    given = {task.name: samples.meta[task.label] for task in tasks}
    for name, values in label_B.items():
        there_B = np.isfinite(values) & np.isfinite(given[name].astype(np.float64))
        label_B[name] = np.where(there_B, values, np.float32(0))
        weight_B[name] = np.where(there_B, weight_B[name], np.float32(0))
    return label_B, weight_B


def metric_table(
    tasks: Sequence[TaskSection],
    prediction_B: Mapping[str, F32],
    label_B: Mapping[str, F32],
    weight_B: Mapping[str, F32],
    group_B: NDArray[np.uint64] | None,
    slices: Mapping[str, NDArray[Any]],
    without: Mapping[str, Mapping[str, F32]] = {},
) -> pa.Table:
    """The inputs of metrics for some samples. `without`: by slot, the predictions without its values."""
    found: dict[str, pa.Array] = {}
    for number, task in enumerate(tasks):
        found[f"{number}.prediction"] = pa.array(prediction_B[task.name])
        found[f"{number}.label"] = pa.array(label_B[task.name])
        found[f"{number}.weight"] = pa.array(weight_B[task.name])
    if group_B is not None:
        found[GROUP] = pa.array(group_B)
    for slot, values in slices.items():
        found[SLICE + slot] = pa.array(values, pa.string()) if values.dtype == object else pa.array(values)
    for slot, predictions in without.items():
        for number, task in enumerate(tasks):
            found[f"{number}.{WITHOUT}{slot}"] = pa.array(predictions[task.name])
    return pa.table(found)


class OwnTotals:
    """The vectors of the job's own metrics over a part, by task and name."""

    def __init__(self, own: Sequence[Metric], tasks: Sequence[TaskSection]) -> None:
        self._own, self._names = own, [task.name for task in tasks]
        self._vectors = {name: {metric.name: np.zeros(metric.size, np.int64) for metric in own} for name in self._names}

    def add(self, observed: pa.Table) -> None:
        """Add samples as `metric_table` has them."""
        for place, name in enumerate(self._names):
            given = [observed.column(f"{place}.{what}").to_numpy() for what in ("prediction", "label", "weight")]
            for metric in self._own:
                metric.add(given[0], given[1], given[2], self._vectors[name][metric.name])

    def to_json(self) -> dict[str, dict[str, list[int]]]:
        """Exact, as JSON."""
        return {
            name: {metric: vector.tolist() for metric, vector in vectors.items()}
            for name, vectors in self._vectors.items()
        }


def summed(parts: Iterable[Mapping[str, Mapping[str, Any]] | None]) -> dict[str, dict[str, list[int]]]:
    """The vectors of all parts together; empty where a part has none, as it is of an older Headrace."""
    found: dict[str, dict[str, list[int]]] = {}
    for part in parts:
        if part is None:
            return {}
        for task, vectors in part.items():
            of_task = found.setdefault(task, {})
            for name, vector in vectors.items():
                of_task[name] = [a + b for a, b in zip(of_task.get(name, [0] * len(vector)), vector, strict=True)]
    return found


def _observed(batch: pa.RecordBatch, number: int, tasks: Sequence[TaskSection], judged: str) -> ObservedBatch:
    """`judged`: which predictions."""

    def column(name: str) -> Any:
        return batch.column(name).to_numpy(zero_copy_only=False)

    def by_task(what: str) -> dict[str, F32]:
        return {task.name: column(f"{place}.{what}") for place, task in enumerate(tasks)}

    names = batch.schema.names
    return ObservedBatch(
        number,
        by_task(judged),
        by_task("label"),
        by_task("weight"),
        group_B=column(GROUP) if GROUP in names else None,
        slices={name.removeprefix(SLICE): column(name) for name in names if name.startswith(SLICE)},
    )


def _batches(files: Iterable[AbstractContextManager[Path]]) -> Iterator[pa.RecordBatch]:
    for each in files:
        with each as file, pa.memory_map(str(file)) as mapped:
            with pa.ipc.open_file(mapped) as reader:
                for number in range(reader.num_record_batches):
                    yield reader.get_batch(number)


def compute_metrics(
    config: MetricsSection,
    tasks: Sequence[TaskSection],
    files: Iterable[AbstractContextManager[Path]],
    tensors: Iterable[Mapping[str, Sequence[Any]]],
    check: Callable[[], None],
    joined: JoinedLabels | None = None,
    label: str = "",
    without: str | None = None,
) -> dict[str, Any]:
    """{"tasks": {task: measures}, "tensors": {tensor: measures}} over all parts; calls `check` between batches.

    `joined`: the labels of the tasks with `label`, of a job with a join. `without`: a slot whose values the judged
    predictions lack.
    The mean AUC of groups is exact; it needs 12 bytes of memory per sample and task, and 8 per sample for the group.
    """
    judged = PREDICTION if without is None else WITHOUT + without
    meter = Meter(config.model_copy(update={"halves": False}), tasks, timed=False)
    mine, begin = [place for place, task in enumerate(tasks) if task.label == label], 0
    for number, batch in enumerate(_batches(files)):
        check()
        meter.add(_observed(batch if joined is None else joined.into(batch, begin, mine), number, tasks, judged))
        begin += len(batch)
    totals: dict[str, TensorTotal] = {}
    for part in tensors:
        for name, row in part.items():
            totals.setdefault(name, TensorTotal()).merge(TensorTotal.of_json(list(row)))
    found = meter.close_pass(LocalReduce())
    return {"tasks": found, "tensors": {name: total.measures() for name, total in sorted(totals.items())}}
