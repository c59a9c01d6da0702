"""Memory shared by two processes: each reads what the other wrote, inside of the other's half, and nothing is left."""

import fcntl
import gc
import os
import signal
import struct
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.rpc import data_sockets
from headrace.rpc.data_sockets import HALF_BYTES, HEAD_BYTES, MemoryOffer, SharedMemory, number_of

SIZE = HEAD_BYTES + 2 * HALF_BYTES


@contextmanager
def both_ends():
    owner = SharedMemory.create()
    peer = SharedMemory.open(owner.offer)
    owner.offered()
    yield owner, peer


def frames_of(*arrays):
    return [array.reshape(-1).view(np.uint8).data for array in arrays]


def test_each_end_reads_what_the_other_one_wrote():
    with both_ends() as (owner, peer):
        for writer, reader in ((owner, peer), (peer, owner)):
            for step in range(3):
                writer.clear()
                rows, shows = writer.empty(5, 3), writer.empty(7)
                rows[:], shows[:] = step, np.arange(7)
                assert not rows.ctypes.data % 64 and not shows.ctypes.data % 64
                found = reader.frames_at(memoryview(writer.places_of(frames_of(rows, shows))))
                assert [np.frombuffer(frame, np.float32).tolist() for frame in found] == [[step] * 15, [*range(7)]]
                assert all(frame.readonly for frame in found)


def test_arrays_without_room_or_from_elsewhere_have_no_place():
    with both_ends() as (owner, peer):
        most = owner.empty(HALF_BYTES // 4)
        assert peer.frames_at(memoryview(owner.places_of(frames_of(most))))[0].nbytes == HALF_BYTES
        more = owner.empty(1)
        assert owner.places_of(frames_of(more)) is None and owner.places_of(frames_of(most, more)) is None
        theirs = peer.empty(4)
        assert owner.places_of(frames_of(theirs)) is None
        assert owner.places_of([memoryview(b"")]) is not None
        owner.clear()
        assert owner.places_of(frames_of(owner.empty(1))) is not None


@given(st.integers(0, 2**64 - 1) | st.integers(0, SIZE), st.integers(0, 2**64 - 1) | st.integers(0, SIZE))
def test_no_place_reaches_out_of_the_half_of_its_sender(begin, num_bytes):
    with both_ends() as (owner, peer):
        for reader, half in ((peer, HEAD_BYTES), (owner, HEAD_BYTES + HALF_BYTES)):
            places = memoryview(struct.pack("<QQQ", owner.number, begin, num_bytes))
            if half <= begin and begin + num_bytes <= half + HALF_BYTES:
                assert reader.frames_at(places)[0].nbytes == num_bytes
            else:
                with pytest.raises(ValueError, match="outside of the sender's half"):
                    reader.frames_at(places)


@given(st.binary(max_size=80))
def test_bytes_that_tell_no_places_are_refused(given):
    with both_ends() as (owner, peer):
        assert (number_of(memoryview(given)) is None) == (len(given) % 16 != 8)
        with pytest.raises(ValueError, match="another memory"):
            peer.frames_at(memoryview(given))
        many = struct.pack("<Q", owner.number) + bytes(16 * (data_sockets.MAX_PLACES + 1))
        assert number_of(memoryview(many)) is None


def memfd(size=SIZE, seals=data_sockets.SEALS, number=5):
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    os.pwrite(descriptor, struct.pack("<Q", number), 0)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


@pytest.mark.parametrize(
    "descriptor",
    [
        lambda: memfd(number=6),
        lambda: memfd(size=SIZE - 1),
        lambda: memfd(seals=fcntl.F_SEAL_GROW),
        lambda: os.open("/dev/null", os.O_RDWR),
        lambda: os.pipe()[0],
    ],
    ids=["another number", "too small", "may shrink", "a device", "a pipe"],
)
def test_only_a_sealed_memory_of_the_right_size_and_number_is_opened(descriptor):
    offered = descriptor()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError):
        SharedMemory.open(MemoryOffer(os.getpid(), offered, 5))
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(offered)


def test_a_memory_that_is_no_more_offered_cannot_be_opened():
    owner = SharedMemory.create()
    offer = owner.offer
    owner.offered()
    with pytest.raises(OSError):
        SharedMemory.open(offer)


OWNER = """
import sys
from headrace.rpc.data_sockets import SharedMemory
memory = SharedMemory.create()
array = memory.empty(4)
array[:] = 3
offer = memory.offer
print(offer.process, offer.descriptor, offer.number, memory.places_of([array.view("u1").data]).hex(), flush=True)
sys.stdin.read()
"""


def mappings() -> set[str]:
    """The lines of /proc about memory that this process shares."""
    return {line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:headrace" in line}


def test_nothing_is_left_of_the_memory_of_a_killed_process():
    gc.collect()
    names, mapped = sorted(os.listdir("/dev/shm")), mappings()
    before = len(os.listdir("/proc/self/fd"))
    with subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        *numbers, places = child.stdout.readline().split()
        peer = SharedMemory.open(MemoryOffer(*map(int, numbers)))
        child.send_signal(signal.SIGKILL)
    assert len(mappings() - mapped) == 1
    (frame,) = peer.frames_at(memoryview(bytes.fromhex(places.decode())))
    assert np.frombuffer(frame, np.float32).tolist() == [3] * 4  # what is being read stays valid
    del frame, peer
    gc.collect()
    assert mappings() <= mapped
    assert len(os.listdir("/proc/self/fd")) == before and sorted(os.listdir("/dev/shm")) == names
