"""The store's folder as the launcher sees it: whose it is, whose run it holds, and clearing it.

What workers write into it is theirs; nothing here reads it.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from millrace import documents, job_client
from millrace.deadline import Deadline
from millrace.durable import REAL, Linked, check_no_link, unfinished_name, write_whole, writing
from millrace.errors import DeadlineExceeded, SpecError
from millrace.locks import is_locked, locked

MARKER = "millrace.json"
"""The file that says: this folder is a store. Without it nothing in a folder is ever removed."""
FORMAT = 1
"""Number of a store's layout; a program that meets a newer one says so and leaves it alone."""
MAX_MARKER_BYTES = 1 << 20
"""The longest marker, or note of a run, that is read."""
LOCK = job_client.LOCK
"""Held, as long as it lives, by the launcher whose run this is."""
LOOK_S = 0.2
"""How long who only looks whether it is held may keep it, see `in_use`."""
RUN = "run.json"
"""Which job was started here, and when: written before anything else of a run, and the first to be removed."""
REPORT = "report.json"
"""What the chief writes at the end; gone once the run goes on."""
WORKERS = job_client.WORKERS
"""Private files of the running workers; gone when they are."""
LIVE = "live"
"""The shards' rows while they work on them, a folder each and generation: what is told is in log and commits."""
RERUNS = "reruns"
"""Stores of reruns by number, and where commits that are verified are opened."""
OUTPUT = "output"
"""What the workers of a job that the service hosts print, see service.hosting.output."""
PAUSED = "paused"
"""While it is there the chief plans no pass of events (trainer.planner)."""
LETTERS = "dead_letters"
"""Events that were rejected, see dataset.dead_letters."""
MADE_BY_A_RUN = (
    *(RUN, REPORT, unfinished_name(Path(REPORT)).name, WORKERS),
    *("log", "log.begun", "commits", "holds", LIVE, RERUNS, LETTERS, "halves", "model"),
    *("exports", "exports-stage", OUTPUT, PAUSED),
)
"""All that a run leaves in its store, and all that `--fresh` removes."""


@contextmanager
def claimed(store: Path, job: str, *, fresh: bool) -> Iterator[Path]:
    """Hold `store`, made if absent, for `job`: the run it holds goes on; `fresh` removes it and begins a new one.

    Raises SpecError where the folder is no store, is in use, or holds another job's run and `fresh` is not asked for.
    """
    _make(store)
    with _locked(store, ""):
        if fresh:
            _clear(store)
        check_no_links(store)
        if (store / RUN).exists():
            _check_name(store, job)
            (store / REPORT).unlink(missing_ok=True)  # it tells of an end that is none
        else:
            _check_empty(store)
            _write(store / RUN, {"job": job, "started": datetime.now(UTC).isoformat(timespec="seconds")})
        yield store


def check_run(store: Path, job: str) -> None:
    """Raises SpecError where `store` holds no run of `job`."""
    if not (store / MARKER).exists() or not (store / RUN).exists():
        raise SpecError(f"{store} holds no run; `millrace run` begins one", "store.path")
    _check_marker(store)
    check_no_links(store)
    _check_name(store, job)


@contextmanager
def stopped(store: Path, job: str) -> Iterator[None]:
    """Hold the store of a job that was run and does not run now; none begins meanwhile.

    Raises SpecError where it runs, or the store holds no run of it.
    """
    check_run(store, job)
    with _locked(store, "; this can be done while it is stopped only"):
        yield


def remove(store: Path, job: str) -> None:
    """Remove the run that `store` holds, and with it the folder, unless there is something else in it.

    A folder that is no store is left alone. Raises SpecError where it is in use, or holds another job's run.
    """
    if not (store / MARKER).exists():
        return
    _check_marker(store)
    check_no_link(store / LOCK)
    with _locked(store, "; stop it first"):
        if (store / RUN).exists():
            _check_name(store, job)
        _clear(store)
        (store / MARKER).unlink()
        (store / LOCK).unlink()
    with suppress(OSError):  # it is not empty
        store.rmdir()


def in_use(store: Path) -> bool:
    """Whether a launcher runs a job in `store` now."""
    return is_locked(store / LOCK)


@contextmanager
def _locked(store: Path, hint: str) -> Iterator[None]:
    with ExitStack() as held:
        try:
            held.enter_context(locked(store / LOCK, Deadline.after(LOOK_S)))
        except DeadlineExceeded:
            raise SpecError(f"{store} is in use by a run that is still going on{hint}", "store.path") from None
        yield


