"""The columns of the Arrow protocol: events to request batches, answer batches to samples.

Semantics § 2 defines the schemas. An answer of the wrong shape raises BadAnswer: then the generator is wrong. A problem
of one event (its own error text, a non-finite value, an absent label) rejects that event alone.

Shapes: B rows of an answer, E events of its request, N signs.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headrace.dataset.samples.batch import F32, F64, I64, U64, Ragged, Samples
from headrace.dataset.samples.rejection import Reason
from headrace.dataset.samples.trim import keep_samples
from headrace.dataset.spec.config import DenseSlot, MetaSlot, SlotKind
from headrace.dataset.spec.schema import Schema, Slot
from headrace.dataset.stream.source import Events, Segment
from headrace.errors import BadInput
from headrace.kernel_cache import njit
from headrace.key_kernels import fnv1a
from headrace.keys import sign_of_text

REQUEST = pa.schema(
    [
        ("event", pa.binary()),
        ("key", pa.binary()),
        ("topic", pa.utf8()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp_ms", pa.int64()),
        ("headers", pa.map_(pa.utf8(), pa.binary())),
    ]
)
MAX_REQUEST_BYTES = (1 << 31) - 1
META_TYPES = {"float": pa.float32(), "uint64": pa.uint64(), "int64": pa.int64(), "string": pa.utf8()}


class BadAnswer(Exception):
    """An answer does not have the required schema."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """A rejected event of the request."""

    event: int
    reason: Reason
    detail: str
    slot: str | None = None


def request_batch(segment: Segment, events: Events, values: NDArray[np.uint8]) -> pa.RecordBatch:
    """A request with some events, whose values are concatenated in `values`. Raises BadInput above 2 GiB."""
    num = len(events)
    if len(values) > MAX_REQUEST_BYTES:
        raise BadInput(
            f"{num} events of {segment.partition} from {events.position_E[0]} on have {len(values)} bytes, more than a "
            "request of the Arrow protocol can carry (2 GiB); lower pipe.batch_events"
        )
    offset_E1 = np.zeros(num + 1, np.int32)
    np.cumsum(events.end_E - events.begin_E, out=offset_E1[1:])
    event = pa.Array.from_buffers(pa.binary(), num, [None, pa.py_buffer(offset_E1), pa.py_buffer(values)])
    match = re.fullmatch(r"(.+)/(\d{1,9})", segment.partition)
    topic, partition = (match[1], int(match[2])) if match else (segment.partition, segment.number)
    headers = [None] * num if events.headers is None else [list(pairs) for pairs in events.headers]
    columns = [
        event,
        pa.nulls(num, pa.binary()) if events.keys is None else pa.array(list(events.keys), pa.binary()),
        pa.repeat(pa.scalar(topic, pa.utf8()), num),
        pa.repeat(pa.scalar(partition, pa.int32()), num),
        pa.array(events.position_E),
        pa.array(events.timestamp_ms_E),
        pa.array(headers, REQUEST.field("headers").type),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=REQUEST)


def answer_types(slot: Slot) -> tuple[pa.DataType, ...]:
    """The types allowed for a slot's column; our generators write the first."""
    match slot.entry:
        case DenseSlot(size=size):
            listed = pa.list_(pa.float32(), size)
            return (listed, pa.float32()) if size == 1 else (listed,)
        case MetaSlot(type=kind):
            return (META_TYPES[kind],)
        case _:
            kinds = (pa.uint64(), pa.int64()) if slot.sparse.values == "uint64" else (pa.utf8(),)
            return tuple(pa.list_(kind) for kind in kinds)


def check_answer_schema(schema: Schema, answer: pa.Schema, *, drop_extra: bool = False) -> None:
    """Raise BadAnswer if columns are missing, duplicate, of a wrong type, or unknown and not dropped."""
    allowed = {"event": (pa.int32(),), "error": (pa.utf8(),)}
    allowed |= {slot.name: answer_types(slot) for slot in schema.slots}
    optional = {f"{slot.name}.weight": (pa.list_(pa.float32()),) for slot in schema.sparse if slot.sparse.weighted}
    if missing := [name for name in allowed if answer.get_field_index(name) < 0 and name not in answer.names]:
        raise BadAnswer(f"answers without column {', '.join(map(repr, missing))}")
    for field in answer:
        types = allowed.get(field.name) or optional.get(field.name)
        if types is None and drop_extra:
            continue
        if types is None:
            raise BadAnswer(
                f'answers with a column {field.name!r} that is not a slot; pipe.extra = "drop" ignores such columns'
            )
        if answer.names.count(field.name) > 1:
            raise BadAnswer(f"answers with two columns {field.name!r}")
        # The name of a list's item does not matter.
        if not any(field.type.equals(kind) or _same_list(field.type, kind) for kind in types):
            texts = pa.list_(pa.uint64()) in types and _same_list(field.type, pa.list_(pa.utf8()))
            raise BadAnswer(
                f"answers {field.name!r} as {field.type}; it must be {' or '.join(str(kind) for kind in types)}"
                + ('; for text, set values = "string" in the slot' if texts else "")
            )


