"""A link with delay and loss: copies frames between two tap devices, as the kernel's netem does where it exists.

Run as a process in the namespace of both devices, with their names, the delay in milliseconds, and the share of frames
that are lost; it prints a line when it copies. Frames keep their order. The losses are the same in each run.
"""

import fcntl
import os
import selectors
import struct
import sys
import time
from collections import deque
from contextlib import suppress
from random import Random

SET_INTERFACE = 0x400454CA
"""TUNSETIFF of linux/if_tun.h: make this file the device of that name."""
TAP, NO_HEADER = 0x0002, 0x1000
"""IFF_TAP and IFF_NO_PI of linux/if_tun.h: whole Ethernet frames, nothing before them."""
LARGEST = 1 << 16
HELD = 10_000
"""Frames on their way in one direction; more are lost, as in the queue of a device."""


def tap(name: str) -> int:
    """The file of an Ethernet device: what the kernel sends out of it is read, and the other way round."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, SET_INTERFACE, struct.pack("16sH", name.encode(), TAP | NO_HEADER))
    return file


def copy(first: int, second: int, delay_s: float, loss: float) -> None:
    """Copy frames between two devices, for ever."""
    random = Random(1)
    other = {first: second, second: first}
    on_their_way: dict[int, deque[tuple[float, bytes]]] = {first: deque(), second: deque()}
    with selectors.DefaultSelector() as selector:
        for device in other:
            selector.register(device, selectors.EVENT_READ)
        while True:
            due = [frames[0][0] for frames in on_their_way.values() if frames]
            ready = selector.select(max(0.0, min(due) - time.monotonic()) if due else None)
            for key, _ in ready:
                frame = os.read(key.fd, LARGEST)
                frames = on_their_way[other[key.fd]]
                if random.random() >= loss and len(frames) < HELD:
                    frames.append((time.monotonic() + delay_s, frame))
            for device, frames in on_their_way.items():
                while frames and frames[0][0] <= time.monotonic():
                    with suppress(OSError):  # the device is down: the frame is lost
                        os.write(device, frames.popleft()[1])


if __name__ == "__main__":
    devices = [tap(name) for name in sys.argv[1:3]]
    print("up", flush=True)
    copy(*devices, float(sys.argv[3]) / 1000, float(sys.argv[4]))
