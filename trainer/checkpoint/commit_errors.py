"""Errors of the committer.

HeadraceError
+-- CommitFailed     nothing is left of it; the next commit may succeed
+-- CommitsFail      this has gone on for too long
+-- ManifestFailed   it may exist or not: this process must end
"""

from pathlib import Path

from headrace.errors import HeadraceError
from headrace.trainer.checkpoint.commits import MANIFEST


class CommitFailed(HeadraceError):
    """A commit failed. Nothing of it is left; its rows wait for the next one, which may succeed."""


class CommitsFail(HeadraceError):
    """No commit succeeded for longer than `commit.max_failing`."""


class ManifestFailed(HeadraceError):
    """A write of a manifest failed. It is unknown whether it is durable, so this process must end."""

    exit_code = 75

    def __init__(self, folder: Path, error: OSError) -> None:
        super().__init__(
            f"{folder / MANIFEST}: {error.strerror}: this process cannot continue with the store; the next generation "
            "continues from an older commit. Check this disk if it happens again"
        )
