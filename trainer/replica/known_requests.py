"""Reads quickly the requests that most clients send: all slots, flat or as [B, n], with the same names and types.

What is read here equals what trainer.replica.inference_messages reads of the same body. It reads everything else, too,
and words all refusals: a request that is not read here may still be a good one.

Shapes: B samples, S slots of a table, N signs of one table.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.trainer.replica.inference_messages import (
    DTYPES,
    FLOATS,
    MAX_DIMENSIONS,
    MAX_VALUES,
    TEXT,
    InvalidInference,
    RequestReader,
    hashed,
)
from headrace.trainer.replica.request_templates import MAX_BYTES, RequestTemplate, places_of
from headrace.trainer.serving.slot_layout import F32, I64, NO_WEIGHTS, U64, InferenceInputs, SlotLayout, TableSigns

MAX_LAYOUTS = 64
"""Layouts that are kept; beyond it all are dropped."""
SIGNS = ("UINT64", "INT64")
MAX_TEMPLATES = 4
"""Each costs other requests a comparison of their first bytes."""
LEARNT_EVERY = 16
"""Requests between two templates, once there are so many: a template costs more than to parse its request."""
MAX_OFFSETS = 1 << 16
"""Most offsets of a layout that is kept: half a megabyte."""


class _TensorParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    binary_data_size: int | None = None


class _Tensor(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    name: str
    datatype: str
    shape: tuple[int, ...]
    data: list[int | float | str | list[int | float | str]] | None = None
    parameters: _TensorParameters | None = None


class _RequestParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    binary_data_output: bool | None = None


class _Request(msgspec.Struct, forbid_unknown_fields=True):
    inputs: list[_Tensor]
    id: str | None = None
    parameters: _RequestParameters | None = None


_DECODER = msgspec.json.Decoder(_Request)
_LAYOUT: Callable[[_Tensor], tuple[Any, ...]] = attrgetter("name", "datatype", "shape", "parameters")
_NO_SIGNS, _NO_FLOATS = np.empty(0, np.uint64), np.empty(0, np.float32)
_DATA: Callable[[_Tensor], Any] = attrgetter("data")


@dataclass(frozen=True, slots=True)
class KnownRequest:
    """A request that was read."""

    reader: RequestReader
    """The reader of the model that it is for."""
    inputs: InferenceInputs
    cost: int
    """See RequestReader.cost."""
    rest: dict[str, Any]
    """Its "id" and "parameters", for the answer."""
    again: Callable[[], object]
    """Reads it as trainer.replica.inference_messages does, should the model change meanwhile."""


@dataclass(frozen=True, slots=True)
class _TableLayout:
    places: tuple[int, ...]
    """The tensor of each slot."""
    are_texts: tuple[bool, ...]
    any_text: bool
    offset_SB1: I64
    is_weighted: bool


@dataclass(slots=True)
class _Layout:
    """Where the values of slots are in requests of one kind: checked once, so that only values are checked later."""

    num_samples: int
    cost: int
    sizes: list[int]
    """Values of each tensor."""
    dtypes: tuple[np.dtype[Any], ...]
    """Of raw tensors; empty where all are lists."""
    tables: tuple[_TableLayout, ...]
    dense: tuple[tuple[str, int, int], ...]
    """Name, tensor, values of a sample."""
    num_read: int = 0
    """Requests with it that no template has read."""

    def inputs(self, sign_S: U64, float_F: F32) -> InferenceInputs:
        """The samples with the signs of all tables, and the numbers of all dense slots, one after another."""
        signs, at = [], 0
        for table in self.tables:
            end = at + int(table.offset_SB1[-1, -1])
            signs.append(_table_signs(table, sign_S[at:end]))
            at = end
        dense, at = {}, 0
        for name, _, size in self.dense:
            end = at + self.num_samples * size
            dense[name] = float_F[at:end].reshape(self.num_samples, size)
            at = end
        return InferenceInputs(self.num_samples, signs, dense)


class KnownRequests:
    """Reads requests to the model of a reader. Any thread."""

    def __init__(self, reader: RequestReader) -> None:
        self.reader, self._layouts = reader, dict[Any, _Layout]()
        self._templates: tuple[tuple[RequestTemplate, _Layout], ...] = ()
        """The newest first."""
        self._num_parsed = self._learnt_at = 0

    def read(self, head: bytes, raw: bytes, again: Callable[[], object]) -> KnownRequest | None:
        """The request in a body's JSON and raw bytes; None for one that is not read here."""
        if not raw:
            for template, layout in self._templates:
                if (numbers := template.read(head)) is not None:
                    return KnownRequest(self.reader, layout.inputs(*numbers), layout.cost, {}, again)
        return self._parsed(head, raw, again)

    def _parsed(self, head: bytes, raw: bytes, again: Callable[[], object]) -> KnownRequest | None:
        try:
            request = _DECODER.decode(head)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        key = tuple(map(_LAYOUT, request.inputs))
        layout = self._layouts.get(key)
        if layout is None and (layout := self._learnt(key)) is None:
            return None
        tensors = list(map(_DATA, request.inputs))
        try:
            inputs = _of_raw(layout, tensors, raw) if layout.dtypes else _of_lists(layout, tensors, raw)
        except (TypeError, OverflowError, UnicodeEncodeError, InvalidInference):
            return None
        if inputs is None:
            return None
        rest: dict[str, Any] = {}
        if request.id is not None:
            rest["id"] = request.id
        if request.parameters is not None:
            rest["parameters"] = {"binary_data_output": request.parameters.binary_data_output}
        if not rest and not layout.dtypes and len(head) <= MAX_BYTES:
            self._learn_template(head, layout, inputs)
        return KnownRequest(self.reader, inputs, layout.cost, rest, again)

    def _learn_template(self, head: bytes, layout: _Layout, inputs: InferenceInputs) -> None:
        """Make a template of a request, ever more rarely of those of one layout that differ in more than numbers."""
        layout.num_read += 1
        self._num_parsed += 1
        is_due = layout.num_read > 1 and layout.num_read & (layout.num_read - 1) == 0
        if len(self._templates) == MAX_TEMPLATES and self._num_parsed - self._learnt_at < LEARNT_EVERY:
            return
        if not is_due or b"\\" in head or any(each.any_text for each in layout.tables):
            return
        self._learnt_at = self._num_parsed
        signs = [place for table in layout.tables for place in table.places]
        to_H = places_of(layout.sizes, signs, [place for _, place, _ in layout.dense])
        sign_S = np.concatenate([_NO_SIGNS, *(each.sign_N for each in inputs.signs)])
        float_F = np.concatenate([_NO_FLOATS, *(inputs.dense[name].reshape(-1) for name, _, _ in layout.dense)])
        try:
            template = RequestTemplate(head, to_H, len(sign_S), len(float_F))
        except ValueError:
            return
        found = template.read(head)
        if found is not None and found[0].tobytes() == sign_S.tobytes() and found[1].tobytes() == float_F.tobytes():
            self._templates = ((template, layout), *self._templates[: MAX_TEMPLATES - 1])

    def _learnt(self, key: tuple[tuple[Any, ...], ...]) -> _Layout | None:
        found = _layout(self.reader, key)
        if found is not None and sum(table.offset_SB1.size for table in found.tables) <= MAX_OFFSETS:
            if len(self._layouts) >= MAX_LAYOUTS:
                self._layouts = {}
            self._layouts[key] = found
        return found


