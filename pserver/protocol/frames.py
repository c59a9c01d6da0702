"""Messages of the data plane: the three calls of every step, and their replies, as frames with arrays.

A message is a header and one frame for each array, little-endian: of each table a call announces keys (uint64) and
groups (uint16), pushes gradients (U, D), shows and clicks, or is answered with rows (U, D), all float32; gradients and
rows may travel in fewer bits (pserver.protocol.wire). Arrays are not copied: a sent one must not change until the reply
is there, and a received one is a read-only view of its frame. On one machine the arrays may lie beside the message: its
one frame then has their places in headrace.rpc.data_sockets.
"""

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, assert_never

import numpy as np
from numpy.typing import DTypeLike, NDArray

from headrace.pserver.config import Wire
from headrace.pserver.errors import InvalidShardCall
from headrace.pserver.protocol.messages import FORMAT
from headrace.pserver.protocol.parts import WHOLE, Part
from headrace.pserver.protocol.shards import F32, Gradients, Keys
from headrace.pserver.protocol.wire import FLOATS, NewArray, TableWire, decode, encode, new_array
from headrace.rpc.data_sockets import SharedMemory

_REQUEST = struct.Struct("<HBBIIQIIQQQdIII")
_REPLY = struct.Struct("<HBBQ")
_PART = struct.Struct("<II")
_LEARN, _BATCH, _FOLLOWING, _BESIDE, _SPLIT = 1, 2, 4, 8, 16
MAX_TABLES = 1024
"""Most parts of one message."""


class DataCall(IntEnum):
    """The calls of the data plane."""

    ANNOUNCE = 1
    """Keys of a later batch: rows are found or reserved."""
    PULL = 2
    """Rows of an announced batch as they are now."""
    EXCHANGE = 3
    """Push of a step, then rows of the next batch."""
    EARLY = 4
    """Before the push of a step: the rows of the next batch that no rank pushes in it."""


_CALLS = {call.value: call for call in DataCall}


@dataclass(frozen=True, slots=True)
class DataRequest:
    """One call, without its arrays."""

    call: DataCall
    generation: int
    rank: int
    request: int
    """Number of the call at its caller; a repeat has the same one."""
    left_s: float
    """Time left to answer."""
    pass_number: int = 0
    step: int = 0
    batch: int | None = None
    """The batch announced, pulled or learnt; in an exchange None: this rank has no further batches. Ascending for each
    rank: a push releases all before it, a pull those that are predicted only, or pushed."""
    learn: bool = False
    following: int | None = None
    """In an exchange: the later batch whose rows are requested."""
    batch_samples: int = 0
    """In an exchange: samples of all ranks."""
    parts: tuple[tuple[str, int], ...] = ()
    """Tables with arrays, and their number of keys."""
    beside: bool = False
    """Whether the arrays lie beside the message, and those of the reply may."""
    part: Part = WHOLE
    """In an exchange: the rows of this message."""


@dataclass(frozen=True, slots=True)
class DataReply:
    """The answer to a call."""

    request: int
    status: int = 0
    """0, or the number of a gRPC status code: errors have one meaning on both ways."""
    details: str = ""
    """In words, of an error."""
    parts: tuple[tuple[str, int], ...] = ()
    beside: bool = False
    """Whether the arrays lie beside the message."""


class TableNumbers:
    """The tables of a job under the numbers that messages use."""

    def __init__(self, widths: Mapping[str, int]) -> None:
        """`widths`: floats of a row, by table."""
        self.widths = widths
        self._names = sorted(widths)
        self._numbers = {name: number for number, name in enumerate(self._names)}

    def encode(self, parts: Sequence[tuple[str, int]]) -> bytes:
        """The parts of a message."""
        return b"".join(_PART.pack(self._numbers[name], count) for name, count in parts)

    def decode(self, encoded: memoryview) -> tuple[tuple[str, int], ...]:
        """The inverse of `encode`. Raises InvalidShardCall."""
        if len(encoded) % _PART.size or len(encoded) > MAX_TABLES * _PART.size:
            raise InvalidShardCall(f"a list of tables of {len(encoded)} bytes")
        found = tuple(_PART.iter_unpack(encoded))
        if any(number >= len(self._names) for number, _ in found) or len({number for number, _ in found}) < len(found):
            raise InvalidShardCall(f"tables number {[number for number, _ in found]} of {len(self._names)} tables")
        return tuple((self._names[number], count) for number, count in found)


