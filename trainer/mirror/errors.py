"""Errors of the mirror.

MillraceError
+-- Unavailable
|   +-- MirrorUnavailable   the object store did not do what was asked; later it may       exit code 75
+-- MirrorEmpty             nothing in the mirror can be restored                          exit code 1
+-- MirrorTaken             another machine goes on from this mirror                   exit code 1
+-- StoreUnwritable         what comes from the mirror cannot be written here              exit code 1

A commit that is not what its manifest says, on either side, is trainer.commits.CommitDamaged.
"""

from pathlib import Path

from millrace.errors import MillraceError, Unavailable


class MirrorUnavailable(Unavailable):
    """The object store refused, failed or did not answer in time."""

    def __init__(self, uri: str, doing: str, why: object) -> None:
        super().__init__(f"mirror {uri}: {doing}: {why}")
        self.uri = uri


class MirrorEmpty(MillraceError):
    """There is no commit, or none that is whole."""


class MirrorTaken(MillraceError):
    """What is uploaded here would harm what another machine counts on."""


class StoreUnwritable(MillraceError):
    """The local disk refused a file of the mirror's."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(f"{path}: cannot be written: {error.strerror or error}")
