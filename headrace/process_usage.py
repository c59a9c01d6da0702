"""The processor time and memory of this process, for operators. Nothing is decided by them."""

import os
import resource
import socket
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

STATM = Path("/proc/self/statm")
"""Linux: pages of this process; the second number counts those in memory."""


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """One process, without its children."""

    machine: str = ""
    """The name of its machine; empty where it is not known."""
    pid: int = 0
    cpu_s: float = 0.0
    """Processor time since its start, of all threads."""
    memory_bytes: int = 0
    """Memory that it holds now; where only the greatest ever is known, that."""


def process_usage() -> ProcessUsage:
    """The usage of this process now."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return ProcessUsage(_machine(), os.getpid(), round(used.ru_utime + used.ru_stime, 3), _memory_bytes(used.ru_maxrss))


@cache
def _machine() -> str:
    return socket.gethostname()


def _memory_bytes(greatest: int) -> int:
    try:
        return int(STATM.read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return greatest * (1 if sys.platform == "darwin" else 1024)  # bytes there, KiB elsewhere
