"""Shows a run while it lasts: the protocol, and the one for plain text. The live display is
service.monitor.display's."""

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from headrace.printable import print_printable
from headrace.service.monitor.lines import labelled, status_changes
from headrace.trainer.job_status import Status

LINE_EVERY_S = 2.0
"""Interval at which progress is printed as plain text."""


class Show(Protocol):
    """Shows a run: takes the workers' lines of output, and the status while a context lasts."""

    def on_line(self, worker: str, text: str) -> None:
        """Take one line of a worker's output. Any thread."""
        ...

    def watching(self, status: Callable[[], Status]) -> AbstractContextManager[None]:
        """Show `status()` repeatedly until the context ends."""
        ...


class PlainShow:
    """Lines of text on standard error: the workers' output, and progress at an interval."""

    def __init__(self, every_s: float = LINE_EVERY_S, *, ends: bool = False) -> None:
        """`ends`: the stream does, so the time that is left is known."""
        self._every_s, self._ends = every_s, ends

    def on_line(self, worker: str, text: str) -> None:
        """Print a worker's line."""
        self._print(labelled(worker, text))

    def watching(self, status: Callable[[], Status]) -> AbstractContextManager[None]:
        """Print progress and alarms on a thread, where they have changed."""
        return _Ticking(lambda last: self._print_news(status(), last), self._every_s)

    def _print_news(self, status: Status, last: Status | None) -> Status:
        for line in status_changes(status, last, ends=self._ends):
            self._print(line)
        return status

    def _print(self, text: str) -> None:
        print_printable(text, file=sys.stderr, flush=True)


class _Ticking:
    """Calls `act` with its last return value, every `every_s` on a thread, while the context lasts."""

    def __init__(self, act: Callable[[Status | None], Status], every_s: float) -> None:
        self._act, self._every_s = act, every_s
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="show", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        last: Status | None = None
        while not self._done.wait(self._every_s):
            last = self._act(last)
        self._act(last)  # the end
