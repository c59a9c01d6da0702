"""Stores the inputs of metrics for each part, and computes the metrics once all parts exist. Imports no torch.

The columns of a part are an Arrow file: "<n>.prediction", "<n>.label" and "<n>.weight" of task n, "group",
"slice.<slot>". All parts pass through one meter in order, as one pass. So metrics do not depend on
which worker made a part.

Shapes: B samples.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

GROUP, SLICE = "group", "slice."


def targets_of(
    samples: Samples, tasks: Sequence[TaskSection], weight_slot: str | None
) -> tuple[dict[str, F32], dict[str, F32]]:
    """(B,) labels and weights by task; both are 0 where a label is missing or masked, or one of many classes."""
    label_B, weight_B = targets(samples, tasks, weight_slot)
    classes = {task.name for task in tasks if task.loss == "softmax"}  # the prediction is that of the best one
    for name, values in label_B.items():
        there_B = np.isfinite(values) & (name not in classes)
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
) -> pa.Table:
    """The inputs of metrics for some samples."""
    found: dict[str, pa.Array] = {}
    for number, task in enumerate(tasks):
        found[f"{number}.prediction"] = pa.array(prediction_B[task.name])
        found[f"{number}.label"] = pa.array(label_B[task.name])
        found[f"{number}.weight"] = pa.array(weight_B[task.name])
    if group_B is not None:
        found[GROUP] = pa.array(group_B)
    for slot, values in slices.items():
        found[SLICE + slot] = pa.array(values, pa.string()) if values.dtype == object else pa.array(values)
    return pa.table(found)


def _observed(batch: pa.RecordBatch, number: int, tasks: Sequence[TaskSection]) -> ObservedBatch:
    def column(name: str) -> Any:
        return batch.column(name).to_numpy(zero_copy_only=False)

    def by_task(what: str) -> dict[str, F32]:
        return {task.name: column(f"{place}.{what}") for place, task in enumerate(tasks)}

    names = batch.schema.names
    return ObservedBatch(
        number,
        by_task("prediction"),
        by_task("label"),
        by_task("weight"),
        group_B=column(GROUP) if GROUP in names else None,
        slices={name.removeprefix(SLICE): column(name) for name in names if name.startswith(SLICE)},
    )


def _batches(files: Iterable[Path]) -> Iterator[pa.RecordBatch]:
    for file in files:
        with pa.memory_map(str(file)) as mapped:
            with pa.ipc.open_file(mapped) as reader:
                for number in range(reader.num_record_batches):
                    yield reader.get_batch(number)


def compute_metrics(
    config: MetricsSection,
    tasks: Sequence[TaskSection],
    files: Iterable[Path],
    tensors: Iterable[Mapping[str, Sequence[Any]]],
    check: Callable[[], None],
) -> dict[str, Any]:
    """{"tasks": {task: measures}, "tensors": {tensor: measures}} over all parts; calls `check` between batches.

    The mean AUC of groups is exact; it needs 12 bytes of memory per sample and task, and 8 per sample for the group.
    """
    meter = Meter(config.model_copy(update={"halves": False}), tasks, timed=False)
    for number, batch in enumerate(_batches(files)):
        check()
        meter.add(_observed(batch, number, tasks))
    totals: dict[str, TensorTotal] = {}
    for part in tensors:
        for name, row in part.items():
            totals.setdefault(name, TensorTotal()).merge(TensorTotal.of_json(list(row)))
    found = meter.close_pass(LocalReduce())
    return {"tasks": found, "tensors": {name: total.measures() for name, total in sorted(totals.items())}}
