"""Workers that are stopped while their launcher takes them for dead, as on a machine that is cut off for a while.

service.faults.injection decides when a worker is stopped and when it continues.
"""

import queue
import signal
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLate
from pathlib import Path
from typing import TextIO, cast

from headrace.service.cluster.child import Starter, WorkerProcess

MAX_LINES = 100
"""Lines of output kept of a process that was taken for dead."""


class _Lines:
    """The output of a process as its launcher reads it. It ends when the process is taken for dead."""

    def __init__(self) -> None:
        self.put: queue.SimpleQueue[str] = queue.SimpleQueue()  # no bound: the launcher reads it at once

    def __enter__(self) -> "_Lines":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def readline(self, _limit: int) -> str:
        return self.put.get()


class HeldProcess:
    """A process that its launcher may take for dead. It then lives until `end`. See WorkerProcess."""

    def __init__(self, child: WorkerProcess) -> None:
        self._child, self._lines = child, _Lines()
        self.output = cast(TextIO, self._lines)
        self.lines: deque[str] = deque(maxlen=MAX_LINES)
        """Its output after it was taken for dead."""
        self._reported: Future[int] = Future()  # the exit code for the launcher
        self._ended: Future[int] = Future()
        self._lock = threading.Lock()  # it ends first, or it is taken for dead first
        self._taken_for_dead = False
        self._reader = threading.Thread(target=self._read, name="held-output", daemon=True)
        self._reader.start()
        threading.Thread(target=self._wait, name="held-wait", daemon=True).start()

    def terminate(self) -> None:
        """See WorkerProcess."""
        if not self._taken_for_dead:
            self._child.terminate()

    def kill(self) -> None:
        """See WorkerProcess."""
        if not self._taken_for_dead:
            self._child.kill()

    def signal(self, number: signal.Signals) -> None:
        """See WorkerProcess."""
        self._child.signal(number)

    def wait(self) -> int:
        """See WorkerProcess."""
        return self._reported.result()

    def release(self) -> None:
        """See WorkerProcess."""
        if not self._taken_for_dead:
            self._child.release()

    def stop(self) -> bool:
        """Stop the process and report to its launcher that it was killed; False where it ended before."""
        with self._lock:
            if self._reported.done():
                return False
            self._child.signal(signal.SIGSTOP)
            self._taken_for_dead = True
        self._lines.put.put("")
        self._reported.set_result(-signal.SIGKILL)
        return True

    def end(self, within_s: float) -> int | None:
        """After `stop` and SIGCONT: its exit code if it ends by itself in time, else None. It is gone in any case."""
        try:
            return self._ended.result(within_s)
        except TooLate:
            self._child.kill()
            self._ended.result()
            return None
        finally:
            self._child.release()
            self._reader.join()

    def _read(self) -> None:
        with self._child.output as output:
            while line := output.readline():
                if self._taken_for_dead:
                    self.lines.append(line.rstrip("\n"))
                else:
                    self._lines.put.put(line)
        self._lines.put.put("")

    def _wait(self) -> None:
        code = self._child.wait()
        self._ended.set_result(code)
        with self._lock:
            if not self._taken_for_dead:
                self._reported.set_result(code)


class HoldingStarter:
    """A starter of such processes. It knows the newest one of each worker's name."""

    def __init__(self, starter: Starter) -> None:
        self._starter = starter
        self.children: dict[str, HeldProcess] = {}

    def start(self, command: Sequence[str], folder: Path) -> HeldProcess:
        """See Starter."""
        child = HeldProcess(self._starter.start(command, folder))
        self.children[Path(command[-1]).stem] = child  # the name of its configuration file
        return child
