"""What was found out a moment ago, so that many who ask the same cost little: a thing is looked up once at a time."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

MAX_KEPT = 2_000
"""Things at a time; beyond it the one is forgotten that was made first."""
Found = TypeVar("Found")


@dataclass(slots=True)
class _One:
    lock: threading.Lock = field(default_factory=threading.Lock)
    at_s: float = float("-inf")
    found: Any = None


class Kept:
    """See module docstring. Any thread; who comes while a thing is looked up waits for that answer."""

    def __init__(self, now: Callable[[], float] = time.monotonic, max_kept: int = MAX_KEPT) -> None:
        self._now, self._max_kept = now, max_kept
        self._known: OrderedDict[tuple[str, ...], _One] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[str, ...], keep_s: float, look: Callable[[], Found]) -> Found:
        """What `look` gives, or gave at most `keep_s` seconds ago. What it raises is not kept."""
        with self._lock:
            one = self._known.setdefault(key, _One())
            if len(self._known) > self._max_kept:
                self._known.popitem(last=False)
        with one.lock:
            if self._now() - one.at_s >= keep_s:
                try:
                    one.found = look()
                except BaseException:
                    with self._lock:
                        self._known.pop(key, None)
                    raise
                one.at_s = self._now()
            found: Found = one.found
            return found

    def drop(self, start: tuple[str, ...]) -> None:
        """Look anew the next time for all whose key begins so."""
        with self._lock:
            for key in [key for key in self._known if key[: len(start)] == start]:
                del self._known[key]
