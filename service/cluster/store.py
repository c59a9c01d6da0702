"""The folder of a job's store: its marker, its lock, the run that it holds, and its removal.

Nothing here reads the files of workers.
"""

import json
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from headrace import documents
from headrace.deadline import Deadline
from headrace.durable import (
    REAL,
    SymbolicLinkFound,
    check_no_link,
    is_locked,
    locked,
    unfinished_name,
    write_whole,
    writing,
)
from headrace.errors import DeadlineExceeded, SpecError
from headrace.identity import FOLDER as AUTHORITY_FOLDER
from headrace.rpc import run_files
from headrace.shared_folder import FOLDER as SHARED_FOLDER
from headrace.trainer.exports.scores import EVALUATOR

MARKER = "headrace.json"
"""The file that marks a folder as a store. Nothing in a folder without it is ever removed."""
OLD_MARKER = "millrace.json"
"""The name of that file in a store of before version 0.2, which keeps it."""
FORMAT = 1
"""Number of a store's layout. A store with a newer one is refused and left alone."""
MAX_MARKER_BYTES = 1 << 20
"""Longest MARKER or RUN file."""
LOCK = run_files.LOCK
"""The lock that the launcher of the run holds as long as it lives."""
CHECK_S = 0.2
"""Longest time that `in_use` may hold the lock while it checks it."""
RUN = "run.json"
"""The name of the job and its start. Of a run it is written first and removed first."""
REPORT = "report.json"
"""Rank 0's report at the end of a run; removed when the run continues."""
FRESHNESS = "freshness.json"
"""The last result of `headrace freshness`; see service.history.version_ages."""
WORKERS = run_files.WORKERS
"""Private files of the running workers; removed with them."""
HANDOVER = "handover"
"""The state that workers hand over at a resize: see trainer.checkpoint.handover."""
LIVE = "live"
"""The rows that shards work on: a folder for each shard and generation. Log and commits hold what is durable."""
CACHE = "cache"
"""Files of the newest commit, with `store.parts = "object"`: a folder for each shard, and each trainer but rank 0."""
RERUNS = "reruns"
"""Stores of reruns by number, and where commits that are verified are opened."""
OUTPUT = "output"
"""The output of the workers of a hosted job; see service.jobs.output_files."""
PAUSED = "paused"
"""While this file exists, rank 0 plans no pass of events (trainer.rank0.planner)."""
TRACE = "trace.json"
"""The timeline of the last run with --trace."""
TRACE_REQUEST = "trace-request.json"
"""The last request for a timeline of a run that goes on."""
TRACE_PARTS = "trace-parts"
"""The timelines of the workers of such a run; removed when they are in TRACE."""
TRACE_LOCK = "trace.lock"
"""Held while a timeline of such a run is recorded."""
IDENTITY = AUTHORITY_FOLDER
"""The certificate authority of the job and its join token; kept by `--fresh`, so that tokens stay valid."""
SHARED = SHARED_FOLDER
"""Proves to workers of other machines that they see the store, while it runs; see headrace.shared_folder."""
LETTERS = "dead_letters"
"""Rejected events; see dataset.loader.dead_letters."""
OBJECTS_AT = "objects_at"
"""The address of the object store; see trainer.checkpoint.object_store."""
TUNING = "tuning"
"""Stores of the settings that a new job tries; left by a run that was killed meanwhile, and removed by the next one."""
TUNED = "tuning.json"
"""The settings that the job chose, as the log has them from its first generation on."""
CROSSED = "crosses.json"
"""The crosses that it chose, likewise."""
MADE_BY_A_RUN = (
    *(RUN, REPORT, unfinished_name(Path(REPORT)).name, WORKERS),
    *("log", "log.begun", "commits", HANDOVER, "holds", LIVE, CACHE, RERUNS, LETTERS, "halves", "model"),
    *("exports", "exports-stage", EVALUATOR, OUTPUT, PAUSED, SHARED),
    *(TUNING, TUNED, unfinished_name(Path(TUNED)).name),
    *(CROSSED, unfinished_name(Path(CROSSED)).name),
    *(OBJECTS_AT, unfinished_name(Path(OBJECTS_AT)).name),
    *(TRACE, unfinished_name(Path(TRACE)).name, TRACE_PARTS, TRACE_REQUEST, TRACE_LOCK),
    *(FRESHNESS, unfinished_name(Path(FRESHNESS)).name),
)
"""All files that a run leaves in its store, and all that `--fresh` removes."""


