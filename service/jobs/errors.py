"""Errors of a host of jobs.

HeadraceError
+-- HostingError
    +-- UnknownJob         there is no job of that name
    +-- UnknownOperation   there is no operation with that id (any more)
    +-- JobExists          there is already a job of that name
    +-- StillRunning       the job must end first
    +-- WrongPhase         the action is not possible in the present state of the job
    +-- NotHosted          only the service can do this, not a foreground run
    +-- LimitReached       a limit of the service's configuration is reached; a later attempt may succeed
    +-- Cancelled          an operation was cancelled by a user
"""

from collections.abc import Iterable

from headrace.errors import HeadraceError


class HostingError(HeadraceError):
    """The host cannot carry out a request."""


class UnknownJob(HostingError):
    """There is no job of that name."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(f"there is no job {name!r}; known here: {', '.join(known) or 'none'}")


class UnknownOperation(HostingError):
    """There is no such operation."""

    def __init__(self, id: str) -> None:
        super().__init__(f"there is no operation {id!r}; operations are deleted some days after their end")


class JobExists(HostingError):
    """The name is taken."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"there is a job {name!r} already; choose another name, or delete that job first "
            "(--keep-store keeps its store)"
        )


class StillRunning(HostingError):
    """The job must end first."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"job {name!r} {why}; stop it, and retry once it has ended")


class WrongPhase(HostingError):
    """The action is not possible in the present state of the job."""


class NotHosted(HostingError):
    """A foreground run cannot do this."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}: the job runs in the foreground by `headrace run`; jobs of `headrace serve` can be created,"
            " deleted and restarted"
        )


class LimitReached(HostingError):
    """A limit is reached."""


class Cancelled(HostingError):
    """A user cancelled the operation."""

    def __init__(self) -> None:
        super().__init__("cancelled")
