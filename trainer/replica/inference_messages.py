"""Messages of the Open Inference Protocol (version 2, REST): parses requests into inputs of a model, formats answers.

The inputs of a request are the model's slots. A sparse slot "user" is a tensor "user" of B samples: [B, n] with n signs
each, or [B]; or ragged, with all signs in a row and the number of each sample's signs in "user.lengths", [B]. Signs are
UINT64 or INT64, texts are BYTES. "user.weight" is FP32 of the same length, for a weighted slot; without it all weights
are 1. A dense slot is FP32, [B, size]. Data may be nested or flat. Source: the protocol's inference_rest.md.

Raw numbers are little-endian, one after another; a raw text is its length in four bytes, then its UTF-8. Sources:
"Tensor Data Types" in the same document, and the protocol's binary tensor data extension.

Slots with histories or counters may be left out: the served version fills them. A model with counters takes
"event_time", [B] unix seconds, at which their windows end; without it, they end now.

For a job with pipe.kind = "columns" a request may have "events" in place of "inputs": a list of events of the stream,
as objects or as texts; "event_time" beside it is a list of their unix seconds. The answer has one more output, "event":
the number of each sample's event.

Shapes: B samples, N signs of one table.
"""

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.formats.arrow_columns import hash_texts
from headrace.errors import BadInput
from headrace.trainer.replica.serving_model import ServingModel, golden_inputs
from headrace.trainer.replica.updates import F32, U64
from headrace.trainer.serving.slot_layout import F64, I64, NO_WEIGHTS, InferenceInputs, SlotLayout, TableSigns
from headrace.validation import nearest

# -- tensors: datatypes, values of a request, raw bytes in both directions

INTS = ("UINT64", "INT64", "UINT32", "INT32", "UINT16", "INT16", "UINT8", "INT8")
FLOATS = ("FP32", "FP64", "FP16", "BF16")
TEXT, BOOL = "BYTES", "BOOL"
NUMBERS = (*FLOATS, *INTS, BOOL)
DTYPES: dict[str, np.dtype[Any]] = {
    **{kind: np.dtype(kind.lower()).newbyteorder("<") for kind in INTS},
    **{"FP16": np.dtype("<f2"), "FP32": np.dtype("<f4"), "FP64": np.dtype("<f8"), "BF16": np.dtype("<u2")},
    BOOL: np.dtype("?"),
}
"""Raw numbers of each datatype; of BF16, the upper half of a float32."""
MAX_VALUES = 1 << 22
"""Most numbers and texts of one tensor, and numbers of one answer; more are refused."""
MAX_DIMENSIONS = 8
"""Most dimensions of a tensor: the product of many large sizes takes long to compute."""
SHARED_MEMORY, CLASSIFICATION = "shared_memory_region", "classification"
"""Parameters of tensors that are refused: what they ask for is not served."""


class InvalidInference(BadInput):
    """A request that cannot be answered; the message is for its sender."""


