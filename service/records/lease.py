"""The lease of the records: of several services with one PostgreSQL database, one is active.

The active service renews the lease every RENEW_S. If it stops to do so for LEASE_S, another one takes it: the fence
number becomes one higher. Every session that writes checks the number in its own transaction, so a service that was
frozen and wakes up can write nothing. Before any other act it compares its own clock, which goes on in a suspended
machine, and then the number (`Records.check_active`).
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import ColumnElement, CursorResult, Update, exists, func, or_, select, update

from headrace.errors import HeadraceError, SpecError
from headrace.service.records.database import NotActive, Records
from headrace.service.records.schema import LEASE, JobRow, LeaseRow

log = logging.getLogger(__name__)

LEASE_S = 8.0
"""How long a lease holds after it was renewed."""
RENEW_S = 2.0
"""Time between two renewals."""
POLL_S = 0.5
"""Time between two attempts of a standby."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The service that holds the lease, or held it last."""

    name: str
    """Its machine and process, in words."""
    url: str
    """The address of its API; empty until it is known."""

    def __str__(self) -> str:
        return f"the service of {self.name}" + (f", {self.url}" if self.url else "")


def _now_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _expiry() -> ColumnElement[object]:
    """LEASE_S from now, by the database's clock."""
    return func.clock_timestamp() + func.make_interval(0, 0, 0, 0, 0, 0, LEASE_S)


class Lease:
    """One service's part of the lease: `take` it, then `keep` it. Any thread."""

    def __init__(self, records: Records, name: str, root: str, now_s: Callable[[], float] = _now_s) -> None:
        self._records, self._name, self._root, self._now_s = records, name, root, now_s
        self._number: int | None = None
        self._until_s = 0.0
        self._taken_by = ""
        self.lost = threading.Event()
        """Set once another service has taken the lease."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)

    def holder(self) -> Holder | None:
        """The service that holds the lease now; None where nobody does. Raises SpecError, Unavailable.

        SpecError: that service, or the last one of the jobs in the records, has them in another folder, so this one
        could not go on with them.
        """
        with self._records.reading() as session:
            row = session.get_one(LeaseRow, LEASE)
            held = bool(session.scalar(select(LeaseRow.expires_at > func.clock_timestamp())))
            if row.root != self._root and (held or not session.scalar(select(self._may_be_ours()))):
                raise SpecError(
                    f"the records in `database` belong to a service whose jobs are in {row.root}; name that folder, or "
                    "another database",
                    "root",
                )
            return Holder(row.holder, row.url) if held else None

    def take(self) -> bool:
        """Become active if the lease has expired, and the jobs are in this service's folder; whether it did.

        Raises Unavailable.
        """
        begun_s = self._now_s()
        mine = {"number": LeaseRow.number + 1, "holder": self._name, "url": "", "root": self._root}
        expired = update(LeaseRow).where(LeaseRow.id == LEASE, LeaseRow.expires_at < func.clock_timestamp())
        expired = expired.where(self._may_be_ours())
        with self._records.session() as session:
            found = session.scalars(expired.values(expires_at=_expiry(), **mine).returning(LeaseRow.number)).first()
        if found is None:
            return False
        self._number, self._until_s = found, begun_s + LEASE_S
        self._records.fence = self.fence
        return True

    def keep(self) -> None:
        """Renew it on a thread until `release`."""
        self._thread.start()

    def fence(self) -> int:
        """The number of this service's lease. Raises NotActive where it is lost, or was not renewed in time."""
        if self.lost.is_set() or self._number is None:
            raise NotActive(f"this service is no longer active; {self._taken_by}".rstrip("; "))
        if self._now_s() >= self._until_s:
            raise NotActive(f"this service could not renew its lease of the records for {LEASE_S:g} s")
        return self._number

    def publish(self, url: str) -> None:
        """Write the address of this service's API. Raises NotActive, Unavailable."""
        with self._records.session() as session:
            session.execute(self._mine().values(url=url))

    def release(self) -> None:
        """Stop to renew it, and let another service become active at once."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        try:
            with self._records.session() as session:
                session.execute(self._mine().values(expires_at=func.clock_timestamp()))
        except HeadraceError as error:
            log.info("the lease expires by itself: %s", error)

    def _may_be_ours(self) -> ColumnElement[bool]:
        """Whether the jobs in the records, if there are any, are in this service's folder."""
        return or_(LeaseRow.root.in_(("", self._root)), ~exists(select(JobRow.name)))

    def _mine(self) -> Update:
        return update(LeaseRow).where(LeaseRow.id == LEASE, LeaseRow.number == self._number)

    def _keep(self) -> None:
        while not self.lost.is_set() and not self._closing.wait(RENEW_S):
            try:
                self._renew()
            except HeadraceError as error:
                log.warning("the lease is not renewed: %s", error)
            except Exception:  # a bug must not end this thread: the service would never be active again
                log.exception("the lease is not renewed")

    def _renew(self) -> None:
        """Renew it, also late: while nobody has taken it, it is this service's. Raises Unavailable."""
        begun_s = self._now_s()
        with self._records.unfenced() as session:
            found = session.execute(self._mine().values(expires_at=_expiry()))
            assert isinstance(found, CursorResult)
            if found.rowcount == 1:
                self._until_s = begun_s + LEASE_S
                return
            row = session.get_one(LeaseRow, LEASE)
            self._taken_by = f"{Holder(row.holder, row.url)} has taken its place"
        log.warning("%s", self._taken_by)
        self.lost.set()
