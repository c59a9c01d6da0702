"""Errors that more than one package raises or handles.

MillraceError
+-- SpecError        the job spec is wrong; the user mends it              exit code 2
+-- BadInput         the stream, the pipe or a file broke its promise      exit code 1
|   (dataset.errors draws its branches)
+-- DeadlineExceeded no answer within the time given                       exit code 75
+-- Unavailable      a peer or broker is down; the same call may succeed   exit code 75
+-- NotYet           a peer is still finding out; ask the same again       exit code 75
+-- Refused          a peer answered no: another job, another generation   exit code 1
+-- Unwritable       a file cannot be written: the disk is full or fails   exit code 1

Packages draw their own branches below these. `exit_code` is what a process that ends on the error returns.
"""

from pathlib import Path


class MillraceError(Exception):
    """Something a person must be told: what, where, and what to do."""

    exit_code = 1


class SpecError(MillraceError):
    """The job spec is wrong: `path` names the key."""

    exit_code = 2

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.path = path


class BadInput(MillraceError):
    """What came in is not what was promised."""


class Unwritable(MillraceError):
    """A file cannot be written: its disk is full or fails."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(f"{path} cannot be written: {error.strerror or error}; make room on this disk, or mend it")


class DeadlineExceeded(MillraceError):
    """The time given for a call is used up."""

    exit_code = 75


class Unavailable(MillraceError):
    """A peer does not answer now; the same call may succeed later."""

    exit_code = 75


class NotYet(MillraceError):
    """What was asked cannot be answered yet, for something is being counted; the same question gets its answer soon."""

    exit_code = 75


class Refused(MillraceError):
    """A peer of another job or generation, or in another state, said no; asking again will not help."""
