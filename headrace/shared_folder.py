"""Whether the machine of a worker sees a folder of the head: a file of the head proves it, whose name is random.

The name is new in each run, so no cache of a network file system can know whether it is there.
"""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from headrace.config import Section
from headrace.durable import writing
from headrace.errors import SpecError

FOLDER = "shared"
"""The folder of the proof, in the folder that workers must see."""


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

    def check(self, worker: str) -> None:
        """Raise SpecError where the machine of `worker`, which runs here, does not see the folder."""
        try:
            (self.path / self.proof).stat()
        except OSError as error:
            raise SpecError(
                f"{worker} on {os.uname().nodename} does not see {self.path} of the head ({error.strerror}), and with "
                'store.parts = "shared" its files of commits must go there: mount that folder at the same path on '
                'every machine, or set store.parts = "object"',
                "store.path",
            ) from error
