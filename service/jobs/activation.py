"""Makes a service the active one of its jobs, and opens their records.

With SQLite a lock on a file below the root decides, and a second service is refused. With PostgreSQL the lease decides
(service.records.lease): a second service waits, and takes over. Launchers check the number of the lease, too.
"""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from headrace.deadline import Deadline
from headrace.durable import REAL, locked, write_whole, writing
from headrace.errors import DeadlineExceeded, HeadraceError, SpecError
from headrace.service.jobs.config import ServiceConfig
from headrace.service.records.database import Records, opened
from headrace.service.records.lease import Lease

IN_USE_S = 1.0
"""How long to wait for another service with the same root to end."""
FENCE = "service.fence"
"""The file below the root with the number of the lease of the active service."""

Wait = Callable[[Lease], bool]
"""Waits until the lease is taken; False where the service is to end before."""


class EndedWaiting(HeadraceError):
    """The service was told to end while it waited for its turn."""

    exit_code = 0


@dataclass(frozen=True, slots=True)
class Active:
    """An active service's records and, in PostgreSQL, its lease."""

    records: Records
    lease: Lease | None
    fence: "Fence | None"


@dataclass(frozen=True, slots=True)
class Fence:
    """Lets a launcher check at its start whether the service that starts it is still the newest."""

    file: Path
    number: int

    def passed(self) -> bool:
        """Whether no service with a higher number is known here."""
        return not self.file.exists() or int(self.file.read_text()) <= self.number


@contextmanager
def active(config: ServiceConfig, wait: Wait | None = None) -> Iterator[Active]:
    """Become the active service of the jobs below `config.root`, and stay it until the context ends.

    `wait`: how to wait for another service to end; None: refuse with a SpecError. Raises SpecError, EndedWaiting, and
    the errors of `opened`.
    """
    with ExitStack() as held:
        if config.shares_records:
            _lock(held, config.root, shared=True)
            records = held.enter_context(opened(config.database_url))
            yield _with_lease(held, config.root, records, wait)
            return
        _lock(held, config.root, shared=False)
        yield Active(held.enter_context(opened(config.database_url)), None, None)


def _lock(held: ExitStack, root: Path, *, shared: bool) -> None:
    try:
        held.enter_context(locked(root / "service.lock", Deadline.after(IN_USE_S), shared=shared))
    except DeadlineExceeded:
        raise SpecError(
            f"another service hosts the jobs in {root}; end it, or choose another. (With SQLite there is one service; "
            "with PostgreSQL in `database` of both, a second one waits and takes over)",
            "root",
        ) from None


def _with_lease(held: ExitStack, root: Path, records: Records, wait: Wait | None) -> Active:
    """Take the lease.

    1. Wait for it. 2. Let launchers know the number: those that an older service starts from now on end at once.
    3. Renew it from now on, as a migration may take longer than it holds. 4. Migrate the records.
    """
    lease = Lease(records, f"{socket.gethostname()}, process {os.getpid()}", str(root))
    if not (_at_once(lease) if wait is None else wait(lease)):  # 1
        raise EndedWaiting("the service ends; it waited for its turn")
    held.callback(lease.release)
    fence = Fence(root / FENCE, lease.fence())
    with writing(fence.file):  # 2
        write_whole(REAL, fence.file, f"{fence.number}\n".encode())
    lease.keep()  # 3
    records.migrate()  # 4
    records.audit("service", "take over", detail={"number": fence.number})
    return Active(records, lease, fence)


def _at_once(lease: Lease) -> bool:
    if (holder := lease.holder()) is not None:
        raise SpecError(f"{holder} is active with these records; end it, or choose others", "database")
    return lease.take()