@contextmanager
def claimed(store: Path, job: str, *, fresh: bool) -> Iterator[Path]:
    """Hold `store`, made if absent, for `job`. Its run continues; `fresh` removes it and begins a new one.

    Raises SpecError where the folder is no store, is in use, or holds another job's run without `fresh`.
    """
    _make(store)
    with _locked(store, ""):
        if fresh:
            clear_run(store)
        check_no_links(store)
        if (store / RUN).exists():
            _check_name(store, job)
            (store / REPORT).unlink(missing_ok=True)  # the run has not ended after all
        else:
            _check_empty(store)
            _write(store / RUN, {"job": job, "started": datetime.now(UTC).isoformat(timespec="seconds")})
        yield store


@contextmanager
def held_store(store: Path, job: str) -> Iterator[None]:
    """Hold the store of a job, which stays as it is. Raises SpecError where it is none of the job's, or in use."""
    check_run(store, job)
    with _locked(store, '; predict on its machines once it has ended, or meanwhile with on = "here"'):
        yield


def marker_of(store: Path) -> Path:
    """The marker of a store, or where a new one gets it."""
    old = store / OLD_MARKER
    return old if os.path.lexists(old) else store / MARKER


def check_run(store: Path, job: str) -> None:
    """Raise SpecError where `store` holds no run of `job`."""
    if not marker_of(store).exists() or not (store / RUN).exists():
        raise SpecError(f"{store} holds no run; `headrace run` begins one", "store.path")
    _check_marker(store)
    check_no_links(store)
    _check_name(store, job)


@contextmanager
def stopped(store: Path, job: str) -> Iterator[None]:
    """Hold the store of a job that does not run, so that no run begins meanwhile.

    Raises SpecError where the job runs, or the store holds no run of it.
    """
    check_run(store, job)
    with _locked(store, "; this is possible only while it is stopped"):
        yield


def remove(store: Path, job: str) -> None:
    """Remove the run in `store`, and the folder unless it holds other files.

    A folder that is no store is left alone. Raises SpecError where it is in use or holds another job's run.
    """
    if not marker_of(store).exists():
        return
    _check_marker(store)
    check_no_link(store / LOCK)
    with _locked(store, "; stop it first"):
        if (store / RUN).exists():
            _check_name(store, job)
        clear_run(store)
        shutil.rmtree(store / IDENTITY, ignore_errors=True)
        marker_of(store).unlink()
        (store / LOCK).unlink()
    with suppress(OSError):  # it is not empty
        store.rmdir()


def identity_folder(store: Path) -> Path:
    """The folder of the authority and the join token of a job, in its store, which is made if absent.

    The job may run meanwhile. Raises SpecError where the folder is no store.
    """
    _make(store)
    return check_no_link(store / IDENTITY)


def in_use(store: Path) -> bool:
    """True if a launcher runs a job in `store` now."""
    return is_locked(store / LOCK)


@contextmanager
def _locked(store: Path, hint: str) -> Iterator[None]:
    with ExitStack() as held:
        try:
            held.enter_context(locked(store / LOCK, Deadline.after(CHECK_S)))
        except DeadlineExceeded:
            raise SpecError(f"{store} is in use by a run that has not ended{hint}", "store.path") from None
        yield


def _make(store: Path) -> None:
    """Make `store` a folder with a marker, for its owner only. A folder with other files is refused."""
    check_no_link(marker_of(store))
    check_no_link(store / LOCK)
    with _usable(store):
        store.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not marker_of(store).exists():
            _check_bare(store)
            _write(marker_of(store), {"kind": "store", "format": FORMAT})
        with suppress(PermissionError):  # a volume that another user made
            store.chmod(0o700)
    _check_marker(store)


