"""The launcher's connection to rank 0: polls its status, exchanges messages, and forwards the request to drain.

The service has such a connection to each launcher.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from headrace.deadline import Deadline
from headrace.errors import DeadlineExceeded, HeadraceError, NotYet, Unavailable
from headrace.rpc.channels import TlsPeer
from headrace.rpc.role import RoleClient
from headrace.trainer.job_status import StallStatus, Status, read
from headrace.trainer.rank0.resize_messages import ResizeMessage, decode_message, encode_message

log = logging.getLogger(__name__)

CALL_S = 5.0
"""Longest time for one call; after it the call is repeated."""
MAX_SILENT_S = 30.0
"""A worker that does not answer for longer counts as stalled, unless the job sets another limit."""


def address_in(path: Path) -> Callable[[], str | None]:
    """Reads the address in the file `path`: None until the file exists."""
    return lambda: path.read_text() if path.exists() else None


class RankZeroConnection:
    """A thread that polls rank 0's status."""

    def __init__(
        self,
        before: Status,
        address: Callable[[], str | None],
        secret: str,
        interval_s: float,
        *,
        worker: str,
        tls: TlsPeer | None = None,
        max_silent_s: float = MAX_SILENT_S,
    ) -> None:
        """`before` is the status until rank 0 has an address and answers.

        `worker` is its name for people; `tls` is for a rank 0 off loopback. It counts as stalled after `max_silent_s`
        without an answer.
        """
        self._address, self._secret, self._tls, self._interval_s = address, secret, tls, interval_s
        self._worker, self._max_silent_s = worker, max_silent_s
        self._status = before
        self._heard_s: float | None = None
        self._sending: ResizeMessage | None = None
        self._sent: ResizeMessage | None = None
        self._asking: Mapping[str, Any] | None = None
        self.message: ResizeMessage | None = None
        """The last message of rank 0; None: none."""
        self._wake, self._closing, self._drain = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._poll, name="rank0-line", daemon=True)

    def start(self) -> None:
        """Start to poll."""
        self._thread.start()

    @property
    def status(self) -> Status:
        """The last known status, with a stall where rank 0 has been silent for too long."""
        heard_s = self._heard_s
        if heard_s is None or (for_s := time.monotonic() - heard_s) <= self._max_silent_s:
            return self._status
        silent = StallStatus(waits_for="worker", worker=self._worker, for_s=for_s, max_s=self._max_silent_s)
        return replace(self._status, stalled=silent)

    def drain(self) -> None:
        """Send rank 0 the request to drain as soon as it can be reached. Returns at once."""
        self._drain.set()
        self._wake.set()

    def send(self, message: ResizeMessage) -> None:
        """Send rank 0 a message, in place of the one before, with each poll from now on. Returns at once."""
        self._sending = message
        self._wake.set()

    def ask(self, operation: Mapping[str, Any]) -> None:
        """Send rank 0 a request for an operation, in place of the one before, until it has answered. Returns at
        once."""
        self._asking = operation
        self._wake.set()

    def close(self) -> None:
        """Stop to poll."""
        self._closing.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(2 * CALL_S)
        self._heard_s = None  # nobody can be silent any more

    def _poll(self) -> None:
        client: RoleClient | None = None
        while not self._closing.is_set():
            try:
                if client is None and (address := self._address()) is not None:
                    client = RoleClient(address, self._secret, self._tls)
                    self._heard_s = time.monotonic()
                if client is not None:
                    self._poll_once(client)
            except HeadraceError as error:
                log.debug("rank 0: %s", error)  # the launcher learns from its process whether it is gone
            # A request to drain or a message that did not arrive is repeated soon.
            pressing = client is None or self._drain.is_set() or self._sent is not self._sending
            self._wake.wait(min(0.2, self._interval_s) if pressing else self._interval_s)
            self._wake.clear()
        if client is not None:
            client.close()

    def _poll_once(self, client: RoleClient) -> None:
        if self._drain.is_set():
            client.drain(Deadline.after(CALL_S))
            self._drain.clear()
        sending = self._sending
        status, message = client.exchange(encode_message(sending), Deadline.after(CALL_S))
        self._sent, self.message = sending, decode_message(message)
        self._status = read(Status, status)
        self._heard_s = time.monotonic()
        if (asking := self._asking) is not None:
            self._ask(client, asking)

    def _ask(self, client: RoleClient, operation: Mapping[str, Any]) -> None:
        try:
            client.operate({"do": "ask", "operation": operation}, Deadline.after(CALL_S))
        except (NotYet, Unavailable, DeadlineExceeded):
            return  # asked again at the next poll
        except HeadraceError as error:
            log.warning("rank 0 refuses to %s: %s", operation["op"], error)
        if self._asking is operation:
            self._asking = None
