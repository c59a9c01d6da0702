"""Sees to it that each job is as it is wanted: looks at every one, again and again, and does what is decided.

It is the only one that starts and kills launchers. What to do is service.hosting.desired's decision; what it remembers
between two looks (since when a launcher is dead, that it was asked to drain) is no loss where the service dies.
"""

import logging
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, assert_never

from millrace.errors import MillraceError
from millrace.lifecycle import ExitCode
from service.access.background import Background
from service.hosting import observing
from service.hosting.desired import (
    Act,
    AskToDrain,
    GiveUp,
    Hold,
    Kill,
    LetGo,
    Nothing,
    Observed,
    Start,
    decide,
)
from service.hosting.folder import JobFolder
from service.hosting.host import Desired, Ending
from service.hosting.register import Entry, Register
from service.launcher.chief import ChiefLine, address_in
from service.launcher.restarts import RestartLimits
from service.launcher.running import hold
from service.records.database import Records, utc_now
from service.store import RUN

log = logging.getLogger(__name__)

TICK_S = 0.5
"""How often every job is looked at; a wish of somebody's is seen at once."""
STATUS_S = 0.5
"""How often a launcher is asked for its status."""
CHECK_S = 60.0
"""How long it may take to look up what a job's spec names, before it is started."""
SERVICE = "service"
"""Who did what nobody asked for, in the audit log."""
LAST_PRINTED = 20
"""Lines of what a dead launcher printed, as told where it is given up."""

Check = Callable[[Entry], None]
"""Raises SpecError where the service does not allow the job (any more)."""


@dataclass(slots=True)
class _Watched:
    """What is remembered of a job between two looks."""

    id: str = ""
    """Of the launcher that `line` goes to."""
    line: ChiefLine | None = None
    draining: bool = False
    dead_since_s: float | None = None
    last: Mapping[str, Any] = field(default_factory=dict)
    """What the last launcher said last."""
    process: "subprocess.Popen[bytes] | None" = None
    """Where this service started it: to be reaped."""
    said: str = ""
    """The last thing that was logged of it."""
    check: Background[None] | None = None
    """Whether it may be started, while that is looked up."""