class RequestTensor:
    """One tensor of a request, validated. Its `data` are a list, or raw bytes."""

    __slots__ = ("data", "kind", "name", "shape")

    def __init__(self, content: object) -> None:
        try:
            self.name, self.kind, self.shape = content["name"], content["datatype"], content["shape"]  # type: ignore[index]
            if SHARED_MEMORY in parameters_of(content):
                raise InvalidInference(f"{self.name!r:.100}: shared memory is not read here; send the data itself")
            data = content["data"]  # type: ignore[index]
        except (TypeError, KeyError) as error:
            raise InvalidInference(f"an input needs name, datatype, shape and data; {error} is missing") from None
        if type(data) is bytes:
            data = _values_of(self.name, self.kind, data)
        if type(self.name) is not str or type(self.shape) is not list or type(data) is not list:
            raise InvalidInference("an input's name must be a text, its shape and data must be lists")
        while data and type(data[0]) is list:
            if not set(map(type, data)) <= {list}:
                raise InvalidInference(f"{self.name}: data mixes lists and values")
            data = list(chain.from_iterable(data))
        self.data: list[Any] = data
        size = 1
        if len(self.shape) > MAX_DIMENSIONS:
            raise InvalidInference(f"{self.name}: a shape of {len(self.shape)} sizes; at most {MAX_DIMENSIONS}")
        for each in self.shape:
            if type(each) is not int or not 0 <= each <= MAX_VALUES:
                raise InvalidInference(f"{self.name}: shape holds {each!r:.100}, which is not a size")
            size *= each
        if size != len(data) or not self.shape:
            raise InvalidInference(f"{self.name}: data has {len(data)} values, the shape {self.shape} has {size}")
        if size > MAX_VALUES:
            raise InvalidInference(f"{self.name}: {size} values; at most {MAX_VALUES}")

    def typed(self, *kinds: str) -> "RequestTensor":
        """Return itself. Raises InvalidInference where its values have none of these types."""
        if self.kind not in kinds:
            raise InvalidInference(f"{self.name}: is {self.kind}, and must be {' or '.join(kinds)}")
        wanted = {str} if self.kind == TEXT else {bool} if self.kind == BOOL else {int}
        if not set(map(type, self.data)) <= (wanted | {float} if self.kind in FLOATS else wanted):
            raise InvalidInference(f"{self.name}: data has values that are not {self.kind}")
        if self.kind in INTS and DTYPES[self.kind].itemsize < 8 and self.data:
            bounds = np.iinfo(DTYPES[self.kind])
            if min(self.data) < bounds.min or max(self.data) > bounds.max:
                raise InvalidInference(f"{self.name}: a number is not from {bounds.min} to {bounds.max} ({self.kind})")
        return self

    def floats(self) -> F32:
        """The values as float32. Raises InvalidInference."""
        try:
            with np.errstate(over="ignore"):
                found = np.array(self.data, np.float32)
        except OverflowError:
            raise InvalidInference(f"{self.name}: a number is too large") from None
        if not np.isfinite(found).all():
            raise InvalidInference(f"{self.name}: a number is not finite")
        return found


def parameters_of(content: object) -> Mapping[str, Any]:
    """The parameters of a request, an input or an output. Raises InvalidInference."""
    found = content.get("parameters") if isinstance(content, dict) else None
    if found is not None and not isinstance(found, dict):
        raise InvalidInference('"parameters" must be an object')
    return found or {}


def _values_of(name: object, kind: object, raw: bytes) -> list[Any]:
    """The values of a raw tensor. Raises InvalidInference."""
    if kind == TEXT:
        return _texts_of(name, raw)
    if not isinstance(kind, str) or kind not in DTYPES:
        raise InvalidInference(f"{name!r:.100}: there is no datatype {kind!r:.100}")
    dtype = DTYPES[kind]
    if len(raw) % dtype.itemsize:
        raise InvalidInference(f"{name!r:.100}: {len(raw)} bytes are no whole number of {kind}")
    if len(raw) // dtype.itemsize > MAX_VALUES:
        raise InvalidInference(f"{name!r:.100}: {len(raw) // dtype.itemsize} values; at most {MAX_VALUES}")
    if kind == BOOL:
        return list(map(bool, raw))
    values: NDArray[Any] = np.frombuffer(raw, dtype)
    if kind == "BF16":
        values = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    found: list[Any] = values.tolist()
    return found


def _texts_of(name: object, raw: bytes) -> list[str]:
    found, place, end = list[bytes](), 0, len(raw)
    try:
        while place < end:
            (size,) = struct.unpack_from("<I", raw, place)
            place += 4 + size
            if place > end:
                raise InvalidInference(f"{name!r:.100}: its last text should have {size} bytes, which are not there")
            found.append(raw[place - size : place])
    except struct.error:
        raise InvalidInference(f"{name!r:.100}: its bytes end within the length of a text") from None
    return texts(name, found)


def texts(name: object, contents: Iterable[bytes]) -> list[str]:
    """The texts of a tensor from their UTF-8. Raises InvalidInference."""
    try:
        return [each.decode() for each in contents]
    except UnicodeDecodeError:
        raise InvalidInference(f"{name!r:.100}: a text is not UTF-8") from None


def kind_of(output: NDArray[Any]) -> str:
    """The datatype of an output."""
    return "INT64" if output.dtype == np.int64 else "FP32"


def raw_of(output: NDArray[Any]) -> bytes:
    """The raw bytes of an output."""
    return output.astype(DTYPES[kind_of(output)], copy=False).tobytes()