def _layout(reader: RequestReader, key: tuple[tuple[Any, ...], ...]) -> _Layout | None:
    """The layout of requests with these tensors; None where they are not read here."""
    model, places = reader.model, {each[0]: place for place, each in enumerate(key)}
    wanted = {slot["name"]: slot for slot in model.slots}
    if places.keys() != wanted.keys() or len(places) != len(key):
        return None
    shapes = [each[2] for each in key]
    if not (num_samples := shapes[places[next(iter(wanted))]][:1]):
        return None
    for shape in shapes:
        if shape[:1] != num_samples or len(shape) > MAX_DIMENSIONS or not 0 <= min(shape) <= max(shape) <= MAX_VALUES:
            return None
    sizes = [math.prod(shape) for shape in shapes]
    (number,) = num_samples
    if not 0 < number <= reader.max_batch or max(sizes) > MAX_VALUES:
        return None
    if len(model.outputs) * number > MAX_VALUES:
        return None
    if any(sizes[places[name]] != number * size for name, size in model.dense.items()):
        return None
    raw = [None if each[3] is None else each[3].binary_data_size for each in key]
    floats: tuple[str, ...] = FLOATS
    texts: tuple[str, ...] = (TEXT,)
    dtypes: tuple[np.dtype[Any], ...] = ()
    if any(size is not None for size in raw):
        floats, texts = ("FP32",), ()  # others in raw bytes are rare
        dtypes = tuple(DTYPES.get(each[1], np.dtype("?")) for each in key)
        if raw != [size * dtype.itemsize for size, dtype in zip(sizes, dtypes, strict=True)]:
            return None
    for name, slot in wanted.items():
        known = floats if slot["kind"] != "sparse" else texts if slot["values"] == "string" else SIGNS
        if key[places[name]][1] not in known:
            return None
    tables = tuple(_table(reader, table, places, sizes, number) for table in model.tables)
    dense = tuple((name, places[name], size) for name, size in model.dense.items())
    return _Layout(number, reader.cost_of(number), sizes, dtypes, tables, dense)


