"""Errors of the mirror.

MillraceError
+-- MirrorEmpty     nothing in the mirror can be restored                       exit code 1
+-- MirrorTaken     another machine continues from this mirror                  exit code 1
+-- CommitPresent   the commit to be fetched is in the store already            exit code 1

A mirror that does not answer is trainer.blob.errors.BlobUnavailable. A commit that differs from its manifest, on either
side, is trainer.commits.CommitDamaged. A local disk that refuses is millrace.errors.Unwritable.
"""

from pathlib import Path

from millrace.errors import MillraceError


class MirrorEmpty(MillraceError):
    """The mirror has no commit, or none that is whole."""


class MirrorTaken(MillraceError):
    """An upload would harm what another machine relies on."""


class CommitPresent(MillraceError):
    """A commit is never replaced."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path}: is there already")
