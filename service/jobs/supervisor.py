"""Brings each job to its desired state: observes all jobs periodically, and carries out the decided actions.

Only the supervisor starts and kills launchers. service.jobs.decisions decides. The state that the supervisor keeps in
memory (since when a launcher is dead, that it was told to drain) may be lost with the service.
"""

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import assert_never

from msgspec.structs import replace

from headrace.errors import HeadraceError
from headrace.lifecycle import ExitCode
from headrace.service.cluster.job_run import set_paused
from headrace.service.cluster.rank0_connection import RankZeroConnection, address_in
from headrace.service.cluster.runtime import OF_ANY_JOB
from headrace.service.cluster.store import RUN
from headrace.service.cluster.supervision import RestartLimits
from headrace.service.cluster.warm import warm_forkserver
from headrace.service.jobs import launcher_process
from headrace.service.jobs.activation import Fence
from headrace.service.jobs.background import BackgroundWork
from headrace.service.jobs.decisions import (
    Act,
    DrainLauncher,
    FailJob,
    KillLauncher,
    NoAction,
    ObservedState,
    PauseJob,
    ResumeJob,
    StartLauncher,
    decide,
)
from headrace.service.jobs.folder import JobFolder
from headrace.service.jobs.host import Desired, Ending
from headrace.service.jobs.registry import JobRecord, JobRegistry
from headrace.service.records.database import Records, utc_now
from headrace.trainer.job_status import Status

log = logging.getLogger(__name__)

TICK_S = 0.5
"""Time between two checks of every job; a request of a user is noticed at once."""
STATUS_S = 0.5
"""Time between two queries of a launcher's status."""
CHECK_S = 60.0
"""How long the check of the paths in a job's spec may take before a start."""
SERVICE = "service"
"""Name of the service in the audit log, for actions that no user requested."""
LAST_PRINTED = 20
"""Last lines of a dead launcher's output in the outcome of a failed job."""

Check = Callable[[JobRecord], None]
"""Raises SpecError where the service does not allow the job (any more)."""


@dataclass(slots=True)
class _Watched:
    """The state of a job between two checks."""

    id: str = ""
    """Id of the launcher that `line` is connected to."""
    line: RankZeroConnection | None = None
    draining: bool = False
    dead_since_s: float | None = None
    last: Status = Status(state="")
    """The last status of the last launcher; with an empty state where there was none."""
    process: "subprocess.Popen[bytes] | None" = None
    """The launcher's process, if this service started it and must reap it."""
    logged: str = ""
    """The last message about it in the log."""
    check: BackgroundWork[None] | None = None
    """The running check whether the service allows the job."""


