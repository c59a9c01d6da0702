"""Encodes messages of feed.proto with the arrays they carry, and reads the arrays back.

Arrays are sent as the last field of a message, `payload`, with one copy. They are decoded as read-only views of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from google.protobuf.message import Message
from numpy.typing import DTypeLike, NDArray

from headrace.pserver.errors import InvalidShardCall

PAYLOAD_TAG = bytes([15 << 3 | 2])
"""Protobuf's tag of field 15, which has a length and bytes."""

Sent = TypeVar("Sent", bound=Message, covariant=True)


class WithPayload(Protocol):
    """A message whose last field holds arrays."""

    @property
    def payload(self) -> bytes:
        """The arrays' bytes."""
        ...


@dataclass(frozen=True, slots=True)
class MessageWithArrays(Generic[Sent]):
    """A message with the arrays of its payload, which are not copied yet."""

    message: Sent
    arrays: Sequence[NDArray[Any]]


def encoded(outgoing: Message | MessageWithArrays[Message]) -> bytes:
    """The bytes of a message or a Loaded message. Encoded fields of protobuf may simply be concatenated."""
    if not isinstance(outgoing, MessageWithArrays):
        return outgoing.SerializeToString()
    num_bytes = sum(array.nbytes for array in outgoing.arrays)
    if num_bytes == 0:
        return outgoing.message.SerializeToString()
    arrays = (np.ascontiguousarray(array).data for array in outgoing.arrays if array.size)
    return b"".join([outgoing.message.SerializeToString(), PAYLOAD_TAG, _varint(num_bytes), *arrays])


def _varint(number: int) -> bytes:
    """Protobuf's encoding of a length: seven bits in each byte, lowest bits first."""
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


class Payload:
    """Reads a message's payload from its beginning."""

    def __init__(self, message: WithPayload) -> None:
        """`message` must have a payload."""
        self._bytes, self._at = message.payload, 0

    def take(self, dtype: DTypeLike, *shape: int) -> NDArray[Any]:
        """The next array of the payload."""
        count = int(np.prod(shape))
        num_bytes = count * np.dtype(dtype).itemsize
        if self._at + num_bytes > len(self._bytes):
            raise InvalidShardCall(f"a payload of {len(self._bytes)} bytes ends within an array")
        array = np.frombuffer(self._bytes, dtype, count, self._at) if count else np.empty(0, dtype)
        self._at += num_bytes
        if not array.flags.aligned:  # after an odd number of slot groups; kernels need aligned arrays
            array = array.copy()
            array.flags.writeable = False
        return array.reshape(shape)

    def end(self) -> None:
        """Check that the payload ends here."""
        if self._at != len(self._bytes):
            raise InvalidShardCall(f"a payload of {len(self._bytes)} bytes, {self._at} of them expected")
