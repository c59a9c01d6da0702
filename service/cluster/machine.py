"""This machine, as agents and their launcher know it."""

import hashlib
import math
import os
import socket
from pathlib import Path

MACHINE = "HEADRACE_MACHINE"
"""Variable of the environment by which an orchestrator names the machine, where the system does not tell it: containers
of one pod share addresses and the store, and have file systems of their own."""
NAMESPACES = ("mnt", "net")
"""Kinds of Linux namespaces that make a machine of their own: other files, or other addresses."""

QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Processor time that a container may use: microseconds, or "max", and the period in microseconds."""


def cores_here(quota: Path = QUOTA) -> int:
    """Cores that this process may use, as far as a container's limit of processor time allows; at least 1."""
    cores = len(os.sched_getaffinity(0))
    used, _, period = _text(quota).partition(" ")
    return max(1, min(cores, math.ceil(int(used) / int(period)))) if used.isdecimal() and period.isdecimal() else cores


def machine_id() -> str:
    """The same for all processes that share files and addresses; different in another container."""
    if named := os.environ.get(MACHINE):
        return hashlib.sha256(f"{MACHINE}={named}".encode()).hexdigest()[:16]
    parts = [socket.gethostname(), _text(Path("/proc/sys/kernel/random/boot_id"))]
    parts += [_link(f"/proc/self/ns/{kind}") for kind in NAMESPACES]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
