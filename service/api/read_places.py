"""Places for requests that take long: explanations, reports of slots, and proposals of job files. There are few."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.errors import NotYet
from headrace.service.auth.limits import CallerShares

MAX_READING, MAX_READING_EACH = 4, 2
"""Such requests at a time, in total and for one caller: each queries shards, or reads a commit."""
_reading, _shares = threading.BoundedSemaphore(MAX_READING), CallerShares(MAX_READING_EACH)


@contextmanager
def one_of_few(who: str) -> Iterator[None]:
    """Take one of the places, for the caller `who`. Raises NotYet.

    It does not wait: a waiting request would block a thread.
    """
    if not _shares.take(who):
        raise NotYet(f"{MAX_READING_EACH} explanations, reports or proposals that you requested are running; retry")
    try:
        if not _reading.acquire(blocking=False):
            raise NotYet(f"{MAX_READING} explanations, reports or proposals are running; retry")
        try:
            yield
        finally:
            _reading.release()
    finally:
        _shares.give_back(who)
