"""A disk of a few MiB that a test can fill: a tmpfs, for whoever may mount one."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

PAGE = 4096
"""What a tmpfs gives out at a time."""


class SmallDisk:
    """A mounted disk, empty but for what fills it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def leave(self, num_bytes: int) -> None:
        """Have no more than so much room, in whole pages."""
        with self._filler.open("ab", buffering=0) as file:
            while (more := self.room() - num_bytes) > 0:
                with suppress(OSError):  # someone else, a compaction for one, took room meanwhile: look again
                    file.write(bytes(more))
        spare = num_bytes // PAGE * PAGE - self.room()
        if spare > 0:
            os.truncate(self._filler, max(0, self._filler.stat().st_size - spare))

    def leave_names(self, number: int) -> None:
        """Have no more than so many files that can still be made."""
        self._filler.mkdir(exist_ok=True)
        fillers = sorted(self._filler.iterdir(), key=lambda path: int(path.name))
        for name in range(len(fillers), len(fillers) + self.names() - number):
            (self._filler / str(name)).touch()
        for path in fillers[len(fillers) - (number - self.names()) :] if number > self.names() else ():
            path.unlink()

    def free(self) -> None:
        """Have all room there is."""
        if self._filler.is_dir():
            for path in self._filler.iterdir():
                path.unlink()
            self._filler.rmdir()
        self._filler.unlink(missing_ok=True)

    def room(self) -> int:
        """Bytes that are free."""
        stat = os.statvfs(self.folder)
        return stat.f_bavail * stat.f_frsize

    def names(self) -> int:
        """Files that can still be made."""
        return os.statvfs(self.folder).f_ffree


@contextmanager
def small_disk(folder: Path, num_bytes: int = 8 << 20, num_names: int = 1000) -> Iterator[SmallDisk]:
    """A disk mounted on the folder, made for it; skips the test where mounting is not allowed."""
    folder.mkdir(parents=True)
    options = f"size={num_bytes},nr_inodes={num_names}"
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
