"""The private folder of one generation: configurations with secrets, sockets, the address of rank 0."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.durable import writing


@contextmanager
def run_folder(path: Path) -> Iterator[Path]:
    """`path`, new, empty, and readable by the owner only. It is removed at the end."""
    shutil.rmtree(
        path, ignore_errors=True
    )  # left by a launcher that was killed: the caller holds the lock of the store
    with writing(path):
        path.mkdir(parents=True, mode=0o700)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def worker_folder(path: Path, private: Path | None) -> Iterator[Path]:
    """The run folder `path`; or `private`, where that is given, with a symbolic link to it at `path`.

    With `private`, a process that may only write to the store cannot reach the files.
    """
    _remove(path)
    if private is None:
        with run_folder(path) as folder:
            yield folder
        return
    with run_folder(private) as folder:
        with writing(path):
            path.symlink_to(private)
        try:
            yield folder
        finally:
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def write_private(path: Path, content: Mapping[str, Any] | Sequence[Any]) -> None:
    """Write `content` as JSON: whole or not at all, readable by the owner only. Raises Unwritable."""
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        with writing(path):
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(content, file, default=str)  # str: TOML's dates
            unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
