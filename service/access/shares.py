"""How much of what is bounded one caller may hold at a time, so that none takes all and keeps the others out."""

import threading
from collections import Counter

from service.access.guard import ANONYMOUS
from service.access.limiting import network_of
from service.access.roles import Caller


class Shares:
    """Counts what each caller holds. Any thread."""

    def __init__(self, max_each: int) -> None:
        self.max_each = max_each
        self._held: Counter[str] = Counter()
        self._lock = threading.Lock()

    def take(self, who: str) -> bool:
        """One more of `who`, unless they hold `max_each`; whether it was taken."""
        with self._lock:
            if self._held[who] >= self.max_each:
                return False
            self._held[who] += 1
            return True

    def give_back(self, who: str) -> None:
        """One less."""
        with self._lock:
            self._held[who] -= 1
            if self._held[who] <= 0:
                del self._held[who]


def sharer(caller: Caller, address: str) -> str:
    """Whose share it is: the token's, or, without one, that of the address, which several people may have."""
    return f"{ANONYMOUS} {network_of(address)}" if caller.name == ANONYMOUS else caller.name
