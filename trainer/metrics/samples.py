"""The metrics' view of a batch before it is learnt, and the predictions of all samples of a pass.

A rank keeps predictions until the close where AUCs of groups or the two halves need them. Rank 0 puts those of all
ranks in training order (step, then rank). A masked sample keeps its place, with weight 0.

Shapes: B samples of a batch, N of a pass.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.keys import sign_of_text

F32 = NDArray[np.float32]
U64 = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class ObservedBatch:
    """One batch of one rank."""

    step: int
    """Number of the step within its pass. Step and rank determine the place in training order."""
    prediction_B: Mapping[str, F32]
    """By task: probability (loss "bce") or value ("mse")."""
    label_B: Mapping[str, F32]
    weight_B: Mapping[str, F32]
    """0: masked out, not counted."""
    time_s_B: NDArray[np.float64] | None = None
    """Event times, unix seconds; NaN if there is none."""
    group_B: U64 | None = None
    """Group of each sample, for the mean AUC of groups, as ids (`ids_of`)."""
    slices: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Values by slot of `metrics.slices`, as in the batch."""
    tensors: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Any shape; "loss" is the loss of each sample."""


_id_of_text = lru_cache(maxsize=65_536)(lambda text: sign_of_text(str(text).encode()))


def ids_of(values_B: NDArray[Any]) -> U64:
    """Values of a meta slot as ids. Equal values have equal ids.

    uint64 values are their own ids, int64 use their bits, floats those of their float64 (-0 as 0), text a fixed hash.
    """
    if values_B.dtype == np.uint64:
        return values_B
    if values_B.dtype == np.int64:
        return values_B.view(np.uint64)
    if values_B.dtype.kind == "f":
        return (values_B.astype(np.float64) + 0.0).view(np.uint64)
    if values_B.dtype.kind in "iu":
        return values_B.astype(np.uint64)
    return np.fromiter((_id_of_text(value) for value in values_B), np.uint64, len(values_B))


Columns = Mapping[str, NDArray[Any]]


def row_type(num_tasks: int, grouped: bool) -> np.dtype[Any]:
    """The type of one sample: prediction, label and weight of each task, and the group."""
    fields: list[tuple[str, str]] = []
    for task in range(num_tasks):
        fields += [(f"prediction{task}", "<f4"), (f"label{task}", "<f4"), (f"weight{task}", "<f4")]
    return np.dtype(fields + ([("group", "<u8")] if grouped else []))


class SampleBuffer:
    """Samples of the pass on one rank: 12 bytes for each sample and task, and 8 for the group."""

    def __init__(self, tasks: Sequence[str], grouped: bool) -> None:
        self._tasks = tuple(tasks)
        self._type = row_type(len(tasks), grouped)
        self._grouped = grouped
        self._batches: list[NDArray[Any]] = []
        self._steps: list[tuple[int, int]] = []

    def add(self, observed: ObservedBatch) -> None:
        """Add a batch. Its arrays are copied."""
        num_samples = len(observed.prediction_B[self._tasks[0]])
        rows_B = np.empty(num_samples, self._type)
        for task, name in enumerate(self._tasks):
            rows_B[f"prediction{task}"] = observed.prediction_B[name]
            rows_B[f"label{task}"] = observed.label_B[name]
            rows_B[f"weight{task}"] = observed.weight_B[name]
        if self._grouped:
            assert observed.group_B is not None, "metrics.gauc_by names a slot, so each batch brings its groups"
            rows_B["group"] = observed.group_B
        self._batches.append(rows_B)
        self._steps.append((observed.step, num_samples))

    def take(self) -> Columns:
        """Return the columns to gather, and forget them."""
        rows_N = np.concatenate(self._batches) if self._batches else np.empty(0, self._type)
        steps = np.array(self._steps, np.int64).reshape(-1, 2)
        self._batches, self._steps = [], []
        return {"rows": rows_N.view(np.uint8), "step": steps[:, 0].copy(), "step_size": steps[:, 1].copy()}

    def in_order(self, ranks: Sequence[Columns]) -> NDArray[Any]:
        """Rows of all ranks in training order: (N,) of `row_type`."""
        parts: list[tuple[int, int, NDArray[Any]]] = []
        for rank, columns in enumerate(ranks):
            rows_N, begin = np.ascontiguousarray(columns["rows"]).view(self._type), 0
            for step, size in zip(columns["step"].tolist(), columns["step_size"].tolist(), strict=True):
                parts.append((step, rank, rows_N[begin : begin + size]))
                begin += size
        parts.sort(key=lambda part: part[:2])
        return np.concatenate([rows_B for _, _, rows_B in parts]) if parts else np.empty(0, self._type)
