"""Workers that can be taken for dead while they are only stopped: what a machine cut off for a while looks like.

When one is, and when it goes on, is service.faults.acting's to say.
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

from service.launcher.child import Child, Starter

MAX_WORDS = 100
"""Lines of output kept of a process that was taken for dead."""


class _Lines:
    """The output of a process as its launcher reads it: ends when the process is taken for dead."""

    def __init__(self) -> None:
        self.put: queue.SimpleQueue[str] = queue.SimpleQueue()  # as long as what is read at once

    def __enter__(self) -> "_Lines":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def readline(self, _limit: int) -> str:
        return self.put.get()


class HeldChild:
    """A process that its launcher may be told is dead: it then lives, until `end`, on our account. See Child."""

    def __init__(self, child: Child) -> None:
        self._child, self._lines = child, _Lines()
        self.output = cast(TextIO, self._lines)
        self.words: deque[str] = deque(maxlen=MAX_WORDS)
        """What it said after it was taken for dead."""
        self._told: Future[int] = Future()  # to the launcher
        self._ended: Future[int] = Future()
        self._lock = threading.Lock()  # between its end and being taken for dead
        self._taken_for_dead = False
        self._reader = threading.Thread(target=self._read, name="held-output", daemon=True)
        self._reader.start()
        threading.Thread(target=self._wait, name="held-wait", daemon=True).start()

    def terminate(self) -> None:
        """See Child."""
        if not self._taken_for_dead:
            self._child.terminate()

    def kill(self) -> None:
        """See Child."""
        if not self._taken_for_dead:
            self._child.kill()

    def signal(self, number: signal.Signals) -> None:
        """See Child."""
        self._child.signal(number)

    def wait(self) -> int:
        """See Child."""
        return self._told.result()

    def let_go(self) -> None:
        """See Child."""
        if not self._taken_for_dead:
            self._child.let_go()

    def stop(self) -> bool:
        """Stop the process and tell its launcher that it was killed; False where it has ended before."""
        with self._lock:
            if self._told.done():
                return False
            self._child.signal(signal.SIGSTOP)
            self._taken_for_dead = True
        self._lines.put.put("")
        self._told.set_result(-signal.SIGKILL)
        return True

    def end(self, within_s: float) -> int | None:
        """After `stop` and SIGCONT: its exit code if it ends by itself in time; gone in any case."""
        try:
            return self._ended.result(within_s)
        except TooLate:
            self._child.kill()
            self._ended.result()
            return None
        finally:
            self._child.let_go()
            self._reader.join()

    def _read(self) -> None:
        with self._child.output as output:
            while line := output.readline():
                if self._taken_for_dead:
                    self.words.append(line.rstrip("\n"))
                else:
                    self._lines.put.put(line)
        self._lines.put.put("")

    def _wait(self) -> None:
        code = self._child.wait()
        self._ended.set_result(code)
        with self._lock:
            if not self._taken_for_dead:
                self._told.set_result(code)


class Holding:
    """A starter of such processes; knows those that were started last by their workers' names."""

    def __init__(self, starter: Starter) -> None:
        self._starter = starter
        self.children: dict[str, HeldChild] = {}

    def start(self, command: Sequence[str], folder: Path) -> HeldChild:
        """See Starter."""
        child = HeldChild(self._starter.start(command, folder))
        self.children[Path(command[-1]).stem] = child  # its private file
        return child
