"""A worker's process as its launcher knows it, and the plain way to start one.

The fast way is service.launcher.nursery.
"""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, TextIO

from millrace.deadline import Deadline

GONE_S = 0.5
"""Longest wait for what a killed worker has started: the kernel ends the processes of a group one after another."""


class Child(Protocol):
    """A process that leads a session of its own; its standard input stays open, unwritten, until `let_go`."""

    output: TextIO
    """What it prints, standard error too."""

    def terminate(self) -> None:
        """Ask the process to end now. Any thread."""
        ...

    def kill(self) -> None:
        """End the process and everything in its group, also where it is stopped. Any thread."""
        ...

    def signal(self, number: signal.Signals) -> None:
        """Send the process, and nothing that it started, a signal. Any thread."""
        ...

    def wait(self) -> int:
        """Wait until it is gone and its group was killed; its exit code, or minus the signal's number. Called once."""
        ...

    def let_go(self) -> None:
        """Close what is held of it, once it is gone; `output` is its reader's to close."""
        ...


class Starter(Protocol):
    """Starts processes."""

    def start(self, command: Sequence[str], folder: Path) -> Child:
        """Start `command` in `folder`. Raises OSError where that is impossible."""
        ...


class Spawner:
    """Starts each process from nothing."""

    def start(self, command: Sequence[str], folder: Path) -> Child:
        """See Starter.start."""
        return SpawnedChild(command, folder)


class SpawnedChild:
    """A direct child of this process."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env=unbuffered(os.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self.output: TextIO = self._process.stdout  # type: ignore[assignment]  # typeshed: IO[str]
        self._lock = threading.Lock()  # between signals and the reaping of the process: its number stays its own
        self._reaped = False

    def terminate(self) -> None:
        """See Child."""
        self.signal(signal.SIGTERM)

    def signal(self, number: signal.Signals) -> None:
        """See Child."""
        with self._lock:
            if not self._reaped:
                self._process.send_signal(number)

    def kill(self) -> None:
        """See Child."""
        with self._lock:
            if not self._reaped:
                os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self) -> int:
        """See Child."""
        # The process stays a zombie until its group is killed, so that the group's number is nobody else's.
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            os.killpg(self._process.pid, signal.SIGKILL)
            code = self._process.wait()
            self._reaped = True
        _until_gone(self._process.pid)
        return code

    def let_go(self) -> None:
        """See Child."""
        assert self._process.stdin is not None
        self._process.stdin.close()


def _until_gone(group: int) -> None:
    """Wait until no process of a killed group is left, or GONE_S, as where nobody reaps orphans."""
    deadline = Deadline.after(GONE_S)
    while not deadline.passed():
        try:
            os.killpg(group, 0)
        except (ProcessLookupError, PermissionError):
            return
        time.sleep(0.001)


def unbuffered(environment: Mapping[str, str]) -> dict[str, str]:
    """A worker's environment: the launcher's, with output that is not held back."""
    return {**environment, "PYTHONUNBUFFERED": "1"}
