"""Counts connections and calls that a process refuses, by reason, and logs them at a bounded rate."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping
from enum import StrEnum

from headrace.logs import LogLimiter
from headrace.printable import printable

log = logging.getLogger(__name__)


class RefusalReason(StrEnum):
    """A kind of refusal, as a metric names it."""

    SILENT = "silent"
    """It closed the connection, or let it time out, before a handshake: a port scan, a health check."""
    PLAIN_TEXT = "plain_text"
    """It did not speak TLS."""
    NO_CERTIFICATE = "no_certificate"
    WRONG_CERTIFICATE = "wrong_certificate"
    """Its certificate is of another authority, expired, or not accepted."""
    OTHER_GENERATION = "other_generation"
    OTHER_PEER = "other_peer"
    """It has another role or number than is accepted here, or claims those of another process."""
    WRONG_SECRET = "wrong_secret"
    """Its call lacks the secret of the generation."""
    STALE_TOKEN = "stale_token"
    WRONG_DATA_KEY = "wrong_data_key"
    """It came to the data plane without an admitted key or ticket."""
    TOO_MANY = "too_many"
    """There were too many connections."""
    TOO_SLOW = "too_slow"
    """It follows the live feed, and too much waited for it."""


class Refusals:
    """The refusals of one process. Any thread."""

    def __init__(self) -> None:
        self._counts: Counter[RefusalReason] = Counter()
        self._lock = threading.Lock()
        self._limiter = LogLimiter()

    def note(self, reason: RefusalReason, source: str, why: str) -> None:
        """Log one refusal of `source`, which is an address or a name, unless there are many; then count it."""
        if logged := self._limiter.note((reason, source), time.monotonic()):
            times = "" if logged.times == 1 else f" ({logged.times} times)"
            left_out = f"; {logged.left_out} more lines were left out" if logged.left_out else ""
            log.warning("refused %s: %s%s%s", printable(source), printable(why), times, left_out)
        with self._lock:
            self._counts[reason] += 1

    def counts(self) -> Mapping[str, int]:
        """Refusals so far, by reason, for those that occurred."""
        with self._lock:
            return {reason.value: count for reason, count in sorted(self._counts.items())}


PROCESS = Refusals()
"""The refusals of this process. Its status tells them."""