class Supervisor:
    """It has a thread; any thread may call its methods."""

    def __init__(
        self,
        register: JobRegistry,
        records: Records,
        check: Check,
        *,
        stop_s: float,
        max_output: int,
        limits: RestartLimits,
        python_of: Callable[[JobRecord], str],
        fence: Fence | None = None,
    ) -> None:
        """`python_of`: the interpreter of a job's build. `fence`: launchers check it at their start."""
        self._register, self._records, self._check, self._fence = register, records, check, fence
        self._python_of = python_of
        self._stop_s, self._max_output, self._limits = stop_s, max_output, limits
        self._watched: dict[str, _Watched] = {}
        self._held = ExitStack()
        self._warm: Mapping[str, str] | None = None
        self.looking = threading.Lock()
        """Held while a job is checked. While another thread holds it, the supervisor does nothing."""
        self._wake, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Check all jobs now."""
        self._wake.set()

    def close(self) -> None:
        """Stop the thread; launchers go on."""
        self._closing.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        self._held.close()
        for watched in self._watched.values():
            if watched.line is not None:
                watched.line.close()
            _abandon(watched)

    def observed(self, entry: JobRecord) -> ObservedState:
        """The present state of the job."""
        watched = self._watched.get(entry.name, _Watched())
        return launcher_process.observed(entry, draining=watched.draining, dead_since_s=watched.dead_since_s)

    def status(self, name: str) -> Status:
        """The last status of the job's launcher; its state is empty if there was none since this service started."""
        watched = self._watched.get(name, _Watched())
        return watched.last if watched.line is None else watched.line.status

    def forget(self, name: str) -> None:
        """Drop a deleted job. The caller holds `looking`."""
        watched = self._watched.pop(name, None)
        if watched is not None:
            _abandon(watched)
            if watched.line is not None:
                watched.line.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._wake.clear()
            for entry in self._register.all():
                with self.looking:
                    self._supervise(entry.name)
            self._wake.wait(TICK_S)

    def _supervise(self, name: str) -> None:
        """Check one job and act on it. Its errors do not affect other jobs."""
        watched = self._watched.setdefault(name, _Watched())
        try:
            entry = self._register.get(name)
            self._connect(entry, watched)
            seen = self.observed(entry)
            act = decide(entry.wanted, seen, time.time(), self._stop_s, self._limits)
            if not isinstance(act, NoAction):
                self._records.check_active()
                self._log(name, watched, f"{type(act).__name__}: {act.reason}")
            self._carry_out(entry, watched, act)
        except (HeadraceError, OSError) as error:
            self._log(name, watched, f"{error}")
        except Exception:  # a bug: the other jobs must go on
            log.exception("job %s", name)

    def _connect(self, entry: JobRecord, watched: _Watched) -> None:
        """Keep a connection to the running launcher, and to no other."""
        if watched.process is not None and watched.process.poll() is not None:
            watched.process = None
        if not entry.folder.alive():
            if watched.line is not None:
                watched.last = watched.line.status
                watched.line.close()
            watched.id, watched.line, watched.draining = "", None, False
            watched.dead_since_s = watched.dead_since_s or time.time()
            return
        watched.dead_since_s = None
        assigned = entry.folder.assigned()
        if assigned is not None and assigned.id != watched.id:
            before = replace(watched.last, job=entry.name, state="starting", stalled=None)
            watched.line = RankZeroConnection(
                before, address_in(entry.folder.address), assigned.secret, STATUS_S, worker="the launcher"
            )
            watched.id, watched.draining = assigned.id, False
            watched.line.start()

    def _carry_out(self, entry: JobRecord, watched: _Watched, act: Act) -> None:
        if not isinstance(act, StartLauncher):
            watched.check = None  # its result may be outdated later
        match act:
            case StartLauncher():
                self._start(entry, watched, act)
            case DrainLauncher():
                if watched.line is not None:
                    watched.line.drain()
                    watched.draining = True
            case KillLauncher():
                if entry.folder.kill():
                    self._audit("kill", entry, act.reason)
            case PauseJob() | ResumeJob():
                if (
                    entry.store / RUN
                ).exists():  # before that, the launcher would take the file for part of another run
                    set_paused(entry.store, isinstance(act, PauseJob))
            case FailJob():
                self._give_up(entry, ExitCode.BUG, act.reason)
            case NoAction():
                pass
            case _:
                assert_never(act)

    def _start(self, entry: JobRecord, watched: _Watched, act: StartLauncher) -> None:
        """Start a launcher, once a check in the background finds that the service still allows the job."""
        if watched.check is None:
            watched.check = BackgroundWork(lambda: self._check(entry), within_s=CHECK_S, at_end=self.wake)
        if not watched.check.ended():
            return
        check, watched.check = watched.check, None
        try:
            check.result()
        except HeadraceError as error:
            self._give_up(entry, error.exit_code, str(error))
            return
        except OSError as error:
            self._give_up(entry, ExitCode.FAILED, f"a path in its spec cannot be checked: {error}")
            return
        if act.death is not None:  # first, so that the death counts even if the service dies here
            self._register.change(entry.name, {"deaths": (*entry.deaths, act.death)})
        self._audit("start", entry, act.reason)
        paused = entry.desired is Desired.PAUSED
        python = self._python_of(entry)
        watched.process = launcher_process.start_launcher(
            entry.folder,
            entry.ask,
            paused=paused,
            max_output=self._max_output,
            fence=self._fence,
            python=python,
            variables=self._variables() if python == sys.executable else {},
        )
        watched.dead_since_s = None

    def _variables(self) -> Mapping[str, str]:
        """The variables by which launchers find the warm forkserver, which is started with the first of them."""
        if self._warm is None:
            self._warm = self._held.enter_context(warm_forkserver(OF_ANY_JOB))
        return self._warm

    def _give_up(self, entry: JobRecord, code: int, reason: str) -> None:
        ending = Ending(code, reason, last_printed(entry.folder), utc_now())
        self._audit("give up", entry, reason)
        entry.folder.write_outcome(entry.ask, ending, replace(self.status(entry.name), state="failed"))

    def _audit(self, what: str, entry: JobRecord, reason: str) -> None:
        self._records.audit(SERVICE, what, entry.name, {"reason": reason})

    def _log(self, name: str, watched: _Watched, message: str) -> None:
        """Log a message once, not at every check."""
        if message != watched.logged:
            watched.logged = message
            log.warning("job %s: %s", name, message)


def _abandon(watched: _Watched) -> None:
    """Keep Python from warning about a launcher that this process does not wait for, as it outlives the service."""
    if watched.process is not None and watched.process.poll() is None:
        watched.process.returncode = 0


def last_printed(folder: JobFolder) -> tuple[str, ...]:
    """The last lines of a launcher's own output."""
    try:
        return tuple(folder.printed.read_text(errors="replace").splitlines()[-LAST_PRINTED:])
    except OSError:
        return ()
