"""The output of a process of a test machine, line by line."""

import queue
import threading
from collections.abc import Callable
from contextlib import ExitStack
from subprocess import Popen

from headrace.deadline import Deadline
from tests.machines.network import Machine


class Lines:
    """Reads on while the process runs."""

    def __init__(self, process: "Popen[str]") -> None:
        self.process, self.said = process, list[str]()
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # None: it has closed its output
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def until(self, wanted: Callable[[str], bool], within_s: float = 60.0) -> str:
        """Read on to the first line that is `wanted`; that line."""
        deadline = Deadline.after(within_s)
        while (line := self._next(deadline)) is not None:
            if wanted(line):
                return line
        raise AssertionError(f"it has ended: {''.join(self.said)}")

    def once(self, wanted: Callable[[str], bool], within_s: float = 60.0) -> str:
        """The first line that is `wanted`, of those read before, too."""
        found = next((line for line in self.said if wanted(line)), None)
        return self.until(wanted, within_s) if found is None else found

    def until_said(self, words: str, within_s: float = 60.0) -> str:
        """Read on to a line that holds `words`; that line."""
        return self.until(lambda line: words in line, within_s)

    def end(self, within_s: float = 60.0) -> tuple[int, str]:
        """Read on to the end; exit code, and all that it said."""
        deadline = Deadline.after(within_s)
        while self._next(deadline) is not None:
            pass
        return self.process.wait(within_s), "".join(self.said)

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        self._thread.join()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _next(self, deadline: Deadline) -> str | None:
        try:
            line = self._lines.get(timeout=max(0.001, deadline.left_s()))
        except queue.Empty:
            raise AssertionError(f"out of time: {''.join(self.said)}") from None
        if line is not None:
            self.said.append(line)
        return line


def start(held: ExitStack, machine: Machine, *words: str, **more: object) -> Lines:
    """Run the interpreter with `words` on a machine until `held` ends."""
    lines = Lines(machine.python(*words, **more))
    held.callback(lines.close)
    return lines
