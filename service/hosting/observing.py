"""What is seen of a job: its folder, its store, and whether its launcher lives. Nothing here changes anything."""

from pathlib import Path

from service.hosting.desired import Observed
from service.hosting.folder import Broken, JobFolder
from service.hosting.register import Entry
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
