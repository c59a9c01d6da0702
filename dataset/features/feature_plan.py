"""Samples out of events by the keys of the slots: a pure function of each event and the job file.

`FeaturePlan.apply` answers as a pipe command of the Arrow protocol does (dataset.formats.arrow_columns), so everything
behind it is the same; only ids of text are hashed already. dataset.features.slot_features makes the
values of one slot.

Shapes: E events, B samples.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa

from headrace.dataset.features.cells import Cells
from headrace.dataset.features.event_rows import EventRows
from headrace.dataset.features.slot_features import crossed_of, dense_of, meta_of, sign_lists, signs_of
from headrace.dataset.features.slot_rules import check_slot_features, fields_of
from headrace.dataset.formats.arrow_columns import META_TYPES
from headrace.dataset.spec.config import ColumnsPipe, DenseSlot, MetaSlot, SlotKind
from headrace.dataset.spec.event_format import PATIENCE_S, Decoded, Decoder
from headrace.dataset.spec.schema import Schema


class FeaturePlan:
    """The samples of events by the keys of the slots. Its decoder says which threads
    may call it.

    `decoder`: for events of another kind than `pipe` names. Raises SpecError for keys that do not go together.
    """

    def __init__(
        self,
        pipe: ColumnsPipe,
        schema: Schema,
        folder: Path | None = None,
        decoder: Decoder | None = None,
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`patience_s`: how long ids that a schema registry does not know are asked for again."""
        check_slot_features(pipe, list({id(slot.entry): slot.entry for slot in schema.slots}.values()))
        self.fields = fields_of(pipe, schema)
        self._explode, self._slots = pipe.explode, schema
        self._decoder = decoder or pipe.open_decoder(self.fields, folder, patience_s)
        self.schema = answer_schema(schema)

    def apply(self, events: pa.BinaryArray) -> pa.RecordBatch:
        """The answer for some events: a row for each sample, and for each rejected event one with its error."""
        return self.answer(self._decoder.decode(events))

    def answer(self, decoded: Decoded) -> pa.RecordBatch:
        """The answer for events that are decoded."""
        rows = EventRows(decoded, self.fields, self._explode)
        columns: dict[str, pa.Array] = {}
        signs: dict[str, Cells] = {}
        for slot in (slot for slot in self._slots.slots if not slot.entry.cross):
            match slot.kind:
                case SlotKind.SPARSE:
                    signs[slot.name] = signs_of(slot, rows)
                case SlotKind.DENSE:
                    columns[slot.name] = dense_of(slot, rows)
                case SlotKind.META:
                    columns[slot.name] = meta_of(slot, rows)
        for slot in (slot for slot in self._slots.sparse if slot.entry.cross):
            signs[slot.name] = crossed_of(slot, rows, signs)
        columns |= {name: sign_lists(cells) for name, cells in signs.items()}
        arrays = [pa.array(rows.event_B.astype(np.int32)), pa.nulls(len(rows.event_B), pa.utf8())]
        arrays += [columns[slot.name] for slot in self._slots.slots]
        return with_errors(pa.RecordBatch.from_arrays(arrays, schema=self.schema), rows.errors)


def answer_schema(schema: Schema) -> pa.Schema:
    """The schema of answers: as the Arrow protocol has it, with the ids of all sparse slots as numbers."""
    fields = [pa.field("event", pa.int32()), pa.field("error", pa.utf8())]
    for slot in schema.slots:
        match slot.entry:
            case DenseSlot(size=size):
                fields.append(pa.field(slot.name, pa.list_(pa.float32(), size)))
            case MetaSlot(type=kind):
                fields.append(pa.field(slot.name, META_TYPES[kind]))
            case _:
                fields.append(pa.field(slot.name, pa.list_(pa.uint64())))
    return pa.schema(fields)


def with_errors(answer: pa.RecordBatch, errors: Mapping[int, str]) -> pa.RecordBatch:
    """The answer with one row for each rejected event, in place of its samples; in order of events."""
    if not errors:
        return answer
    failed = sorted(errors)
    event_B = answer.column("event").to_numpy()
    good = answer.filter(pa.array(~np.isin(event_B, failed)))
    added = {"event": pa.array(failed, pa.int32()), "error": pa.array([errors[event] for event in failed], pa.utf8())}
    bad = [added.get(field.name, pa.nulls(len(failed), field.type)) for field in answer.schema]
    columns = [pa.concat_arrays([a, b]) for a, b in zip(good.columns, bad, strict=True)]
    order = np.argsort(np.concatenate([good.column("event").to_numpy(), failed]), kind="stable")
    return pa.RecordBatch.from_arrays(columns, schema=answer.schema).take(pa.array(order))
