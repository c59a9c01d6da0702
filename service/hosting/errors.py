"""Errors of a host of jobs.

MillraceError
+-- HostingError
    +-- UnknownJob         there is no job of that name
    +-- UnknownOperation   there is no operation of that id, or it is forgotten
    +-- JobExists          there is a job of that name
    +-- StillRunning       it must end first
    +-- NotNow             what is asked for makes no sense in the state the job is in
    +-- NotHosted          what is asked for, the service does, and not a foreground run
    +-- TooMany            a limit of the service's configuration is reached; later there may be room
    +-- Cancelled          an operation ended because somebody asked for that
"""

from collections.abc import Iterable

from millrace.errors import MillraceError


class HostingError(MillraceError):
    """What is asked of the host cannot be done."""


class UnknownJob(HostingError):
    """There is no job of that name."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(f"there is no job {name!r}; known here: {', '.join(known) or 'none'}")


class UnknownOperation(HostingError):
    """There is no such operation."""

    def __init__(self, id: str) -> None:
        super().__init__(f"there is no operation {id!r}; those that ended are forgotten after some days")


class JobExists(HostingError):
    """The name is taken."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"there is a job {name!r} already; choose another name, or delete that one first "
            "(--keep-store leaves what it has learnt)"
        )


class StillRunning(HostingError):
    """The job must end first."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"job {name!r} {why}; stop it, and ask again once it has ended")


class NotNow(HostingError):
    """The job is in a state in which this makes no sense."""


class NotHosted(HostingError):
    """A foreground run cannot do this."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}: the job is run in the foreground by `millrace run`; `millrace serve` hosts jobs that can be"
            " created, deleted and started again"
        )


class TooMany(HostingError):
    """A limit is reached."""


class Cancelled(HostingError):
    """Somebody asked that the operation end."""

    def __init__(self) -> None:
        super().__init__("cancelled")
