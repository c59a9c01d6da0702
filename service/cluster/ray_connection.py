"""The process that holds the connection to a Ray cluster, as the launcher has it. service.cluster.ray_driver is it."""

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from headrace import documents
from headrace.process import ChildProcess, unbuffered
from headrace.service.cluster.worker_plan import PYTHON

CLOSE_S = 6.0
"""Longest time for an orderly end: the actors end, and Ray hears of it. Then the process is killed."""
MAX_LINES = 20
"""Lines kept of all that Ray prints there, to explain an end."""

OnEvent = Callable[[Mapping[str, Any]], None]
"""Takes an event. The last one is {"gone": the reason}: whatever was placed is ended. Called on a thread of its own."""


class RayConnection:
    """One process. Any thread."""

    def __init__(self, address: str, on_event: OnEvent) -> None:
        """Connect to the cluster at `address`. Raises OSError."""
        self._on_event = on_event
        command = (*PYTHON, "headrace.service.cluster.ray_driver", address)
        self._process = ChildProcess(command, environment=unbuffered(os.environ))
        self._printed: deque[str] = deque(maxlen=MAX_LINES)
        self._heard_s = time.monotonic()
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._read, self._drain)]
        for thread in self._threads:
            thread.start()

    @property
    def silent_s(self) -> float:
        """The time since it was last heard. It tells every second that Ray answers."""
        return time.monotonic() - self._heard_s

    @property
    def gone(self) -> bool:
        """Whether it has ended."""
        return self._process.ends_within(0)

    def request(self, request: Mapping[str, Any]) -> None:
        """Send a request. One that is gone does not hear it."""
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")

    def close(self) -> None:
        """End the process, and with it all that it has placed."""
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.ends_within(CLOSE_S)
        self._process.end()
        for thread in self._threads:
            thread.join()
        self._process.close()

    def _read(self) -> None:
        for line in self._process.stdout:
            self._heard_s = time.monotonic()
            if event := documents.parse_object(line, "an event of the connection to Ray"):
                self._on_event(event)
        code = self._process.end()
        said = next((line for line in reversed(self._printed) if line), "")
        self._on_event({"gone": f"the connection to the Ray cluster has ended with code {code}: {said}"})

    def _drain(self) -> None:
        for line in self._process.stderr:
            self._printed.append(line.decode(errors="replace").strip())