def encode_request(request: DataRequest, tables: TableNumbers) -> bytes:
    """The header of a call."""
    flags = _LEARN * request.learn | _BATCH * (request.batch is not None) | _FOLLOWING * (request.following is not None)
    flags |= _BESIDE * request.beside | _SPLIT * request.part.is_split
    fixed = _REQUEST.pack(
        FORMAT,
        request.call,
        flags,
        request.generation,
        request.rank,
        request.request,
        request.pass_number,
        request.step,
        request.batch or 0,
        request.following or 0,
        request.batch_samples,
        request.left_s,
        request.part.number,
        request.part.begin,
        request.part.end,
    )
    return fixed + tables.encode(request.parts)


def request_number(header: memoryview) -> int | None:
    """The number of the call that a header begins, if it is long enough to have one."""
    return None if len(header) < _REQUEST.size else int(_REQUEST.unpack_from(header)[5])


def decode_request(header: memoryview, tables: TableNumbers) -> DataRequest:
    """The inverse of `encode_request`. Raises InvalidShardCall."""
    if len(header) < _REQUEST.size:
        raise InvalidShardCall(f"a header of {len(header)} bytes; {_REQUEST.size} or more are expected")
    spoken, call, flags, generation, rank, request, pass_number, step, batch, following, samples, left_s, *part = (
        _REQUEST.unpack_from(header)
    )
    if spoken != FORMAT:
        raise InvalidShardCall(f"the caller speaks format {spoken}, this shard format {FORMAT}")
    if call not in _CALLS or flags > 31 or not 0 <= left_s < math.inf:
        raise InvalidShardCall(f"a header that no caller sends: call {call}, flags {flags}, {left_s} s left")
    return DataRequest(
        _CALLS[call],
        generation,
        rank,
        request,
        left_s,
        pass_number,
        step,
        batch if flags & _BATCH else None,
        bool(flags & _LEARN),
        following if flags & _FOLLOWING else None,
        samples,
        tables.decode(header[_REQUEST.size :]),
        bool(flags & _BESIDE),
        Part(bool(flags & _SPLIT), *part),
    )


def encode_reply(reply: DataReply, tables: TableNumbers) -> bytes:
    """The header of a reply."""
    words = reply.details.encode() if reply.status else tables.encode(reply.parts)
    return _REPLY.pack(FORMAT, reply.status, reply.beside, reply.request) + words


def decode_reply(header: memoryview, tables: TableNumbers) -> DataReply:
    """The inverse of `encode_reply`. Raises InvalidShardCall."""
    if len(header) < _REPLY.size:
        raise InvalidShardCall(f"a reply of {len(header)} bytes")
    spoken, status, beside, request = _REPLY.unpack_from(header)
    if spoken != FORMAT:
        raise InvalidShardCall(f"a reply of format {spoken}, not {FORMAT}")
    rest = header[_REPLY.size :]
    if status:
        return DataReply(request, status, bytes(rest).decode(errors="replace"))
    return DataReply(request, parts=tables.decode(rest), beside=bool(beside))


# --- arrays


def beside(memory: SharedMemory, frames: Sequence[memoryview]) -> list[memoryview]:
    """The arrays beside a message with these frames. Raises InvalidShardCall."""
    if len(frames) != 1:
        raise InvalidShardCall(f"a message of {len(frames)} arrays that lie beside it")
    try:
        return memory.frames_at(frames[0])
    except ValueError as error:
        raise InvalidShardCall(str(error)) from error


class ArrayFrames:
    """Takes arrays from the frames of a message, in order."""

    def __init__(self, frames: Sequence[memoryview]) -> None:
        self._frames: Iterator[memoryview] = iter(frames)
        self._num_frames = len(frames)

    def take(self, dtype: DTypeLike, *shape: int) -> NDArray[Any]:
        """The next array, read-only."""
        frame = next(self._frames, None)
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        found = 0 if frame is None else frame.nbytes
        if frame is None or found != num_bytes:
            raise InvalidShardCall(f"a payload of {found} bytes, {num_bytes} of them expected")
        array = np.frombuffer(frame, dtype) if num_bytes else np.empty(0, dtype)
        if not array.flags.aligned:  # of small messages; kernels need aligned arrays
            array = array.copy()
        array.flags.writeable = False
        return array.reshape(shape)

    def end(self) -> None:
        """Check that there are no more frames."""
        if next(self._frames, None) is not None:
            raise InvalidShardCall(f"a message of {self._num_frames} arrays has more than it says")


