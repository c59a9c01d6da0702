"""Records recent figures of running jobs, so that a chart has data from before its page was opened.

It polls the same cache as the API, and keeps a bounded number of records in memory. Closes and their metrics are in the
log, and are not recorded here.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from starlette.concurrency import run_in_threadpool

from headrace.errors import HeadraceError
from headrace.service.api.job_cache import JobCache
from headrace.service.jobs.host import AT_REST
from headrace.service.monitor.alarms import Alarm, alarms
from headrace.service.ui.series import halved
from headrace.trainer.exposed_figures import Number
from headrace.trainer.job_status import Status

log = logging.getLogger(__name__)

EVERY_S = 2.0
MAX_KEPT = 1_200
"""Most records of a job; beyond it every other record of the older half is dropped."""
MAX_CHANGES = 500
"""Most changes of alarms that are kept, of all jobs; beyond it the oldest are dropped."""
MAX_PARTITIONS = 64
"""Most partitions whose lag is recorded separately; of more, only the sum."""


@dataclass(frozen=True, slots=True)
class FigureRecord:
    """A job's figures at one instant."""

    at_ms: float
    events_per_s: Number | None
    samples_per_s: Number | None
    freshness_s: Number | None
    lag: Mapping[str, Number]
    rows: Number | None
    auc: Number | None
    """Window AUC of the first task."""


@dataclass(frozen=True, slots=True)
class AlarmChange:
    """An alarm of a job that began, or is over."""

    at_ms: float
    job: str
    text: str
    began: bool


class Recorder:
    """`look` on any one thread, `moments` on any."""

    def __init__(self, statuses: JobCache, now_s: Callable[[], float] = time.time) -> None:
        self._statuses, self._now_s = statuses, now_s
        self._moments: dict[str, list[FigureRecord]] = {}
        self._alarms: dict[str, Mapping[Alarm, str]] = {}
        self._changes: deque[AlarmChange] = deque(maxlen=MAX_CHANGES)

    def moments(self, job: str) -> Sequence[FigureRecord]:
        """The records of a job, oldest first."""
        return self._moments.get(job, [])

    def alarm_changes(self) -> Sequence[AlarmChange]:
        """Alarms that began or ended since the service started, newest first."""
        return list(reversed(self._changes.copy()))

    async def run(self) -> None:
        """Poll the jobs periodically."""
        while True:
            try:
                await run_in_threadpool(self.look)
            except HeadraceError as error:
                log.warning("the figures of jobs cannot be recorded: %s", error)
            await asyncio.sleep(EVERY_S)

    def look(self) -> None:
        """Record the figures of every running job; drop deleted jobs."""
        jobs = self._statuses.jobs()
        names = {job.name for job in jobs}
        self._moments = {name: kept for name, kept in self._moments.items() if name in names}
        self._alarms = {name: kept for name, kept in self._alarms.items() if name in names}
        for job in jobs:
            if job.phase in AT_REST:
                continue
            try:
                status = self._statuses.of(job.name)
            except HeadraceError:  # it was deleted, or does not answer
                continue
            self._note_alarms(job.name, alarms(status))
            self._moments[job.name] = halved([*self.moments(job.name), moment_of(status, self._now_s())], MAX_KEPT)

    def _note_alarms(self, job: str, now: Mapping[Alarm, str]) -> None:
        before, at_ms = self._alarms.get(job, {}), self._now_s() * 1000
        self._changes += [AlarmChange(at_ms, job, text, True) for alarm, text in now.items() if alarm not in before]
        self._changes += [AlarmChange(at_ms, job, text, False) for alarm, text in before.items() if alarm not in now]
        self._alarms[job] = now


def moment_of(status: Status, now_s: float) -> FigureRecord:
    """The record of a status."""
    lag, rows = status.lag, status.table_rows
    return FigureRecord(
        at_ms=now_s * 1000,
        events_per_s=status.events_per_s,
        samples_per_s=status.samples_per_s,
        freshness_s=status.freshness_s,
        lag=lag if len(lag) <= MAX_PARTITIONS else {"all": sum(lag.values())},
        rows=sum(rows.values()) if rows else None,
        auc=next(iter(status.measures("window").values()), {}).get("auc"),
    )
