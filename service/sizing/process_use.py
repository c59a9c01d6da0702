"""CPU time and memory that processes of this machine have used, as /proc tells."""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
TICKS_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
PARENT, USER, SYSTEM, RESIDENT = 1, 11, 12, 21
"""Numbers of the fields in /proc/<n>/stat, from 0 after the name."""
PIPE = "pipe"
"""The name of all children of the trainer together."""
TRAINER = "trainer-0"


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """Of one or more processes."""

    core_s: float = 0.0
    """CPU seconds since they began."""
    resident_bytes: int = 0

    def plus(self, other: "ProcessUse") -> "ProcessUse":
        """Of both."""
        return ProcessUse(self.core_s + other.core_s, self.resident_bytes + other.resident_bytes)


def use_of_children(parent: int) -> ProcessUse:
    """The sum over the direct children of a process that run now."""
    total = ProcessUse()
    for _, above, use in _processes():
        if above == parent:
            total = total.plus(use)
    return total


def use_by_worker(folder: Path) -> dict[str, ProcessUse]:
    """By name, each worker whose configuration is in `folder`; and PIPE."""
    processes = list(_processes())
    names = {pid: name for pid, _, _ in processes if (name := _worker(pid, folder))}
    found: dict[str, ProcessUse] = {}
    for pid, above, use in processes:
        if name := names.get(pid) or (PIPE if names.get(above) == TRAINER else ""):
            found[name] = found.get(name, ProcessUse()).plus(use)
    return found


def _processes() -> Iterator[tuple[int, int, ProcessUse]]:
    """Each process with the number of its parent."""
    for pid in map(int, filter(str.isdecimal, os.listdir(PROC))):
        with suppress(OSError):
            stat = (PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
            took_s = (int(stat[USER]) + int(stat[SYSTEM])) / TICKS_S
            yield pid, int(stat[PARENT]), ProcessUse(took_s, int(stat[RESIDENT]) * PAGE_BYTES)


def _worker(pid: int, folder: Path) -> str:
    """The name of a worker, which is that of its configuration; "" for another process."""
    with suppress(OSError):
        for argument in (PROC / str(pid) / "cmdline").read_bytes().split(b"\0"):
            path = Path(os.fsdecode(argument))
            if path.suffix == ".json" and folder in path.parents:
                return path.stem
    return ""
