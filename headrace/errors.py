"""Errors that more than one package raises or handles.

HeadraceError
+-- SpecError        the job spec is wrong; the user fixes it              exit code 2
+-- BadInput         stream, pipe or file is not in the expected form      exit code 1
|   (dataset.stream.errors derives more)
+-- DeadlineExceeded no answer within the time given                       exit code 75
+-- Unavailable      a peer or broker is down; the same call may succeed   exit code 75
+-- NotYet           a peer is still working on the answer; ask again      exit code 75
+-- Refused          a peer of another job or generation refused           exit code 1
+-- Unwritable       a file cannot be written: the disk is full or fails   exit code 1

Packages derive their own errors from these. `exit_code` is what a process that ends on the error returns.
"""

from pathlib import Path


class HeadraceError(Exception):
    """An error for people: what is wrong, where, and what to do."""

    exit_code = 1


class SpecError(HeadraceError):
    """The job spec is wrong: `path` names the key."""

    exit_code = 2

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.path = path


class BadInput(HeadraceError):
    """Input is not in the expected form."""


class Unwritable(HeadraceError):
    """A file cannot be written: its disk is full or fails."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(f"{path} cannot be written: {error.strerror or error}; make room on this disk, or repair it")


class DeadlineExceeded(HeadraceError):
    """The time for a call is used up."""

    exit_code = 75


class Unavailable(HeadraceError):
    """A peer does not answer now; the same call may succeed later."""

    exit_code = 75


class NotYet(HeadraceError):
    """The answer is not ready yet, since rows are being counted; ask the same again soon."""

    exit_code = 75


class Refused(HeadraceError):
    """A peer of another job or generation, or in another state, refused; asking again does not help."""
