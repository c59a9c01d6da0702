"""The store's folder as the launcher sees it: whose it is, whether it holds a run, and clearing it.

What trainers write into it is theirs; nothing here reads it but the report's presence.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from millrace.errors import SpecError

MARKER = "millrace.json"
"""The file that says: this folder is a store. Without it nothing in a folder is ever removed."""
LOCK = "lock"
"""Held, as long as it lives, by the launcher whose run this is."""
RUN = "run.json"
"""Which job was started here, and when: its presence is what makes a store hold a run."""
REPORT = "report.json"
"""What the chief writes at the end."""
WORKERS = "workers"
"""Private files of the running workers; gone when they are."""
MADE_BY_A_RUN = (RUN, REPORT, f".{REPORT}", WORKERS, "log", "dead_letters", "halves", "model")
"""All that a run leaves in its store, and all that `--fresh` removes."""


@contextmanager
def claimed(store: Path, job: str, *, fresh: bool) -> Iterator[Path]:
    """Hold `store`, made if absent, for a new run of `job`; `fresh` first removes what an earlier run left.

    Raises SpecError where the folder is no store, is in use, or holds a run and `fresh` is not asked for.
    """
    _make(store)
    with (store / LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SpecError(f"{store} is in use by a run that is still going on", "store.path") from None
        if fresh:
            _clear(store)
        elif (store / RUN).exists() or (store / REPORT).exists():
            raise SpecError(
                f"{store} holds a run already; give --fresh to remove it and begin anew, or choose another store.path",
                "store.path",
            )
        _write(store / RUN, {"job": job, "started": datetime.now(UTC).isoformat(timespec="seconds")})
        yield store


def _make(store: Path) -> None:
    """Make sure that `store` is a folder with our marker; a folder with other things in it is left alone."""
    try:
        store.mkdir(parents=True, exist_ok=True)
        if not (store / MARKER).exists():
            if any(store.iterdir()):
                raise SpecError(
                    f"{store} is not empty and no store of Millrace (it has no {MARKER}); choose another folder",
                    "store.path",
                )
            _write(store / MARKER, {"kind": "store", "format": 1})
    except OSError as error:
        raise SpecError(f"{store} cannot be used: {error.strerror}", "store.path") from error


def _clear(store: Path) -> None:
    for name in MADE_BY_A_RUN:
        path = store / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _write(path: Path, content: dict[str, object]) -> None:
    """Write `content` as JSON, whole or not at all."""
    unfinished = path.with_name(f"{path.name}.tmp")
    unfinished.write_text(json.dumps(content), encoding="utf-8")
    os.replace(unfinished, path)