# -- requests and answers

Json = Mapping[str, Any]
LENGTHS, WEIGHT = ".lengths", ".weight"
EVENT = "event"
"""The output with the number of each sample's event, for a request with raw events."""
TIME = "event_time"
"""The optional input with the times of samples, in unix seconds, for a model with counters; without it, now."""
MAX_ACTIVATIONS = 1 << 28
"""Most numbers in one layer of the network for all samples of a request: 1 GiB. A softmax over a million items takes
268 samples at a time, whatever `max_batch` is."""
WEIGHTS_PER_VALUE = 1000
"""Weights of the network that cost one sample as much time as one number of JSON."""


@dataclass(frozen=True, slots=True)
class InferenceResult:
    """The outputs that a request asked for, in its order."""

    version: str
    """Name of the version that predicted them."""
    outputs: Mapping[str, NDArray[Any]]
    """float32, all finite; of raw events also int64, the event of each sample."""


def is_timed(model: ServingModel) -> bool:
    """Whether requests to it may have the times of samples."""
    return any(model.schema.counters) and all(slot["name"] != TIME for slot in model.slots)


class RequestReader:
    """Parses requests to one model."""

    def __init__(self, model: ServingModel, max_batch: int) -> None:
        self.model = model
        self.max_batch = min(max_batch, max(1, MAX_ACTIVATIONS // model.graph.widest))
        self._sparse = {slot["name"]: slot for slot in model.slots if slot["kind"] == "sparse"}
        self._known = set(self._sparse) | {name + LENGTHS for name in self._sparse} | set(model.dense)
        self._known |= {name + WEIGHT for name, slot in self._sparse.items() if slot["weighted"]}
        self._is_timed = is_timed(model)
        self._known |= {TIME} if self._is_timed else set()
        self._values_each = _values_each(model)
        self._any_weighted = {each.name: any(slot["weighted"] for slot in each.slots) for each in model.tables}

    def inputs(self, request: object) -> InferenceInputs:
        """The samples of a request. Raises InvalidInference."""
        if isinstance(request, dict) and "events" in request:
            return self._of_events(request)
        content = request.get("inputs") if isinstance(request, dict) else None
        if type(content) is not list or not content:
            raise InvalidInference('a request must be an object with "inputs", a list of tensors')
        tensors: dict[str, RequestTensor] = {}
        for each in content:
            tensor = RequestTensor(each)
            if tensor.name not in self._known:
                known = nearest(tensor.name, sorted(self._known))
                raise InvalidInference(f"there is no input {tensor.name!r:.100}; {known}")
            if tensor.name in tensors:
                raise InvalidInference(f"input {tensor.name!r} occurs twice")
            tensors[tensor.name] = tensor
        num_samples = self._num_samples(tensors)
        signs = [self._signs(table, tensors, num_samples) for table in self.model.tables]
        dense, time_s_B = self._dense(tensors, num_samples), self._times(tensors, num_samples)
        left_out = tuple(name for name in self.model.memories if name not in tensors)
        return InferenceInputs(num_samples, signs, dense, left_out=left_out, time_s_B=time_s_B)

    def _of_events(self, request: Json) -> InferenceInputs:
        """The samples of raw events."""
        if type(events := request["events"]) is list and len(events) > self.max_batch:
            raise InvalidInference(f"{len(events)} events in one request; send 1 to {self.max_batch}")
        found = [*islice(self.batches_of_events(request), 2)]
        if len(found) != 1:
            num_samples = f"more than {self.max_batch}" if found else "no"
            raise InvalidInference(f"{num_samples} samples in {len(events)} events; send 1 to {self.max_batch}")
        return found[0]

    def batches_of_events(self, request: Json) -> Iterator[InferenceInputs]:
        """The samples of any number of raw events, in batches. Raises InvalidInference."""
        features, events = self.model.features, request["events"]
        if features is None:
            raise InvalidInference(
                'this model has no features of raw events: its job has not pipe.kind = "columns"; send "inputs"'
            )
        if "inputs" in request or type(events) is not list or not events:
            raise InvalidInference('a request has either "inputs", or "events", a list of events')
        try:
            texts = [each.encode() if type(each) is str else json.dumps(each).encode() for each in events]
            samples, event_B = features.samples(texts)
        except (BadInput, UnicodeEncodeError) as error:
            raise InvalidInference(str(error)) from None
        time_s_B = self._event_times(request, len(events), event_B)
        for begin in range(0, len(samples), self.max_batch):
            of = slice(begin, begin + self.max_batch)
            inputs = golden_inputs(self.model, samples.slice(begin, self.max_batch))
            times = None if time_s_B is None else time_s_B[of]
            yield replace(inputs, events=event_B[of].tolist(), time_s_B=times)

    def _event_times(self, request: Json, num_events: int, event_B: I64) -> F64 | None:
        """The times of the samples of raw events, if the request has those of its events."""
        if not self._is_timed or (times := request.get(TIME)) is None:
            return None
        if type(times) is not list or len(times) != num_events or not set(map(type, times)) <= {int, float}:
            raise InvalidInference(f'"{TIME}" must be a list of {num_events} numbers, one for each event')
        return _seconds(times)[event_B]

    def outputs(self, request: Json, num_samples: int) -> Sequence[str]:
        """The outputs that a request of `num_samples` asks for; all where it names none. Raises InvalidInference."""
        content = request.get("outputs")
        names = _names(content) if content else self.model.outputs
        known = self.model.graph.outputs
        if unknown := [name for name in names if name not in known]:
            raise InvalidInference(f"there is no output {unknown[0]!r:.100}; {nearest(unknown[0], known)}")
        if len(names) > len(set(names)):
            twice = next(name for at, name in enumerate(names) if name in names[:at])
            raise InvalidInference(f"output {twice!r} is named twice; name each once")
        if len(names) * num_samples > MAX_VALUES:
            asked = f"{len(names)} outputs of {num_samples} samples"
            raise InvalidInference(f"{asked} are more than {MAX_VALUES} numbers; send fewer samples per request")
        return names

    def cost(self, request: object) -> int:
        """Roughly how many numbers are read, computed and written for a request; 0 for a malformed one."""
        if isinstance(request, dict) and type(events := request.get("events")) is list:
            exploded = self.model.features is not None and self.model.features.pipe.explode is not None
            return (self.max_batch if exploded else min(len(events), self.max_batch)) * self._values_each
        try:
            sizes = [each["shape"][0] for each in request["inputs"]]  # type: ignore[index]
            return int(min(max(sizes), self.max_batch)) * self._values_each
        except (TypeError, KeyError, IndexError, ValueError, OverflowError):  # OverflowError for -Infinity
            return 0

    def cost_of(self, num_samples: int) -> int:
        """Likewise for a request of so many samples."""
        return num_samples * self._values_each

    def is_weighted(self, table: str) -> bool:
        """Whether a slot of this table has weights."""
        return self._any_weighted[table]

    def _num_samples(self, tensors: Mapping[str, RequestTensor]) -> int:
        for name in (*self._sparse, *self.model.dense):
            if name not in tensors and name not in self.model.memories:
                raise InvalidInference(f"input {name!r} is missing: {self._wanted(name)}")
        first = next(name for name in (*self._sparse, *self.model.dense) if name in tensors)
        num_samples = int(tensors.get(first + LENGTHS, tensors[first]).shape[0])
        if not 0 < num_samples <= self.max_batch:
            raise InvalidInference(f"{num_samples} samples in one request; send 1 to {self.max_batch}")
        return num_samples

    def _wanted(self, name: str) -> str:
        """The rest of the refusal of a request without this slot: its shape."""
        if name in self._sparse:
            return "a sample without signs there has the shape [1, 0]"
        return f"a dense slot needs numbers of the shape [samples, {self.model.dense[name]}]"

    def _dense(self, tensors: Mapping[str, RequestTensor], num_samples: int) -> dict[str, F32]:
        found = {}
        for name, size in self.model.dense.items():
            if name not in tensors:
                continue
            tensor = tensors[name].typed(*NUMBERS)
            if len(tensor.data) != num_samples * size or tensor.shape[0] != num_samples:
                raise InvalidInference(f"{name}: has the shape {tensor.shape}, but must have [{num_samples}, {size}]")
            found[name] = tensor.floats().reshape(num_samples, size)
        return found

    def _times(self, tensors: Mapping[str, RequestTensor], num_samples: int) -> F64 | None:
        """The times of samples, if the request has them."""
        if not self._is_timed or (tensor := tensors.get(TIME)) is None:
            return None
        if len(tensor.typed(*NUMBERS).data) != num_samples:
            raise InvalidInference(f"{TIME}: has {len(tensor.data)} values for {num_samples} samples")
        return _seconds(tensor.data)

    def _signs(self, table: SlotLayout, tensors: Mapping[str, RequestTensor], num_samples: int) -> TableSigns:
        """The signs of one table's slots."""
        numbers: list[int] = []
        offsets: list[Iterable[int]] = []
        weights: list[float] = []
        for slot in table.slots:
            name, begin = slot["name"], len(numbers)
            if (tensor := tensors.get(name)) is None:  # it is filled later
                offsets.append([begin] * (num_samples + 1))
                continue
            if slot["values"] == "string":
                numbers += hashed(tensor.typed(TEXT).data)
            else:
                numbers += tensor.typed(*INTS).data
            offsets.append(_offsets(tensor, tensors.get(name + LENGTHS), num_samples, begin))
            if self._any_weighted[table.name]:
                weights += _weights(tensors.get(name + WEIGHT), tensor)
        try:
            sign_N = np.array(numbers, np.uint64)
        except OverflowError:
            raise InvalidInference(f"{_out_of_range(table, tensors)}: a sign is not from 0 to 2**64 - 1") from None
        weight_N = np.array(weights, np.float32) if weights else NO_WEIGHTS
        return TableSigns(sign_N, np.array(offsets, np.int64), weight_N)


def _names(content: object) -> list[str]:
    """The names in a request's list of outputs. Raises InvalidInference."""
    try:
        names = [str(each["name"]) for each in content]  # type: ignore[attr-defined]
    except (TypeError, KeyError):
        raise InvalidInference('"outputs" must be a list of objects with a name') from None
    for each, name in zip(content, names, strict=True):  # type: ignore[call-overload]
        if not {SHARED_MEMORY, CLASSIFICATION}.isdisjoint(parameters_of(each)):
            raise InvalidInference(f"output {name!r:.100}: neither shared memory nor classification is served")
    return names


def _seconds(times: Sequence[float]) -> F64:
    """Times as float64. Raises InvalidInference."""
    try:
        return np.array(times, np.float64)
    except OverflowError:
        raise InvalidInference(f"{TIME}: a number is too large") from None


def _values_each(model: ServingModel) -> int:
    """Rough cost of a sample in numbers of JSON, with the work of tables and network in the same unit."""
    of_tables = sum(table.num_floats + table.num_marks for table in model.tables)
    of_json = len(model.slots) + sum(model.dense.values()) + len(model.outputs)
    return of_json + (of_tables + model.graph.num_weights) // WEIGHTS_PER_VALUE


def _offsets(tensor: RequestTensor, lengths: RequestTensor | None, num_samples: int, begin: int) -> Iterable[int]:
    """(B + 1,) where each sample's signs begin, and where the last one's end."""
    if lengths is not None:
        counts = lengths.typed(*INTS).data
        if len(counts) != num_samples or min(counts, default=0) < 0 or sum(counts) != len(tensor.data):
            raise InvalidInference(
                f"{lengths.name}: must have {num_samples} numbers with the sum {len(tensor.data)}, the number of values"
            )
        return list(accumulate(counts, initial=begin))
    if tensor.shape[0] != num_samples:
        raise InvalidInference(
            f"{tensor.name}: has the shape {tensor.shape}, but other inputs have {num_samples} samples"
        )
    count = len(tensor.data) // num_samples
    return range(begin, begin + len(tensor.data) + 1, count) if count else [begin] * (num_samples + 1)


def _weights(tensor: RequestTensor | None, signs: RequestTensor) -> list[float]:
    if tensor is None:
        return [1.0] * len(signs.data)
    if len(tensor.data) != len(signs.data):
        raise InvalidInference(f"{tensor.name}: {len(tensor.data)} weights for {len(signs.data)} signs")
    tensor.typed(*NUMBERS).floats()
    return tensor.data


def hashed(texts: Sequence[str]) -> list[int]:
    """Signs of texts."""
    try:
        encoded = [text.encode() for text in texts]
    except UnicodeEncodeError:
        raise InvalidInference("a text has half a surrogate pair, which is not UTF-8") from None
    offset_N1 = np.fromiter(accumulate(map(len, encoded), initial=0), np.int64, len(encoded) + 1)
    out_N: U64 = np.empty(len(encoded), np.uint64)
    hash_texts(np.frombuffer(b"".join(encoded), np.uint8), offset_N1, out_N)
    signs: list[int] = out_N.tolist()
    return signs


def _out_of_range(table: SlotLayout, tensors: Mapping[str, RequestTensor]) -> str:
    for slot in table.slots:
        data = tensors[slot["name"]].data if slot["name"] in tensors else []
        if any(not 0 <= each < 1 << 64 for each in data if type(each) is int):
            return str(slot["name"])
    return table.name


def checked_outputs(
    found: Mapping[str, F32], wanted: Sequence[str], events: Sequence[int] | None = None
) -> dict[str, NDArray[Any]]:
    """The wanted outputs; `events`: the event of each sample. Raises InvalidInference for too many numbers, BadInput
    where a prediction is not finite."""
    if (size := sum(found[output].size for output in wanted)) > MAX_VALUES:
        raise InvalidInference(
            f"the outputs have {size} numbers, more than {MAX_VALUES}; send fewer samples per request"
        )
    outputs: dict[str, NDArray[Any]] = {}
    for output in wanted:
        outputs[output] = found[output]
        if not np.isfinite(found[output]).all():
            raise BadInput(f"output {output!r} is not finite for these inputs")
    if events is not None:
        outputs[EVENT] = np.array(events, np.int64)
    return outputs


def attach_raw(request: object, raw: bytes) -> None:
    """Give the inputs of a request their raw bytes, which follow its JSON in the order of the inputs.

    Raises InvalidInference.
    """
    inputs, place = request.get("inputs") if isinstance(request, dict) else None, 0
    for each in inputs if isinstance(inputs, list) else ():
        size = parameters_of(each).get("binary_data_size")
        if size is None:
            continue
        if type(size) is not int or not 0 <= size <= len(raw) - place or "data" in each:
            raise InvalidInference(
                f"an input has {size!r:.100} bytes of binary_data_size, where {len(raw) - place} follow the JSON head; "
                "send its data there, not as data, and the length of the head as Inference-Header-Content-Length"
            )
        each["data"] = raw[place : place + size]
        place += size
    if place < len(raw):
        raise InvalidInference(f"{len(raw) - place} bytes follow the tensors that the JSON head names")


def format_answer(name: str, request: Json, result: InferenceResult) -> tuple[bytes, bytes]:
    """The JSON of the answer to a request, and the raw bytes that follow it. Raises InvalidInference."""
    is_raw, raw, outputs = _asks_for_raw(request), list[bytes](), list[str]()
    for output, value in result.outputs.items():
        told = f'{{"name": {json.dumps(output)}, "datatype": "{kind_of(value)}", "shape": {list(value.shape)}, '
        if is_raw.get(output, is_raw[""]):
            raw.append(raw_of(value))
            told += f'"parameters": {{"binary_data_size": {len(raw[-1])}}}}}'
        else:
            told += f'"data": {value.reshape(-1).tolist()}}}'  # finite numbers are written as in JSON
        outputs.append(told)
    named = f'{{"model_name": {json.dumps(name)}, "model_version": {json.dumps(result.version)}, '
    of_request = f', "id": {json.dumps(request["id"])}' if type(request.get("id")) is str else ""
    return f'{named}"outputs": [{", ".join(outputs)}]{of_request}}}'.encode(), b"".join(raw)


def _asks_for_raw(request: Json) -> dict[str, bool]:
    """Whether each output of a request is answered as raw bytes; under "", those that it does not name."""
    found = {"": parameters_of(request).get("binary_data_output", False) is True}
    for each in request.get("outputs") or ():
        if (choice := parameters_of(each).get("binary_data")) is not None:
            found[each["name"]] = choice is True
    return found
