"""Where a worker process finds its launcher, and who it is there. headrace.rpc.rendezvous calls the launcher."""

from pydantic import Field

from headrace.config import PositiveCount, Section


class LauncherContact(Section):
    """Part of the configuration of a worker process, which the launcher writes."""

    address: str
    """Address of the launcher's rendezvous."""
    secret: str = Field(repr=False)
    """Secret that callers must send."""
    worker: str
    """Name of the worker, such as "trainer-1"."""
    generation: PositiveCount
    """Its generation."""
    authority: str = ""
    """Certificate of the job's authority, PEM, where the launcher is at a port and this worker has no credentials of
    its own: nothing is sent to a process that has no certificate of it."""
    head: str = ""
    """The launcher's name in its certificate then."""
