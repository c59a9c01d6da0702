"""One worker's process: started in a session of its own, its output read line by line, its whole group ended.

Which process is started when, and what its end means, is decided elsewhere (plan, supervision).
"""

import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

MAX_LINE_CHARACTERS = 4096
"""A longer line of output is cut into several."""
TAIL_LINES = 20
"""Last lines of output kept to tell how a worker died."""
LAST_WORDS_S = 2.0
"""How long output may still come after a process and its group are gone."""

OnLine = Callable[[str, str], None]
"""Takes a worker's name and one line of its output; called on the worker's reading thread."""
OnExit = Callable[[str, int], None]
"""Takes a worker's name and exit code (minus the signal's number); called once, on a thread of the worker."""


class Worker:
    """A running worker. Its standard input stays open, unwritten, for as long as this process lives."""

    def __init__(self, name: str, process: "subprocess.Popen[str]", on_line: OnLine, on_exit: OnExit) -> None:
        self.name = name
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        """Its last lines of output."""
        self._process = process
        self._on_line, self._on_exit = on_line, on_exit
        self._lock = threading.Lock()  # between signals and the reaping of the process: its number stays its own
        self._reaped = False
        self._reader = threading.Thread(target=self._read, name=f"{name}-output", daemon=True)
        self._waiter = threading.Thread(target=self._wait, name=f"{name}-wait", daemon=True)
        self._reader.start()
        self._waiter.start()

    @classmethod
    def start(cls, name: str, command: Sequence[str], folder: Path, on_line: OnLine, on_exit: OnExit) -> "Worker":
        """Start `command` in `folder`. Raises OSError where that is impossible."""
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=_environment(os.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        return cls(name, process, on_line, on_exit)

    @property
    def pid(self) -> int:
        """Number of the process, and of its group."""
        return self._process.pid

    def terminate(self) -> None:
        """Ask the process to end now."""
        with self._lock:
            if not self._reaped:
                self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the process and everything it started."""
        with self._lock:
            if not self._reaped:
                os.killpg(self.pid, signal.SIGKILL)

    def join(self, timeout_s: float) -> bool:
        """Wait until the process is gone, `on_exit` was called, and its last lines were read."""
        self._waiter.join(timeout_s)
        return not self._waiter.is_alive()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            while line := output.readline(MAX_LINE_CHARACTERS):
                text = line.rstrip("\n")
                self.tail.append(text)
                self._on_line(self.name, text)

    def _wait(self) -> None:
        # The process stays a zombie until its group is gone, so that the group's number is nobody else's.
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            os.killpg(self.pid, signal.SIGKILL)
            code = self._process.wait()
            self._reaped = True
        self._on_exit(self.name, code)  # before its last lines are read: who died first must be known first
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._reader.join(LAST_WORDS_S)


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    """A worker's environment: the launcher's, with output that is not held back."""
    return {**environment, "PYTHONUNBUFFERED": "1"}
