"""A worker's process as the local launcher holds it, and the plain way to start one.

The fast way is service.cluster.forkserver.
"""

import io
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TextIO

from headrace.process import STDOUT, ChildProcess, unbuffered


class WorkerProcess(Protocol):
    """A process that leads a session of its own. Its standard input stays open, unwritten, until `release`."""

    output: TextIO
    """Its standard output and standard error."""

    def terminate(self) -> None:
        """Ask the process to end now. Any thread."""
        ...

    def kill(self) -> None:
        """End the process and everything in its group, also where it is stopped. Any thread."""
        ...

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, not to its group. Any thread."""
        ...

    def wait(self) -> int:
        """Wait until the process and its group are gone; the exit code, or minus the signal's number. Called once."""
        ...

    def release(self) -> None:
        """Release what is held of a process that is gone. `output` is closed by its reader."""
        ...


class Starter(Protocol):
    """Starts processes."""

    def start(self, command: Sequence[str], folder: Path) -> WorkerProcess:
        """Start `command` in `folder`. Raises OSError where that is impossible."""
        ...


class Spawner:
    """Starts each process from nothing."""

    def start(self, command: Sequence[str], folder: Path) -> WorkerProcess:
        return SpawnedChild(command, folder)


class SpawnedChild:
    """A direct child of this process."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self._process = ChildProcess(command, folder=folder, environment=unbuffered(os.environ), stderr=STDOUT)
        raw = io.FileIO(os.dup(self._process.stdout.fileno()))  # the reader closes its own
        self._process.stdout.close()
        self.output: TextIO = io.TextIOWrapper(io.BufferedReader(raw), encoding="utf-8", errors="replace")

    def terminate(self) -> None:
        self.signal(signal.SIGTERM)

    def signal(self, number: signal.Signals) -> None:
        self._process.signal(number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> int:
        self._process.ends_within(None)
        return self._process.end()

    def release(self) -> None:
        self._process.close()