def _same_list(found: pa.DataType, wanted: pa.DataType) -> bool:
    if pa.types.is_list(wanted):
        return pa.types.is_list(found) and bool(found.value_type.equals(wanted.value_type))
    if pa.types.is_fixed_size_list(wanted):
        same = pa.types.is_fixed_size_list(found) and found.list_size == wanted.list_size
        return bool(same and found.value_type.equals(wanted.value_type))
    return False


@njit(nogil=True, cache=True)
def hash_texts(data, offset_N1, out_N):  # type: ignore[no-untyped-def]
    """Hash texts to signs: `data[offset_N1[n]:offset_N1[n + 1]]` is text n."""
    for n in range(len(out_N)):
        out_N[n] = fnv1a(data, offset_N1[n], offset_N1[n + 1])


def hash_texts_reference(texts: list[bytes]) -> U64:
    """Plain twin of `hash_texts`."""
    return np.array([sign_of_text(text) for text in texts], np.uint64)


class AnswerReader:
    """Turns checked answers into samples.

    `masks` maps a label that may be absent to the slot that is 0 where it is; "" if it may always be absent.
    `reason_of` gives the reason for the error text of an event.
    """

    def __init__(
        self, schema: Schema, masks: Mapping[str, str], reason_of: Callable[[str], Reason] = Reason.of_error
    ) -> None:
        self._schema, self._masks, self._reason_of = schema, masks, reason_of

    def read(self, answer: pa.RecordBatch, position_E: I64, time_s_E: F64) -> tuple[Samples, list[BadRow]]:
        """The samples of the good events, and the rejected events. Raises BadAnswer."""
        event_B = self._events(answer, len(position_E))
        bad: dict[int, BadRow] = {}
        errors = answer.column("error")
        if errors.null_count < len(errors):
            for row in np.flatnonzero(errors.is_valid().to_numpy(zero_copy_only=False)).tolist():
                event = int(event_B[row])
                text = errors[row].as_py()
                bad.setdefault(event, BadRow(event, self._reason_of(text), text))
        failed_E = np.zeros(len(position_E), np.bool_)
        failed_E[list(bad)] = True
        samples, faults = self._columns(answer, event_B)
        for slot, reason, wrong_B in faults:
            for event in np.unique(event_B[wrong_B & ~failed_E[event_B]]).tolist():
                detail = f"slot {slot!r}: {reason}"
                bad.setdefault(event, BadRow(event, reason, detail, slot))
        failed_E[list(bad)] = True
        samples = Samples(samples.sparse, samples.dense, samples.meta, position_E[event_B], time_s_E[event_B])
        return keep_samples(samples, ~failed_E[event_B]), sorted(bad.values(), key=lambda row: row.event)

    def _events(self, answer: pa.RecordBatch, num_events: int) -> I64:
        column = answer.column("event")
        if column.null_count:
            raise BadAnswer("answers with a null in column 'event'")
        event_B: I64 = column.to_numpy().astype(np.int64)
        if len(event_B) and (event_B.min() < 0 or event_B.max() >= num_events):
            raise BadAnswer(
                f"answers for event {event_B.min() if event_B.min() < 0 else event_B.max()} of {num_events}"
            )
        if np.any(np.diff(event_B) < 0):
            raise BadAnswer("answers with decreasing event numbers")
        return event_B

    def _columns(
        self, answer: pa.RecordBatch, event_B: I64
    ) -> tuple[Samples, list[tuple[str, Reason, NDArray[np.bool_]]]]:
        sparse: dict[str, Ragged] = {}
        dense: dict[str, F32] = {}
        meta: dict[str, NDArray[Any]] = {}
        faults: list[tuple[str, Reason, NDArray[np.bool_]]] = []
        for slot in self._schema.slots:
            column = answer.column(slot.name)
            match slot.kind:
                case SlotKind.SPARSE:
                    sparse[slot.name], wrong = _signs(slot, column, answer)
                case SlotKind.DENSE:
                    dense[slot.name], wrong = _floats(slot, column)
                case SlotKind.META:
                    meta[slot.name], wrong = _meta(slot, column)
            faults += [(slot.name, reason, wrong_B) for reason, wrong_B in wrong.items() if wrong_B.any()]
        faults = list(self._unmasked(faults, meta))
        return Samples(sparse, dense, meta, event_B, np.full(len(event_B), np.nan)), faults

    def _unmasked(
        self, faults: list[tuple[str, Reason, NDArray[np.bool_]]], meta: Mapping[str, NDArray[Any]]
    ) -> Iterator[tuple[str, Reason, NDArray[np.bool_]]]:
        """The faults without the labels that are absent where their mask is 0."""
        for name, reason, wrong_B in faults:
            if reason is Reason.LABEL_MISSING and name in self._masks:
                mask = self._masks[name]
                wrong_B = wrong_B & (meta[mask] != 0) if mask else np.zeros_like(wrong_B)
            if wrong_B.any():
                yield name, reason, wrong_B