def as_frame(array: NDArray[Any]) -> memoryview:
    """The bytes of an array, not copied if it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def num_bytes_of(frames: Sequence[Any]) -> int:
    """The length of a message."""
    return sum(memoryview(frame).nbytes for frame in frames)


def key_frames(tables: Mapping[str, Keys]) -> list[memoryview]:
    """The arrays of an announcement."""
    return [as_frame(array) for keys in tables.values() for array in (keys.keys_U, keys.group_U)]


def keys_from(request: DataRequest, frames: Sequence[memoryview]) -> dict[str, Keys]:
    """Keys by table."""
    arrays = ArrayFrames(frames)
    found = {name: Keys(arrays.take(np.uint64, count), arrays.take(np.uint16, count)) for name, count in request.parts}
    arrays.end()
    return found


NARROW_NONE: Mapping[str, TableWire] = {}
"""All tables travel as float32."""


def gradient_frames(
    tables: Mapping[str, Gradients], wires: Mapping[str, TableWire] = NARROW_NONE, new: NewArray = new_array
) -> list[memoryview]:
    """The arrays of a push; those that are encoded are made by `new`."""
    return [
        as_frame(array)
        for name, push in tables.items()
        for array in (*encode(push.grads_UD, wires.get(name, FLOATS), new), push.show_U, push.click_U)
    ]


def gradients_from(
    request: DataRequest,
    frames: Sequence[memoryview],
    widths: Mapping[str, int],
    wires: Mapping[str, TableWire] = NARROW_NONE,
) -> dict[str, Gradients]:
    """Gradients by table; `widths` are D of each."""
    arrays, found = ArrayFrames(frames), {}
    for name, count in request.parts:
        grads_UD = _decoded(arrays, count, widths[name], wires.get(name, FLOATS))
        found[name] = Gradients(grads_UD, arrays.take(np.float32, count), arrays.take(np.float32, count))
    arrays.end()
    return found


def row_frames(
    rows: Mapping[str, F32], wires: Mapping[str, TableWire] = NARROW_NONE, new: NewArray = new_array
) -> list[memoryview]:
    """The arrays of a reply; those that are encoded are made by `new`."""
    encoded = (encode(rows_UD, wires.get(name, FLOATS), new) for name, rows_UD in rows.items())
    return [as_frame(array) for arrays in encoded for array in arrays]


def early_frames(
    rows: Mapping[str, F32], masks: Mapping[str, NDArray[np.bool_]], wires: Mapping[str, TableWire] = NARROW_NONE
) -> list[memoryview]:
    """The arrays of a reply with early rows: of each table which rows they are, then the rows."""
    return [
        frame
        for name, rows_ED in rows.items()
        for frame in (as_frame(masks[name]), *row_frames({name: rows_ED}, wires))
    ]


def early_from(
    reply: DataReply,
    frames: Sequence[memoryview],
    counts: Mapping[str, int],
    widths: Mapping[str, int],
    wires: Mapping[str, TableWire] = NARROW_NONE,
) -> dict[str, tuple[NDArray[np.bool_], F32]]:
    """By table (U,) which rows of a batch are early, and (E, D) these; `counts` are U of each."""
    arrays, found = ArrayFrames(frames), {}
    for name, num_early in reply.parts:
        mask_U = arrays.take(np.uint8, counts.get(name, 0)) != 0
        if int(mask_U.sum()) != num_early:
            raise InvalidShardCall(f"{num_early} early rows of {name!r}, where {int(mask_U.sum())} are marked")
        found[name] = mask_U, _decoded(arrays, num_early, widths[name], wires.get(name, FLOATS))
    arrays.end()
    return found


def rows_from(
    reply: DataReply,
    frames: Sequence[memoryview],
    widths: Mapping[str, int],
    wires: Mapping[str, TableWire] = NARROW_NONE,
) -> dict[str, F32]:
    """(U, D) rows by table of a reply."""
    arrays = ArrayFrames(frames)
    found = {name: _decoded(arrays, count, widths[name], wires.get(name, FLOATS)) for name, count in reply.parts}
    arrays.end()
    return found


def _decoded(arrays: ArrayFrames, num_rows: int, width: int, wire: TableWire) -> F32:
    """The next rows or gradients of a table."""
    match wire.kind:
        case Wire.FLOAT32:
            taken: tuple[NDArray[Any], ...] = (arrays.take(np.float32, num_rows, width),)
        case Wire.BFLOAT16:
            taken = (arrays.take(np.uint16, num_rows, width),)
        case Wire.INT8:
            scale_U, first_U = arrays.take(np.float32, num_rows), arrays.take(np.float32, num_rows * wire.first_order)
            taken = scale_U, first_U, arrays.take(np.int8, num_rows, width - wire.first_order)
        case _:
            assert_never(wire.kind)
    return decode(taken, wire)
