"""Limits for each client: failed attempts, by a token bucket for each address, and shares of what is bounded.

A share is how much of a bounded resource one caller may hold at a time, so that no caller takes all of it. Pure but for
the counts."""

import threading
from collections import Counter, OrderedDict

from headrace.address import network_of
from headrace.logs import TokenBucket
from headrace.service.auth.roles import ANONYMOUS, Caller

MAX_ADDRESSES = 4096
"""Remembered at a time; beyond it the address whose failure is oldest is forgotten."""


class FailedAttempts:
    """Failures by address. Any thread."""

    def __init__(self, capacity: int, per_s: float, max_addresses: int = MAX_ADDRESSES) -> None:
        self._capacity, self._per_s, self._max = float(capacity), per_s, max_addresses
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()
        self._lock = threading.Lock()

    def failed(self, address: str, now_s: float) -> float:
        """Count a failure. -> seconds to wait; 0 while within the limit."""
        network = network_of(address)
        with self._lock:
            full = TokenBucket(self._capacity, now_s)
            bucket, wait_s = self._buckets.pop(network, full).after_failure(now_s, self._capacity, self._per_s)
            self._buckets[network] = bucket
            if len(self._buckets) > self._max:
                self._buckets.popitem(last=False)
        return wait_s

    def __len__(self) -> int:
        return len(self._buckets)


class CallerShares:
    """Counts what each caller holds. Any thread."""

    def __init__(self, max_each: int) -> None:
        self.max_each = max_each
        self._held: Counter[str] = Counter()
        self._lock = threading.Lock()

    def take(self, who: str) -> bool:
        """Take one more for `who`, unless they hold `max_each`; whether it was taken."""
        with self._lock:
            if self._held[who] >= self.max_each:
                return False
            self._held[who] += 1
            return True

    def give_back(self, who: str) -> None:
        """Give one back."""
        with self._lock:
            self._held[who] -= 1
            if self._held[who] <= 0:
                del self._held[who]


def share_key(caller: Caller, address: str) -> str:
    """The client that a share counts for: its token, or without one its address, which several users may have."""
    return f"{ANONYMOUS} {network_of(address)}" if caller.name == ANONYMOUS else caller.name