Wrong = dict[Reason, NDArray[np.bool_]]


def _offsets(slot: str, column: pa.Array) -> tuple[I64, pa.Array]:
    """Offsets from 0, and the values, of a list column; a null is an empty list."""
    if column.null_count:
        column = column.fill_null([])
    offset_B1 = column.offsets.to_numpy().astype(np.int64)
    values = column.values.slice(offset_B1[0], offset_B1[-1] - offset_B1[0])
    if values.null_count:
        raise BadAnswer(f"answers with nulls inside the lists of {slot!r}")
    return offset_B1 - offset_B1[0], values


def _signs(slot: Slot, column: pa.Array, answer: pa.RecordBatch) -> tuple[Ragged, Wrong]:
    offset_B1, values = _offsets(slot.name, column)
    wrong: Wrong = {}
    if pa.types.is_string(values.type):
        value_N = signs_of_texts(values)
    else:
        value_N = values.to_numpy()
        if value_N.dtype == np.int64:
            wrong[Reason.UNPARSABLE] = _any_of(value_N < 0, offset_B1)
            value_N = value_N.view(np.uint64)
    weights_N: F32 | None = None
    if slot.sparse.weighted:
        weights_N = np.ones(len(value_N), np.float32)
        index = answer.schema.get_field_index(f"{slot.name}.weight")
        if index >= 0:
            weight_offset_B1, weights = _offsets(f"{slot.name}.weight", answer.column(index))
            if not np.array_equal(weight_offset_B1, offset_B1):
                raise BadAnswer(f"answers with different numbers of weights and signs in slot {slot.name!r}")
            weights_N = weights.to_numpy()
            wrong[Reason.NON_FINITE] = _any_of(~np.isfinite(weights_N), offset_B1)
    return Ragged(value_N, offset_B1, weights_N), wrong


def signs_of_texts(values: pa.Array) -> U64:
    """(N,) The signs of texts without nulls."""
    out_N = np.empty(len(values), np.uint64)
    if len(values):
        _, offsets, data = values.buffers()
        offset_N1 = np.frombuffer(offsets, np.int32)[values.offset : values.offset + len(values) + 1].astype(np.int64)
        text = np.frombuffer(data, np.uint8) if data is not None and data.size else np.empty(0, np.uint8)
        text.setflags(write=False)
        hash_texts(text, offset_N1, out_N)
    return out_N


def _any_of(wrong_N: NDArray[np.bool_], offset_B1: I64) -> NDArray[np.bool_]:
    """(B,) whether any value of a row is wrong."""
    num_N1 = np.zeros(len(wrong_N) + 1, np.int64)
    np.cumsum(wrong_N, out=num_N1[1:])
    return np.asarray(num_N1[offset_B1[1:]] > num_N1[offset_B1[:-1]])


def _floats(slot: Slot, column: pa.Array) -> tuple[F32, Wrong]:
    assert isinstance(slot.entry, DenseSlot)
    null_B = column.is_null().to_numpy(zero_copy_only=False)
    if pa.types.is_fixed_size_list(column.type):
        start = column.offset * slot.entry.size
        column = column.values.slice(start, len(column) * slot.entry.size)
    value = column.to_numpy(zero_copy_only=False).reshape(-1, slot.entry.size).astype(np.float32, copy=False)
    return np.ascontiguousarray(value), {Reason.NON_FINITE: null_B | ~np.isfinite(value).all(axis=1)}


def _meta(slot: Slot, column: pa.Array) -> tuple[NDArray[Any], Wrong]:
    assert isinstance(slot.entry, MetaSlot)
    null_B = column.is_null().to_numpy(zero_copy_only=False)
    match slot.entry.type:
        case "string":
            texts = np.empty(len(column), object)
            texts[:] = column.to_pylist()
            return texts, {Reason.LABEL_MISSING: null_B}
        case "float":
            value = column.to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
            return value, {Reason.LABEL_MISSING: np.isnan(value) | null_B, Reason.NON_FINITE: np.isinf(value)}
        case _:
            return column.fill_null(0).to_numpy(), {Reason.LABEL_MISSING: null_B}
