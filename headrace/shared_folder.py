"""Whether the machine of a worker sees a folder of the head: a file of the head proves it, whose name is random.

The name is new in each run, so no cache of a network file system can know whether it is there.
"""

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from headrace.config import Section
from headrace.durable import writing
from headrace.errors import SpecError

FOLDER = "shared"
"""The folder of the proof, in the folder that workers must see."""

STORE = (
    'with store.parts = "shared" its files of commits must go there: mount that folder at the same path on every '
    'machine, or set store.parts = "object"'
)
"""Why the store must be seen."""


class SharedFolder(Section):
    """A folder that every worker must see. Part of the configuration of a worker, which the launcher writes."""

    path: Path
    """The folder, at the same path on each machine."""
    proof: str
    """The file that proves it, relative to the folder."""

    @classmethod
    @contextmanager
    def proved(cls, path: Path) -> Iterator[Self]:
        """`path`, with a file that proves it until the end. Removes what an earlier run left. Raises Unwritable."""
        proof = f"{FOLDER}/{secrets.token_hex(16)}"
        shutil.rmtree(path / FOLDER, ignore_errors=True)
        with writing(path / proof):
            (path / FOLDER).mkdir(mode=0o700)
            (path / proof).touch(mode=0o600)
        try:
            yield cls(path=path, proof=proof)
        finally:
            shutil.rmtree(path / FOLDER, ignore_errors=True)

    def check(self, worker: str, why: str = STORE, at: str = "store.path") -> None:
        """Raise SpecError at the key `at` where the machine of `worker`, which runs here, does not see the folder."""
        try:
            (self.path / self.proof).stat()
        except OSError as error:
            raise SpecError(
                f"{worker} on {os.uname().nodename} does not see {self.path} of the head ({error.strerror}), and {why}",
                at,
            ) from error


# Digests of the files that a job reads: whether two machines have the same ones.

HEAD_BYTES = 64 << 10
"""A file is known by its first bytes; it may grow behind them."""
ABSENT = "absent"
"""In place of the digest of a file that is not there, or cannot be read."""


def head_sizes(paths: Iterable[str], folder: Path) -> dict[str, int]:
    """How many bytes of each file are compared, by its path relative to `folder`. A missing file is left out."""
    return {path: min(HEAD_BYTES, (folder / path).stat().st_size) for path in paths if (folder / path).is_file()}


def digests(sizes: Mapping[str, int], folder: Path) -> dict[str, str]:
    """SHA-256 of the first bytes of each file, by its path. A file that is shorter has the digest of what it has."""
    return {path: _digest(folder / path, size) for path, size in sizes.items()}


def check_digests(worker: str, expected: Mapping[str, str], given: Mapping[str, str]) -> None:
    """Raise SpecError where `worker` reads other files than the head, by their digests."""
    for path, digest in expected.items():
        if (found := given.get(path, ABSENT)) != digest:
            what = "it is not there" if found == ABSENT else f"its first bytes have the digest {found[:16]}"
            raise SpecError(
                f"{worker} reads {path}, and at its machine {what}, where {digest[:16]} is expected; copy the file "
                "from the head to that machine"
            )


def _digest(path: Path, size: int) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.sha256(file.read(size)).hexdigest()
    except OSError:
        return ABSENT
