"""A private folder for temporary files of one process; one that a killed process has left goes at the next start."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headrace.durable import writing


@contextmanager
def private_folder(kind: str) -> Iterator[Path]:
    """A new folder, for its owner only, until the end. `kind`, a word, is part of its name.

    Its process holds a lock on it. Folders of this kind and owner that nobody holds are removed first. Raises
    Unwritable.
    """
    prefix = f"headrace-{kind}-"
    _remove_left_over(prefix)
    path, lock = _made(prefix)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _made(prefix: str) -> tuple[Path, int]:
    """A new folder, and the descriptor that holds its lock.

    Until it is locked another process may take it for one that was left; then it is made again.
    """
    while True:
        with writing(Path(tempfile.gettempdir())):
            path = Path(tempfile.mkdtemp(prefix=prefix))
        with suppress(FileNotFoundError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                return path, lock
            os.close(lock)


def _remove_left_over(prefix: str) -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):  # of another owner, in use, or just removed
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.geteuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path)
            finally:
                os.close(lock)
