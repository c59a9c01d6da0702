"""Output of each worker in a file of its own, `trainer-0.log`, beside what a run shows."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path

from headrace.durable import writing
from headrace.service.cluster.runtime import OnLine

MAX_BYTES = 16 << 20
"""Size at which a file becomes `trainer-0.log.1`, and begins anew."""
OLDER_FILES = 3
"""Older files kept of each worker; the oldest is deleted."""


class _File(RotatingFileHandler):
    """On a full disk lines are lost, and training goes on."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's name
        pass


class WorkerLogs:
    """Writes lines. Any thread."""

    def __init__(self, folder: Path, max_bytes: int = MAX_BYTES) -> None:
        """Append to the files in `folder`, which is made. Raises Unwritable."""
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._max_bytes = folder, max_bytes
        self._lock = threading.Lock()
        self._files: dict[str, _File] = {}

    def write(self, worker: str, text: str) -> None:
        """One line of a worker, after the time at which it came."""
        with self._lock:
            if (file := self._files.get(worker)) is None:
                file = self._files[worker] = self._open(worker)
        file.handle(logging.LogRecord(worker, logging.INFO, "", 0, text, None, None))

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            with suppress(OSError):  # its last lines are lost
                file.close()

    def _open(self, worker: str) -> _File:
        path = self._folder / f"{worker}.log"
        file = _File(
            path, maxBytes=self._max_bytes, backupCount=OLDER_FILES, encoding="utf-8", errors="replace", delay=True
        )
        file.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        return file


@contextmanager
def logged_to(folder: Path | None, on_line: OnLine) -> Iterator[OnLine]:
    """`on_line`, which also writes each worker's lines to a file in `folder`; None: it alone. Raises Unwritable."""
    if folder is None:
        yield on_line
        return
    logs = WorkerLogs(folder)

    def both(worker: str, text: str) -> None:
        logs.write(worker, text)
        on_line(worker, text)

    try:
        yield both
    finally:
        logs.close()