def _table(
    reader: RequestReader, table: SlotLayout, places: dict[str, int], sizes: Sequence[int], num_samples: int
) -> _TableLayout:
    found = tuple(places[slot["name"]] for slot in table.slots)
    counts = [sizes[place] // num_samples for place in found]
    begins = accumulate((sizes[place] for place in found), initial=0)
    step_B1 = np.arange(num_samples + 1, dtype=np.int64)
    offsets = [begin + count * step_B1 for begin, count in zip(begins, counts, strict=False)]
    offset_SB1 = np.array(offsets, np.int64).reshape(len(found), num_samples + 1)
    are_texts = tuple(slot["values"] == "string" for slot in table.slots)
    return _TableLayout(found, are_texts, any(are_texts), offset_SB1, reader.is_weighted(table.name))


def _of_lists(layout: _Layout, tensors: list[Any], raw: bytes) -> InferenceInputs | None:
    """The samples in lists of values. Raises TypeError, OverflowError, UnicodeEncodeError, InvalidInference."""
    if raw:
        return None
    if list(map(len, tensors)) != layout.sizes or any(type(each[0]) is list for each in tensors if each):
        tensors = [_flat(each) for each in tensors]
        if list(map(len, tensors)) != layout.sizes:
            return None
    signs = []
    for table in layout.tables:
        parts = [tensors[place] for place in table.places]
        if table.any_text:
            parts = [_signs_of(*each) for each in zip(parts, table.are_texts, strict=True)]
        numbers = list(chain.from_iterable(parts))
        if not set(map(type, numbers)) <= {int}:
            return None
        signs.append(_table_signs(table, np.array(numbers, np.uint64)))
    dense = {}
    for name, place, size in layout.dense:
        values = tensors[place]
        if not set(map(type, values)) <= {int, float}:
            return None
        with np.errstate(over="ignore"):
            array = np.array(values, np.float32)
        if not np.isfinite(array).all():
            return None
        dense[name] = array.reshape(layout.num_samples, size)
    return InferenceInputs(layout.num_samples, signs, dense)


def _of_raw(layout: _Layout, tensors: list[Any], raw: bytes) -> InferenceInputs | None:
    """The samples in raw bytes."""
    if any(each is not None for each in tensors):
        return None
    arrays, at = list[NDArray[Any]](), 0
    if len(raw) != sum(size * dtype.itemsize for size, dtype in zip(layout.sizes, layout.dtypes, strict=True)):
        return None
    for size, dtype in zip(layout.sizes, layout.dtypes, strict=True):
        arrays.append(np.frombuffer(raw, dtype, size, at))
        at += size * dtype.itemsize
    signs = []
    for table in layout.tables:
        parts = [arrays[place] for place in table.places]
        if any(part.dtype.kind == "i" and part.size and part.min() < 0 for part in parts):
            return None
        sign_N = np.concatenate([_NO_SIGNS, *(part.view(np.uint64) for part in parts)])
        signs.append(_table_signs(table, sign_N))
    dense: dict[str, F32] = {}
    for name, place, size in layout.dense:
        if not np.isfinite(arrays[place]).all():
            return None
        dense[name] = arrays[place].astype(np.float32).reshape(layout.num_samples, size)
    return InferenceInputs(layout.num_samples, signs, dense)


def _table_signs(table: _TableLayout, sign_N: NDArray[np.uint64]) -> TableSigns:
    weight_N = np.ones(len(sign_N), np.float32) if table.is_weighted and len(sign_N) else NO_WEIGHTS
    return TableSigns(sign_N, table.offset_SB1, weight_N)


def _flat(values: list[Any]) -> list[Any]:
    """Values without their nesting, which is one deep. Raises TypeError where only some are nested."""
    if values and type(values[0]) is list:
        if not set(map(type, values)) <= {list}:
            raise TypeError("lists and values")
        return list(chain.from_iterable(values))
    return values


def _signs_of(values: list[Any], are_texts: bool) -> list[Any]:
    """Signs, hashed where the values are texts. Raises TypeError, UnicodeEncodeError, InvalidInference."""
    if not are_texts:
        return values
    if not set(map(type, values)) <= {str}:
        raise TypeError("texts and others")
    return hashed(values)
