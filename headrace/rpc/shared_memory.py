"""Memory shared by two processes of one machine: the arrays of a message lie in it, and the message tells where.

The memory has no name, so nothing of it outlives both processes. Its owner offers it by the number of its process and
of its descriptor; it is sealed, so it cannot shrink under the peer. Each process writes to a half of its own, one
message at a time, and checks every place that the other one tells.
"""

import fcntl
import mmap
import os
import secrets
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

HALF_BYTES = 64 << 20
"""Room for the arrays of one message. Pages count once they are used. Arrays of larger messages are in the message."""
HEAD_BYTES = mmap.PAGESIZE
"""Before the halves: the number of the memory."""
ALIGNMENT = 64
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
MAX_PLACES = 4096
"""Most arrays of a message."""

_NUMBER = struct.Struct("<Q")
_PLACE = struct.Struct("<QQ")


@dataclass(frozen=True, slots=True)
class MemoryOffer:
    """Where a peer finds a memory."""

    process: int
    descriptor: int
    number: int
    """Random; it is also at the beginning of the memory."""


class SharedMemory:
    """One end of a memory. One thread at a time."""

    def __init__(self, descriptor: int, number: int, *, owner: bool) -> None:
        """Use `create` or `open`."""
        self._bytes = np.frombuffer(mmap.mmap(descriptor, HEAD_BYTES + 2 * HALF_BYTES), np.uint8)
        self._address = self._bytes.ctypes.data
        self._offered: int | None = None
        self.number = number
        halves = HEAD_BYTES, HEAD_BYTES + HALF_BYTES
        self._mine, self._theirs = halves if owner else halves[::-1]
        self._next = self._mine

    @classmethod
    def create(cls) -> "SharedMemory":
        """A memory of this process. Raises OSError."""
        descriptor = os.memfd_create("headrace", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, HEAD_BYTES + 2 * HALF_BYTES)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
            memory = cls(descriptor, secrets.randbits(64), owner=True)
        except OSError:
            os.close(descriptor)
            raise
        memory._offered = descriptor
        _NUMBER.pack_into(memory._bytes.data, 0, memory.number)
        return memory

    @classmethod
    def open(cls, offer: MemoryOffer) -> "SharedMemory":
        """The peer's end of a memory that another process offers. Raises OSError."""
        path = f"/proc/{offer.process}/fd/{offer.descriptor}"
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            found = os.fstat(descriptor)
            whole = stat.S_ISREG(found.st_mode) and found.st_size == HEAD_BYTES + 2 * HALF_BYTES
            if not whole or fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS != SEALS:
                raise OSError(f"{path} is no memory to share")
            memory = cls(descriptor, offer.number, owner=False)
        finally:
            os.close(descriptor)
        if _NUMBER.unpack_from(memory._bytes.data, 0) != (offer.number,):
            raise OSError(f"{path} is another memory")
        return memory

    @property
    def offer(self) -> MemoryOffer:
        """Where a peer finds the memory, until `offered`."""
        assert self._offered is not None, "by the owner, before `offered`"
        return MemoryOffer(os.getpid(), self._offered, self.number)

    def offered(self) -> None:
        """The peer has opened the memory, or will not."""
        if self._offered is not None:
            os.close(self._offered)
            self._offered = None

    def clear(self) -> None:
        """Begin a message: its arrays take the place of those of the last one."""
        self._next = self._mine

    def empty(self, *shape: int) -> NDArray[np.float32]:
        """An array of floats for the present message; one of this process alone where there is no room."""
        num_bytes = 4 * int(np.prod(shape))
        begin, end = self._next, self._next + num_bytes
        if end > self._mine + HALF_BYTES:
            return np.empty(shape, np.float32)
        self._next = -(-end // ALIGNMENT) * ALIGNMENT
        return self._bytes[begin:end].view(np.float32).reshape(shape)

    def places_of(self, frames: Sequence[memoryview]) -> bytes | None:
        """Where the arrays of a message are; None if not all are in this memory."""
        places = [_NUMBER.pack(self.number)]
        for frame in frames:
            begin = np.frombuffer(frame, np.uint8).ctypes.data - self._address if frame.nbytes else self._mine
            if not self._mine <= begin <= self._mine + HALF_BYTES - frame.nbytes:
                return None
            places.append(_PLACE.pack(begin, frame.nbytes))
        return b"".join(places)

    def frames_at(self, places: memoryview) -> list[memoryview]:
        """The arrays of a peer's message, read-only; its next message overwrites them. Raises ValueError."""
        if number_of(places) != self.number:
            raise ValueError("arrays in another memory than this one")
        found, limit = [], self._theirs + HALF_BYTES
        for begin, num_bytes in _PLACE.iter_unpack(places[_NUMBER.size :]):
            if begin < self._theirs or begin + num_bytes > limit:
                raise ValueError(f"an array of {num_bytes} bytes at {begin}, outside of the sender's half")
            found.append(self._bytes[begin : begin + num_bytes].data.toreadonly())
        return found


def number_of(places: memoryview) -> int | None:
    """The memory in which the arrays of a message lie; None for bytes that tell no places."""
    rest = len(places) - _NUMBER.size
    if rest < 0 or rest % _PLACE.size or rest > _PLACE.size * MAX_PLACES:
        return None
    return int(_NUMBER.unpack_from(places)[0])
