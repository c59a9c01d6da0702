"""Errors of blob stores.

HeadraceError
+-- BlobChanged              a blob was replaced while it was read in parts                      exit code 1
+-- SourceDamaged            a local file is not what it should be, and is not sent              exit code 1
+-- Unavailable
    +-- BlobUnavailable      the store refused, failed or did not answer in time; later it may   exit code 75
        +-- BlobUnwritable   a file of a local store cannot be written; also an Unwritable       exit code 1

A disk that refuses what is fetched or collected is headrace.errors.Unwritable.
"""

from pathlib import Path

from headrace.errors import HeadraceError, Unavailable, Unwritable


class BlobUnavailable(Unavailable):
    """The store refused, failed or did not answer in time."""

    out_of_time = False
    """True if the deadline ended the call, and with more time it would have been tried again."""

    def __init__(self, store: str, doing: str, why: object, *, out_of_time: bool = False) -> None:
        """`store` is its role and address, as "mirror s3://bucket/prefix"."""
        super().__init__(f"{store}: {doing}: {why}")
        self.out_of_time = out_of_time


class BlobChanged(HeadraceError):
    """A blob was replaced while it was read in parts."""

    def __init__(self, store: str, doing: str, why: object) -> None:
        super().__init__(f"{store}: {doing}: {why}")


class SourceDamaged(HeadraceError):
    """A local file has other bytes than were written."""


class BlobUnwritable(BlobUnavailable, Unwritable):
    """A file of a local store cannot be written: its disk is full or fails."""

    exit_code = 1

    def __init__(self, store: str, path: Path, error: OSError) -> None:
        why = f"{path} cannot be written: {error.strerror or error}"
        HeadraceError.__init__(self, f"{store}: {why}: make room on this disk, or mend it")
