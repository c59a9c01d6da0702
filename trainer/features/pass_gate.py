"""Readers that ask the shards about a pass before its first batch: they wait until the pass is open.

A reader of this kind stands around the reader of a stream. `read` is called on one thread, the others on any.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.dataset.loader.batch_loader import PassReader

POLL_S = 0.2
"""Pause between two checks of a waiting thread whether to stop."""


class GatedReader:
    """A PassReader but for `read`, which waits with `await_open`."""

    def __init__(self, reader: PassReader) -> None:
        """`reader` is closed with this one."""
        self._reader = reader
        self._open, self._stopping = 0, False
        self._asked_s = 0.0
        self._changed = threading.Condition()

    def opened(self, pass_number: int) -> None:
        """The shards have opened a pass."""
        with self._changed:
            self._open, self._asked_s = pass_number, 0.0
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._reader.close()

    @contextmanager
    def asking(self) -> Iterator[None]:
        """A context for calls that wait for those of other ranks."""
        since_s = time.monotonic()
        yield
        self._asked_s += time.monotonic() - since_s

    def asked_s(self) -> float:
        """How long calls of the open pass took that are answered once all ranks have made them."""
        return self._asked_s

    def await_open(self, pass_number: int) -> bool:
        """Wait until the shards have opened a pass; False where the job ends."""
        with self._changed:
            while self._open < pass_number and not self._stopping:
                self._changed.wait(POLL_S)
            return not self._stopping
