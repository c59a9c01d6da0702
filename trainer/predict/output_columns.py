"""Columns of a part: origin of each sample, labels, copied slots, outputs of the model.

`partition` and `offset` are those of the event; `sample` is the number of the sample within the event. Where the pipe
cannot distinguish events (protocol = "multislot"), `offset` is null and `sample` counts within the part.

Shapes: B samples.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headrace.dataset.samples.batch import I64, Ragged, Samples
from headrace.dataset.spec.config import SlotKind
from headrace.dataset.spec.schema import Schema
from headrace.dataset.stream.source import Segment
from headrace.errors import SpecError
from headrace.trainer.config import TaskSection, TrainerJob
from headrace.trainer.predict.config import TIMES, PredictionRequest
from headrace.trainer.predict.fixed_batches import check_shuffled
from headrace.validation import nearest

PREDICTION, LABEL, WEIGHT = "prediction.", "label.", ".weight"
META_ARROW = {"float": pa.float32(), "uint64": pa.uint64(), "int64": pa.int64(), "string": pa.string()}


@dataclass(frozen=True)
class OutputColumns:
    """The columns of a part, and how they are made."""

    schema: Schema
    tasks: tuple[TaskSection, ...]
    handed: tuple[str, ...]
    """Copied slots, and "event_time"."""
    outputs: tuple[str, ...]
    """Tasks and other outputs, in the requested order."""
    traced: bool
    """Whether samples can be traced to events."""
    joined: str | None = None
    """The label that events of their own tell: it is null."""

    @classmethod
    def of(cls, request: PredictionRequest, job: TrainerJob, schema: Schema) -> "OutputColumns":
        """The columns of a request. Raises SpecError for a slot that the job does not have."""
        known = [*schema.by_name, TIMES]
        for number, name in enumerate(request.columns):
            if name not in known:
                raise SpecError(f"the job has no slot {name!r}; {nearest(name, known)}", f"columns.{number}")
        check_shuffled(schema, request.shuffle)
        outputs = request.outputs or tuple(task.name for task in job.tasks)
        traced = job.pipe.traced
        handed, joined = tuple(dict.fromkeys(request.columns)), None if job.join is None else job.join.label
        columns = cls(schema, job.tasks, handed, tuple(dict.fromkeys(outputs)), traced, joined)
        names = columns.names()
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise SpecError(f"two columns would be named {twice!r}; leave one out", "outputs")
        return columns

    def names(self) -> list[str]:
        """Names of all columns except those of weights."""
        return [
            *("partition", "offset", "sample"),
            *(LABEL + task.name for task in self.tasks),
            *self.handed,
            *(self.column_of(name) for name in self.outputs),
        ]

    def column_of(self, output: str) -> str:
        """Name of the column of an output."""
        return PREDICTION + output if any(task.name == output for task in self.tasks) else output

    def table(self, segment: Segment, samples: Samples, sample_B: I64, values: Mapping[str, NDArray[Any]]) -> pa.Table:
        """The rows of some samples; `values` holds the outputs by name, predictions by task."""
        found: dict[str, pa.Array] = {
            "partition": pa.array([segment.partition] * len(samples), pa.string()),
            "offset": pa.array(samples.event_B) if self.traced else pa.nulls(len(samples), pa.int64()),
            "sample": pa.array(sample_B.astype(np.int32)),
        }
        for task in self.tasks:
            unknown = task.label == self.joined
            found[LABEL + task.name] = pa.nulls(len(samples), pa.float32()) if unknown else label_of(task, samples)
        for name in self.handed:
            found |= self._handed(name, samples)
        for name in self.outputs:
            found[self.column_of(name)] = tensor_of(values[name])
        return pa.table(found)

    def _handed(self, name: str, samples: Samples) -> dict[str, pa.Array]:
        if name == TIMES:
            return {TIMES: pa.array(samples.time_s_B, pa.float64(), from_pandas=True)}
        slot = self.schema.by_name[name]
        match slot.kind:
            case SlotKind.META:
                kind = META_ARROW[getattr(slot.entry, "type", "float")]
                return {name: pa.array(samples.meta[name], kind, from_pandas=True)}
            case SlotKind.DENSE:
                return {name: tensor_of(samples.dense[name])}
            case SlotKind.SPARSE:
                column = samples.sparse[name]
                lists = {name: _lists(column, pa.array(column.values_N, pa.uint64()))}
                if column.weights_N is not None:
                    lists[name + WEIGHT] = _lists(column, pa.array(column.weights_N, pa.float32()))
                return lists


def label_of(task: TaskSection, samples: Samples) -> pa.Array:
    """(B,) labels of a task; null where there is none."""
    label_B = samples.meta[task.label].astype(np.float32)
    absent_B = ~np.isfinite(label_B)
    if task.mask is not None:
        absent_B |= samples.meta[task.mask] == 0
    return pa.array(label_B, mask=absent_B)


def tensor_of(values: NDArray[Any]) -> pa.Array:
    """(B, ...) values as a column: one value per sample, or a list of fixed length."""
    if values.ndim == 1:
        return pa.array(values)
    width = int(np.prod(values.shape[1:]))
    return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(values).reshape(-1)), width)


def _lists(column: Ragged, values: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(column.offset_B1.astype(np.int32), values)


class SampleNumbers:
    """Numbers samples within their events or, if not traced, within the part; continues over blocks."""

    def __init__(self, traced: bool) -> None:
        self._traced = traced
        self._event, self._next = -1, 0

    def number(self, event_B: I64) -> I64:
        """(B,) numbers of the next samples."""
        if not len(event_B):
            return np.empty(0, np.int64)
        if not self._traced:
            begin, self._next = self._next, self._next + len(event_B)
            return np.arange(begin, self._next, dtype=np.int64)
        first_B = np.r_[True, event_B[1:] != event_B[:-1]]
        place_B = np.arange(len(event_B))
        start_B = np.maximum.accumulate(np.where(first_B, place_B, 0))
        number_B: I64 = place_B - start_B
        if event_B[0] == self._event:  # the event began in the block before
            number_B[: int(np.argmax(np.r_[event_B != event_B[0], True]))] += self._next
        self._event, self._next = int(event_B[-1]), int(number_B[-1]) + 1
        return number_B
