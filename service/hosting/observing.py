"""A job's launcher as the service sees it: started such that it outlives the service, and observed by its folder."""

import os
import secrets
import subprocess
from pathlib import Path

from millrace.deadline import Deadline
from millrace.durable import writing
from millrace.locks import locked
from millrace.process import unbuffered
from service.hosting.desired import Observed
from service.hosting.folder import Broken, JobFolder, Told
from service.hosting.output import begun
from service.hosting.register import Entry
from service.launcher.plan import PYTHON
from service.store import PAUSED, RUN, in_use


def observed(entry: Entry, *, draining: bool = False, dead_since_s: float | None = None) -> Observed:
    """The job now, broken where it cannot be seen; `draining` and `dead_since_s` are what the supervisor remembers."""
    alive = False
    try:
        alive = entry.folder.alive()
        return _observed(entry, alive, draining, dead_since_s)
    except Broken as error:
        return Observed(alive=alive, broken=str(error))
    except (OSError, ValueError) as error:
        told = f"its folder {entry.folder.path} or its store {entry.store} cannot be used ({error})"
        return Observed(alive=alive, broken=f"{told}; mend it, or delete the job")


def _observed(entry: Entry, alive: bool, draining: bool, dead_since_s: float | None) -> Observed:
    """Raises Broken, OSError, ValueError."""
    folder = entry.folder
    told = folder.told()
    outcome = folder.outcome(entry.ask)
    broken = "" if alive else _what_is_wrong(entry, folder)
    return Observed(
        alive=alive,
        ask=None if told is None else told.ask,
        ending=None if outcome is None else outcome[0],
        paused=(entry.store / PAUSED).exists(),
        draining=draining,
        dead_since_s=dead_since_s,
        broken=broken,
        foreign="" if alive or not in_use(entry.store) or folder.alive() else _foreign(entry.store),
    )


def _what_is_wrong(entry: Entry, folder: JobFolder) -> str:
    """Why no launcher can be started now; empty where one can. Raises Broken."""
    spec, base = folder.job()
    if spec != entry.spec or base != entry.base:
        return f"{folder.path / 'job.json'} is not what the service's records have; put it back, or delete the job"
    told, known = folder.told(), folder.known()
    began = told is not None and known is not None and known.id == told.id and known.claimed
    if began and not (entry.store / RUN).exists():
        return f"{_there(entry.store)}, though the job has run; put its store back, or delete the job"
    return ""


def _foreign(store: Path) -> str:
    return f"{store} is in use by a run or a command that is not this service's; it begins once that has ended"


def _there(store: Path) -> str:
    return f"{store} holds no run" if store.exists() else f"{store} is gone"


LOCK_S = 1.0
"""How long to wait for who only looks whether a launcher runs."""


def start_launcher(folder: JobFolder, ask: int, *, paused: bool, max_output: int) -> "subprocess.Popen[bytes]":
    """A launcher for the job of `folder`. Raises DeadlineExceeded where one runs, Unwritable, and OSError.

    1. Hold the folder's lock. 2. Tell the launcher who it is. 3. Start it; it inherits the lock, so that there is no
    instant at which it runs and does not hold it, and it holds it as long as it lives.
    """
    with locked(folder.lock, Deadline.after(LOCK_S)) as lock:  # 1
        folder.address.unlink(missing_ok=True)
        folder.tell(Told(secrets.token_hex(8), ask, secrets.token_hex(32)))  # 2
        with writing(folder.printed):
            printed = begun(folder.printed)
        command = [*PYTHON, "service.hosting.launching", str(folder.path), "--lock", str(lock)]
        with printed:
            return subprocess.Popen(  # 3
                [*command, "--max-output", str(max_output), *(["--paused"] if paused else [])],
                cwd=folder.path,
                env=unbuffered(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                pass_fds=[lock],
                start_new_session=True,
            )
