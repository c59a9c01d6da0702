"""The jobs of a service and their desired states, in the database and in memory; only this service writes them.

The actual state of a job is in its folder.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from sqlalchemy import delete, select

from headrace.service.cluster.supervision import Death
from headrace.service.jobs.decisions import DesiredState
from headrace.service.jobs.errors import JobExists, LimitReached, UnknownJob
from headrace.service.jobs.folder import JobFolder
from headrace.service.jobs.host import Desired
from headrace.service.records.database import Records, utc_now
from headrace.service.records.schema import JobRow, of_row

BY_PEOPLE = ("desired", "ask", "build")
"""Changes of these fields count as revisions; changes by the service itself do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """One job; see JobRow."""

    name: str
    spec: Mapping[str, Any] = field(repr=False)
    """With its secrets, for the job's launcher only."""
    folder: JobFolder
    base: Path
    desired: Desired
    ask: int = 1
    asked_at: datetime
    deaths: tuple[Death, ...] = ()
    revision: int = 1
    created_at: datetime
    changed_at: datetime
    created_by: str
    build: str = ""
    """The name of its build; empty: the service's own environment."""

    @property
    def store(self) -> Path:
        """Its store; for a damaged record the default store."""
        try:
            return (self.base / str(self.spec["store"]["path"])).resolve()
        except (
            LookupError,
            TypeError,
            OSError,
            RuntimeError,
            ValueError,
        ):  # the key is missing, or the path is invalid
            return self.folder.own_store

    @property
    def wanted(self) -> DesiredState:
        """The requests of users."""
        return DesiredState(desired=self.desired, ask=self.ask, asked_s=self.asked_at.timestamp(), deaths=self.deaths)


class JobRegistry:
    """Any thread."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._lock = threading.Lock()
        with records.reading() as session:
            self._entries = {row.name: _entry(row) for row in session.scalars(select(JobRow))}

    def all(self) -> list[JobRecord]:
        """All jobs, by name."""
        with self._lock:
            return [self._entries[name] for name in sorted(self._entries)]

    def get(self, name: str) -> JobRecord:
        """One job. Raises UnknownJob."""
        with self._lock:
            return self._get(name)

    def check_room(self, name: str, max_jobs: int) -> None:
        """Raise JobExists or LimitReached where no job of that name can be added."""
        with self._lock:
            self._check_room(name, max_jobs)

    def add(self, entry: JobRecord, max_jobs: int) -> None:
        """Add a job. Raises JobExists, LimitReached."""
        with self._lock:
            self._check_room(entry.name, max_jobs)
            with self._records.session() as session:
                session.add(_row(entry))
            self._entries[entry.name] = entry

    def change(self, name: str, changes: Mapping[str, Any]) -> JobRecord:
        """Change fields of a job; the changed job. Raises UnknownJob."""
        with self._lock:
            entry = self._get(name)
            if not changes:
                return entry
            changed = replace(entry, **changes)
            return self._keep(_revised(changed) if any(key in BY_PEOPLE for key in changes) else changed)

    def revised(self, name: str) -> JobRecord:
        """Count a change of a job that is not in its record; the changed job. Raises UnknownJob."""
        with self._lock:
            return self._keep(_revised(self._get(name)))

    def remove(self, name: str) -> None:
        """Delete a job."""
        with self._lock:
            with self._records.session() as session:
                session.execute(delete(JobRow).where(JobRow.name == name))
            self._entries.pop(name, None)

    def _keep(self, entry: JobRecord) -> JobRecord:
        with self._records.session() as session:
            session.merge(_row(entry))
        self._entries[entry.name] = entry
        return entry

    def _get(self, name: str) -> JobRecord:
        if name not in self._entries:
            raise UnknownJob(name, sorted(self._entries))
        return self._entries[name]

    def _check_room(self, name: str, max_jobs: int) -> None:
        if name in self._entries:
            raise JobExists(name)
        if len(self._entries) >= max_jobs:
            raise LimitReached(
                f"there are {len(self._entries)} jobs, as many as limits.max_jobs allows; delete one, or allow more"
            )


def _revised(entry: JobRecord) -> JobRecord:
    return replace(entry, revision=entry.revision + 1, changed_at=utc_now())


@of_row
def _entry(row: JobRow) -> JobRecord:
    return JobRecord(
        name=row.name,
        spec=row.spec,
        folder=JobFolder(Path(row.folder)),
        base=Path(row.base),
        desired=Desired(row.desired),
        ask=row.ask,
        asked_at=row.asked_at,
        deaths=tuple(Death(death["at_s"], death["reason"]) for death in row.deaths),
        revision=row.revision,
        created_at=row.created_at,
        changed_at=row.changed_at,
        created_by=row.created_by,
        build=row.build,
    )


def _row(entry: JobRecord) -> JobRow:
    return JobRow(
        name=entry.name,
        spec=dict(entry.spec),
        folder=str(entry.folder.path),
        base=str(entry.base),
        desired=entry.desired.value,
        ask=entry.ask,
        asked_at=entry.asked_at,
        deaths=[{"at_s": death.at_s, "reason": death.reason} for death in entry.deaths],
        revision=entry.revision,
        created_at=entry.created_at,
        changed_at=entry.changed_at,
        created_by=entry.created_by,
        build=entry.build,
    )