class Supervisor:
    """See module docstring. A thread; its methods may be called by any."""

    def __init__(
        self,
        register: Register,
        records: Records,
        check: Check,
        *,
        stop_s: float,
        max_output: int,
        limits: RestartLimits,
    ) -> None:
        self._register, self._records, self._check = register, records, check
        self._stop_s, self._max_output, self._limits = stop_s, max_output, limits
        self._watched: dict[str, _Watched] = {}
        self.looking = threading.Lock()
        """Held while a job is looked at; who holds it is not interfered with."""
        self._wake, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def wake(self) -> None:
        """Look now."""
        self._wake.set()

    def close(self) -> None:
        """Stop looking; launchers go on."""
        self._closing.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        for watched in self._watched.values():
            if watched.line is not None:
                watched.line.close()
            _let_go(watched)

    def observed(self, entry: Entry) -> Observed:
        """The job as it is now."""
        watched = self._watched.get(entry.name, _Watched())
        return observing.observed(entry, draining=watched.draining, dead_since_s=watched.dead_since_s)

    def status(self, name: str) -> Mapping[str, Any]:
        """What the job's launcher said last; nothing, where none did while this service lived."""
        watched = self._watched.get(name, _Watched())
        return watched.last if watched.line is None else watched.line.status

    def forget(self, name: str) -> None:
        """The job is no more. Call it while `looking` is held."""
        watched = self._watched.pop(name, None)
        if watched is not None:
            _let_go(watched)
            if watched.line is not None:
                watched.line.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._wake.clear()
            for entry in self._register.all():
                with self.looking:
                    self._look_after(entry.name)
            self._wake.wait(TICK_S)

    def _look_after(self, name: str) -> None:
        """One look at one job; whatever is wrong with it is its own trouble."""
        watched = self._watched.setdefault(name, _Watched())
        try:
            entry = self._register.get(name)
            self._listen(entry, watched)
            seen = self.observed(entry)
            act = decide(entry.wanted, seen, time.time(), self._stop_s, self._limits)
            self._tell(name, watched, act)
            self._carry_out(entry, watched, act)
        except (MillraceError, OSError) as error:
            self._say(name, watched, f"{error}")
        except Exception:  # the other jobs must not suffer from what is a bug
            log.exception("job %s", name)

    def _listen(self, entry: Entry, watched: _Watched) -> None:
        """Have a line to the launcher that lives, and to no other."""
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
        told = entry.folder.told()
        if told is not None and told.id != watched.id:
            before = {**watched.last, "job": entry.name, "state": "starting", "stalled": None}
            watched.line = ChiefLine(
                before, address_in(entry.folder.address), told.secret, STATUS_S, worker="the launcher"
            )
            watched.id, watched.draining = told.id, False
            watched.line.start()

    def _carry_out(self, entry: Entry, watched: _Watched, act: Act) -> None:
        if not isinstance(act, Start):
            watched.check = None  # what was allowed then may not be later
        match act:
            case Start():
                self._start(entry, watched, act)
            case AskToDrain():
                if watched.line is not None:
                    watched.line.drain()
                    watched.draining = True
            case Kill():
                if entry.folder.kill():
                    self._audit("kill", entry, act.reason)
            case Hold() | LetGo():
                if (entry.store / RUN).exists():  # before, the launcher would take the file for a part of another run
                    hold(entry.store, isinstance(act, Hold))
            case GiveUp():
                self._give_up(entry, ExitCode.BUG, act.reason)
            case Nothing():
                pass
            case _:
                assert_never(act)

    def _start(self, entry: Entry, watched: _Watched, act: Start) -> None:
        """Start a launcher, once it is looked up, aside from other jobs, that the service (still) allows the job."""
        if watched.check is None:
            watched.check = Background(lambda: self._check(entry), within_s=CHECK_S, at_end=self.wake)
        if not watched.check.ended():
            return
        check, watched.check = watched.check, None
        try:
            check.result()
        except MillraceError as error:
            self._give_up(entry, error.exit_code, str(error))
            return
        except OSError as error:
            self._give_up(entry, ExitCode.FAILED, f"what its spec names cannot be looked at: {error}")
            return
        if act.death is not None:  # first: a service that dies here has counted it
            self._register.change(entry.name, {"deaths": (*entry.deaths, act.death)})
        self._audit("start", entry, act.reason)
        paused = entry.desired is Desired.PAUSED
        watched.process = observing.start_launcher(entry.folder, entry.ask, paused=paused, max_output=self._max_output)
        watched.dead_since_s = None

    def _give_up(self, entry: Entry, code: int, reason: str) -> None:
        ending = Ending(code, reason, last_printed(entry.folder), utc_now())
        self._audit("give up", entry, reason)
        entry.folder.write_outcome(entry.ask, ending, {**self.status(entry.name), "state": "failed"})

    def _audit(self, what: str, entry: Entry, reason: str) -> None:
        self._records.audit(SERVICE, what, entry.name, {"reason": reason})

    def _tell(self, name: str, watched: _Watched, act: Act) -> None:
        if not isinstance(act, Nothing):
            self._say(name, watched, f"{type(act).__name__}: {act.reason}")

    def _say(self, name: str, watched: _Watched, words: str) -> None:
        """Log it once, not at every look."""
        if words != watched.said:
            watched.said = words
            log.warning("job %s: %s", name, words)


def _let_go(watched: _Watched) -> None:
    """A launcher outlives who started it, and is not to be waited for: Python would warn of a process forgotten."""
    if watched.process is not None and watched.process.poll() is None:
        watched.process.returncode = 0


def last_printed(folder: JobFolder) -> tuple[str, ...]:
    """The last lines that a launcher printed itself."""
    try:
        return tuple(folder.printed.read_text(errors="replace").splitlines()[-LAST_PRINTED:])
    except OSError:
        return ()