def check_free(store: Path, job: str, *, fresh: bool) -> bool:
    """True if a start of `job` would continue a run in `store`. Nothing is made or removed.

    Raises SpecError where `claimed` would, except for a store that is in use.
    """
    with _usable(store):
        above = next(path for path in (store, *store.parents) if path.exists())
        if not above.is_dir():
            raise SpecError(f"{store} cannot be used: {above} is a file", "store.path")
        if above != store:
            return False
        check_no_link(marker_of(store))
        if not marker_of(store).exists():
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
    if any(path.name != IDENTITY for path in store.iterdir()):  # put back from another head, before its first run
        raise SpecError(
            f"{store} is not empty and no store of Headrace (it has no {MARKER}); choose another folder", "store.path"
        )


def clear_live(store: Path, *, newest: int | None = None) -> None:
    """Remove the live rows of old generations. Call it while none runs but the one with the number `newest`.

    Without that one, what they handed over goes, too: nobody takes it over any more.
    """
    gone = [store / LIVE, store / HANDOVER] if newest is None else (store / LIVE).glob("*")
    for path in gone:
        if newest is None or not path.name.startswith(f"g{newest}-"):
            shutil.rmtree(path, ignore_errors=True)  # files that stay do no harm: each generation has its own


def clear_live_of(live: Path, generation: int) -> None:
    """Remove the live rows of a worker of `generation`, and those of older generations that were left beside them.

    For a machine of agents, where nobody else does so. Call it while that worker does not run.
    """
    shutil.rmtree(live, ignore_errors=True)
    for path in live.parent.glob("g*-*"):
        number = path.name[1:].partition("-")[0]
        if number.isdecimal() and int(number) < generation:
            shutil.rmtree(path, ignore_errors=True)


def clear_caches(store: Path, kept: Collection[str]) -> None:
    """Remove the cached commits of processes that the job does not have any more. Call it while no generation runs."""
    for path in (store / CACHE).glob("*"):
        if path.name not in kept:
            shutil.rmtree(path, ignore_errors=True)


def check_no_links(store: Path) -> None:
    """Raise SymbolicLinkFound where a file of a store, or in one of its folders, is a symbolic link.

    WORKERS may be the launcher's own link to a private folder: the launcher replaces it and never follows it
    (service.cluster.run_folder). Files in LETTERS are replaced, never followed, by all readers and writers.
    """
    for name in (name for name in (MARKER, OLD_MARKER, LOCK, IDENTITY, *MADE_BY_A_RUN) if name != WORKERS):
        path = check_no_link(store / name)
        if path.is_dir() and name != LETTERS:
            with os.scandir(path) as entries:
                linked = sorted(entry.name for entry in entries if entry.is_symlink())
            for entry in linked[:1]:
                raise SymbolicLinkFound(path / entry)


def _check_marker(store: Path) -> None:
    """Raise SpecError where the marker is damaged, not of a store, or of a newer layout."""
    path = marker_of(store)
    whole = json.dumps({"kind": "store", "format": FORMAT})
    try:
        marker = documents.read_object(path, MAX_MARKER_BYTES)
    except (OSError, documents.InvalidDocument) as error:
        raise SpecError(f"{error}: {whole}", "store.path") from error
    number = marker.get("format")
    if marker.get("kind") != "store" or type(number) is not int or number < 1:
        raise SpecError(f"{path} is damaged or not of a store; the marker of a store holds {whole}", "store.path")
    if number > FORMAT:
        raise SpecError(
            f"{path} is of format {number}, and this Headrace reads format {FORMAT}; run the newer one, or choose "
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
    """Raise SpecError where files of a run exist without RUN: an interrupted removal must not pass for a whole run."""
    if left := [name for name in MADE_BY_A_RUN if (store / name).exists()]:
        raise SpecError(
            f"{store} holds parts of a run ({', '.join(left)}) but no {RUN}; put that back, or give --fresh",
            "store.path",
        )


def clear_run(store: Path) -> None:
    """Remove all files of a run. Call it with the store locked."""
    for name in MADE_BY_A_RUN:
        path = store / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _write(path: Path, content: dict[str, object]) -> None:
    """Write `content` as JSON, atomically. Raises Unwritable."""
    with writing(path):
        write_whole(REAL, path, json.dumps(content).encode())