def _make(store: Path) -> None:
    """Make sure that `store` is a folder with our marker, for its owner only; one with other things is left alone."""
    check_no_link(store / MARKER)
    check_no_link(store / LOCK)
    with _usable(store):
        store.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (store / MARKER).exists():
            _check_bare(store)
            _write(store / MARKER, {"kind": "store", "format": FORMAT})
        with suppress(PermissionError):  # a volume that somebody else has made for us
            store.chmod(0o700)
    _check_marker(store)


def check_free(store: Path, job: str, *, fresh: bool) -> bool:
    """Whether a start of `job` goes on with a run that `store` holds.

    Raises SpecError where `claimed` would, but for a store that is in use. Nothing is made or removed.
    """
    with _usable(store):
        above = next(path for path in (store, *store.parents) if path.exists())
        if not above.is_dir():
            raise SpecError(f"{store} cannot be used: {above} is a file", "store.path")
        if above != store:
            return False
        check_no_link(store / MARKER)
        if not (store / MARKER).exists():
            _check_bare(store)
        else:
            _check_marker(store)
        if fresh:
            return False
        check_no_links(store)
        if (store / RUN).exists():
            _check_name(store, job)
            return True
        _check_empty(store)
        return False


@contextmanager
def _usable(store: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SpecError(f"{store} cannot be used: {error.strerror}", "store.path") from error


def _check_bare(store: Path) -> None:
    if any(store.iterdir()):
        raise SpecError(
            f"{store} is not empty and no store of Millrace (it has no {MARKER}); choose another folder", "store.path"
        )


def clear_live(store: Path) -> None:
    """Remove the live rows of generations that are gone. Call it while none runs."""
    shutil.rmtree(store / LIVE, ignore_errors=True)  # what stays is in nobody's way: a generation's are its own


def check_no_links(store: Path) -> None:
    """Raise Linked where something of a store, or of one of its folders, is a symbolic link.

    But WORKERS, which may be the launcher's own link to a private folder: it replaces whatever lies there, and follows
    nothing (service.launcher.run_folder). Files of LETTERS are replaced, never followed, by all who write or read them.
    """
    for name in (name for name in (MARKER, LOCK, *MADE_BY_A_RUN) if name != WORKERS):
        path = check_no_link(store / name)
        if path.is_dir() and name != LETTERS:
            with os.scandir(path) as entries:
                linked = sorted(entry.name for entry in entries if entry.is_symlink())
            for entry in linked[:1]:
                raise Linked(path / entry)


def _check_marker(store: Path) -> None:
    """Raise SpecError where the marker is damaged, of something else, or of a newer layout."""
    path = store / MARKER
    whole = json.dumps({"kind": "store", "format": FORMAT})
    try:
        told = documents.read_object(path, MAX_MARKER_BYTES)
    except (OSError, documents.NotReadable) as error:
        raise SpecError(f"{error}: {whole}", "store.path") from error
    number = told.get("format")
    if told.get("kind") != "store" or type(number) is not int or number < 1:
        raise SpecError(f"{path} is damaged, or no store's; a store's holds {whole}", "store.path")
    if number > FORMAT:
        raise SpecError(
            f"{path} is of format {number}, and this Millrace reads format {FORMAT}; run the newer one, or choose "
            "another store.path",
            "store.path",
        )


def _check_name(store: Path, job: str) -> None:
    try:
        name = documents.read_object(store / RUN, MAX_MARKER_BYTES)["job"]
    except (OSError, ValueError, LookupError) as error:
        raise SpecError(
            f"{store / RUN} cannot be read ({error}); give --fresh to remove its run, or choose another folder",
            "store.path",
        ) from error
    if name != job:
        raise SpecError(
            f"{store} holds a run of job {name!r}, not of {job!r}; give --fresh to remove it and begin anew, "
            "or choose another store.path",
            "store.path",
        )


def _check_empty(store: Path) -> None:
    """Without a RUN there must be nothing of a run: a clearing that was cut short would be taken for all there is."""
    if left := [name for name in MADE_BY_A_RUN if (store / name).exists()]:
        raise SpecError(
            f"{store} holds parts of a run ({', '.join(left)}) but no {RUN}; put that back, or give --fresh",
            "store.path",
        )


def _clear(store: Path) -> None:
    for name in MADE_BY_A_RUN:
        path = store / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _write(path: Path, content: dict[str, object]) -> None:
    """Write `content` as JSON, whole or not at all. Raises Unwritable."""
    with writing(path):
        write_whole(REAL, path, json.dumps(content).encode())
