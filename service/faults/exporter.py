"""Finds and kills the exporter of the job that this process runs. It is a child of the chief, so /proc is searched."""

import os
import signal
from contextlib import suppress
from pathlib import Path

MODULE = b"headrace.trainer.exports"
"""The module that an exporter runs."""
PROC = Path("/proc")
PARENT = 1
"""Number of the field in /proc/<n>/stat, from 0 after the name."""


def kill_exporter() -> bool:
    """Kill the exporter; whether there was one."""
    found = [pid for pid in map(int, filter(str.isdecimal, os.listdir(PROC))) if _exports(pid) and _is_ours(pid)]
    with suppress(ProcessLookupError):
        for pid in found:
            os.kill(pid, signal.SIGKILL)
        return bool(found)
    return False


def _exports(pid: int) -> bool:
    try:
        return MODULE in (PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def _is_ours(pid: int) -> bool:
    while pid > 1:
        if pid == os.getpid():
            return True
        pid = _parent(pid)
    return False


def _parent(pid: int) -> int:
    try:
        return int((PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()[PARENT])
    except OSError:
        return 0
