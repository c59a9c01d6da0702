"""Tensors of the Open Inference Protocol: datatypes, values of a request, raw bytes in both directions.

Raw numbers are little-endian, one after another; a raw text is its length in four bytes, then its UTF-8. Sources:
"Tensor Data Types" in the protocol's inference_rest.md, and its binary tensor data extension.
"""

import struct
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import BadInput
from headrace.trainer.replica.updates import F32

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
