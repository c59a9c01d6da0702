"""Features of raw events by an export alone: the description in model.json, and samples from it.

The replica and deploy/examples/serving use it, so that they make the very features that the trainer made.

Shapes: E events, B samples.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field

from headrace.config import Section, validate
from headrace.dataset.features.feature_plan import FeaturePlan
from headrace.dataset.formats.arrow_columns import AnswerReader
from headrace.dataset.samples.batch import Samples
from headrace.dataset.samples.rejection import Reason
from headrace.dataset.samples.slot_counters import SlotCounters
from headrace.dataset.samples.trim import trim
from headrace.dataset.spec.config import AnyPipe, AnySlot, ColumnsPipe, SlotKind
from headrace.dataset.spec.schema import Schema
from headrace.errors import BadInput, SpecError

FORMAT = 1
"""Format number of the description."""


class FeatureDocument(Section):
    """The key "features" of model.json."""

    format: Literal[1]
    """Number of this format."""
    pipe: ColumnsPipe
    """The pipe of the job file."""
    slots: Annotated[tuple[AnySlot, ...], Field(min_length=1)]
    """The slots that the model reads, with their features."""


def describe_features(pipe: AnyPipe, schema: Schema) -> dict[str, Any] | None:
    """The description of a job's features; None if a command makes them. Labels and other meta slots are left
    out, and what the job fills, which no event has.

    Events that are served are JSON, also those of a job that reads Avro or Protobuf: fields, not bytes, make features.
    """
    if not isinstance(pipe, ColumnsPipe):
        return None
    slots = [slot for slot in schema.emitted.slots if slot.kind is not SlotKind.META]
    entries = [slot.entry.model_copy(update={"name": slot.name, "names": ()}) for slot in slots]
    return {
        "format": FORMAT,
        "pipe": {"kind": "columns", "format": "json", "explode": pipe.explode},
        "slots": [entry.model_dump(mode="json") for entry in entries],
    }


class ServedFeatures:
    """Samples from raw events. Any thread may call it."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        """`document`: the key "features" of model.json. Raises BadInput."""
        try:
            read = validate(FeatureDocument, document)
            self._schema = Schema.of(read.slots)
            self.pipe = read.pipe
            self._plan = FeaturePlan(read.pipe, self._schema)
        except SpecError as error:
            raise BadInput(f"model.json: its features cannot be read: {error}") from error
        self._reader = AnswerReader(self._schema, {}, Reason.of_field)

    def samples(self, events: Sequence[bytes]) -> tuple[pa.Table, NDArray[np.int64]]:
        """The samples of some events, a column for each slot, and (B,) the event of each. Raises BadInput, which names
        the first event that cannot be read."""
        answer = self._plan.apply(pa.array(events, pa.binary()))
        samples, bad = self._reader.read(answer, np.arange(len(events)), np.full(len(events), np.nan))
        if bad:
            raise BadInput(f"event {bad[0].event}: {bad[0].detail}")
        samples = trim(samples, self._schema, SlotCounters(self._schema))
        return _table(samples), samples.event_B


def _table(samples: Samples) -> pa.Table:
    columns: dict[str, pa.Array] = {}
    for name, column in samples.sparse.items():
        offsets = pa.array(column.offset_B1.astype(np.int32))
        columns[name] = pa.ListArray.from_arrays(offsets, pa.array(column.values_N))
    for name, value_BD in samples.dense.items():
        columns[name] = pa.FixedSizeListArray.from_arrays(pa.array(value_BD.reshape(-1)), value_BD.shape[1])
    return pa.table(columns)
