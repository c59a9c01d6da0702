"""The launcher's line to the chief: asks for its status at a steady pace, and hands on the request to stop.

The service has such a line to each launcher.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from millrace.deadline import Deadline
from millrace.errors import MillraceError
from millrace.role import RoleClient

log = logging.getLogger(__name__)

CALL_S = 5.0
"""How long one call may take; a chief that is slower is asked again."""
MAX_SILENT_S = 30.0
"""A worker that says nothing for longer is told as one that stands still, unless a job says otherwise."""


def address_in(path: Path) -> Callable[[], str | None]:
    """Reads the address in the file `path`: None until the file exists."""
    return lambda: path.read_text() if path.exists() else None


class ChiefLine:
    """A thread that knows the chief's last status: `before`, until the chief's address file is there and it answers."""

    def __init__(
        self,
        before: Mapping[str, Any],
        address: Callable[[], str | None],
        secret: str,
        interval_s: float,
        *,
        worker: str,
        max_silent_s: float = MAX_SILENT_S,
    ) -> None:
        """`worker`: whom it asks, for people; told as one that stands still after `max_silent_s` without an answer."""
        self._address, self._secret, self._interval_s = address, secret, interval_s
        self._worker, self._max_silent_s = worker, max_silent_s
        self._status = before
        self._heard_s: float | None = None
        self._wake, self._closing, self._drain = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._ask, name="chief-line", daemon=True)

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    @property
    def status(self) -> Mapping[str, Any]:
        """The last status known, and, where the chief has been silent for too long, that it stands still."""
        heard_s = self._heard_s
        if heard_s is None or (for_s := time.monotonic() - heard_s) <= self._max_silent_s:
            return self._status
        silent = {"waits_for": "worker", "worker": self._worker, "for_s": for_s, "max_s": self._max_silent_s}
        return {**self._status, "stalled": silent}

    def drain(self) -> None:
        """Have the chief asked to stop, as soon as it can be; returns at once."""
        self._drain.set()
        self._wake.set()

    def close(self) -> None:
        """Stop asking."""
        self._closing.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(2 * CALL_S)
        self._heard_s = None  # nobody is asked any more

    def _ask(self) -> None:
        client: RoleClient | None = None
        while not self._closing.is_set():
            try:
                if client is None and (address := self._address()) is not None:
                    client = RoleClient(address, self._secret)
                    self._heard_s = time.monotonic()
                if client is not None:
                    self._ask_once(client)
            except MillraceError as error:
                log.debug("chief: %s", error)  # if it is gone, the launcher learns so from its process
            # A wish to stop that did not get through is tried again soon.
            self._wake.wait(min(0.2, self._interval_s) if client is None or self._drain.is_set() else self._interval_s)
            self._wake.clear()
        if client is not None:
            client.close()

    def _ask_once(self, client: RoleClient) -> None:
        if self._drain.is_set():
            client.drain(Deadline.after(CALL_S))
            self._drain.clear()
        self._status = client.status(Deadline.after(CALL_S))
        self._heard_s = time.monotonic()
