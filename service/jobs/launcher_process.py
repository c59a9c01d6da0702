"""A job's launcher as the service sees it: started such that it outlives the service, and observed by its folder."""

import secrets
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from headrace.deadline import Deadline
from headrace.durable import locked, writing
from headrace.process import unbuffered
from headrace.service.cluster.runtime import PYTHON
from headrace.service.cluster.store import PAUSED, RUN, in_use
from headrace.service.jobs.activation import Fence
from headrace.service.jobs.builds import variables_for
from headrace.service.jobs.decisions import ObservedState
from headrace.service.jobs.folder import Assignment, FolderDamaged, JobFolder
from headrace.service.jobs.output_files import emptied_file
from headrace.service.jobs.registry import JobRecord


def observed(entry: JobRecord, *, draining: bool = False, dead_since_s: float | None = None) -> ObservedState:
    """The present state of the job; broken if it cannot be read. The supervisor remembers the keyword arguments."""
    alive = False
    try:
        alive = entry.folder.alive()
        return _observed(entry, alive, draining, dead_since_s)
    except FolderDamaged as error:
        return ObservedState(alive=alive, broken=str(error))
    except (OSError, ValueError) as error:
        problem = f"its folder {entry.folder.path} or its store {entry.store} cannot be used ({error})"
        return ObservedState(alive=alive, broken=f"{problem}; repair it, or delete the job")


def _observed(entry: JobRecord, alive: bool, draining: bool, dead_since_s: float | None) -> ObservedState:
    """Raises FolderDamaged, OSError, ValueError."""
    folder = entry.folder
    assigned = folder.assigned()
    outcome = folder.outcome(entry.ask)
    broken = "" if alive else _what_is_wrong(entry, folder)
    return ObservedState(
        alive=alive,
        ask=None if assigned is None else assigned.ask,
        ending=None if outcome is None else outcome[0],
        paused=(entry.store / PAUSED).exists(),
        draining=draining,
        dead_since_s=dead_since_s,
        broken=broken,
        foreign="" if alive or not in_use(entry.store) or folder.alive() else _foreign(entry.store),
    )


def _what_is_wrong(entry: JobRecord, folder: JobFolder) -> str:
    """Why no launcher can be started now; empty where one can. Raises FolderDamaged."""
    spec, base = folder.job()
    if spec != entry.spec or base != entry.base:
        return f"{folder.path / 'job.json'} differs from the service's records; put it back, or delete the job"
    assigned, process = folder.assigned(), folder.process()
    began = assigned is not None and process is not None and process.id == assigned.id and process.claimed
    if began and not (entry.store / RUN).exists():
        return f"{_what_is_missing(entry.store)}, though the job has run; put its store back, or delete the job"
    return ""


def _foreign(store: Path) -> str:
    return f"{store} is in use by a run or a command outside of this service; the job starts once that has ended"


def _what_is_missing(store: Path) -> str:
    return f"{store} holds no run" if store.exists() else f"{store} is missing"


def build_of(folder: JobFolder) -> tuple[str, str]:
    """Version and identity of the environment of the job's present or last launcher; empty where not known."""
    try:
        process = folder.process()
    except FolderDamaged:
        return "", ""
    return ("", "") if process is None else (process.version, process.environment)


def _behind(fence: Fence | None) -> list[str]:
    return [] if fence is None else ["--fence-file", str(fence.file), "--fence", str(fence.number)]


LOCK_S = 1.0
"""How long to wait for a process that holds the lock while it checks whether a launcher runs."""


def start_launcher(
    folder: JobFolder,
    ask: int,
    *,
    paused: bool,
    max_output: int,
    fence: Fence | None = None,
    python: str = sys.executable,
    variables: Mapping[str, str] = {},
) -> "subprocess.Popen[bytes]":
    """Start a launcher for the job of `folder`. Raises DeadlineExceeded where one runs, Unwritable, and OSError.

    1. Take the folder's lock. 2. Write the launcher's identity. 3. Start it. It inherits the lock, so that it holds the
    lock from its first instant to its end. Behind a `fence` it ends at once where a newer service is active.
    `python`: the interpreter of its build. `variables`: more of the environment.
    """
    with locked(folder.lock, Deadline.after(LOCK_S)) as lock:  # 1
        folder.address.unlink(missing_ok=True)
        folder.assign(Assignment(secrets.token_hex(8), ask, secrets.token_hex(32)))  # 2
        with writing(folder.printed):
            printed = emptied_file(folder.printed)
        command = [python, *PYTHON[1:], "headrace.service.jobs.launcher", str(folder.path), "--lock", str(lock)]
        with printed:
            return subprocess.Popen(  # 3
                [*command, "--max-output", str(max_output), *(["--paused"] if paused else []), *_behind(fence)],
                cwd=folder.path,
                env=unbuffered({**variables_for(python), **variables}),
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                pass_fds=[lock],
                start_new_session=True,
            )
