"""The configuration of a reader process."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from headrace.address import LOOPBACK_INTERFACE
from headrace.config import Count, Duration, PositiveCount, Section, Seed
from headrace.dataset.pipe.label_bounds import LabelBounds
from headrace.dataset.sources.kinds import AnySource
from headrace.dataset.spec.config import AnyPipe, AnySlot
from headrace.failpoints import ArmedFailpoint
from headrace.identity.credentials import Credentials
from headrace.launcher_contact import LauncherContact
from headrace.timeline import TracePart


class ReaderProcess(Section):
    """One reader, written by the launcher as JSON."""

    reader: Count
    """This reader's number."""
    num_readers: PositiveCount
    """Number of readers of the job."""
    num_ranks: PositiveCount
    """Number of trainers of the job."""
    name: str
    """Name of the job."""
    seed: Seed
    """The job's seed."""
    sources: Annotated[dict[str, AnySource], Field(min_length=1)]
    """The sources of the job, with their secrets."""
    pipe: AnyPipe
    """The pipe of the job."""
    slots: Annotated[tuple[AnySlot, ...], Field(min_length=1)]
    """The slots of the job."""
    masks: dict[str, str] = {}
    """See dataset.loader.segment_reader.SegmentReader."""
    labels: tuple[LabelBounds, ...] = ()
    """Events with other labels are rejected by the trainers, which quote them."""
    max_outage: Duration = 600.0
    """Longest time for which a source may be unavailable."""
    memory: PositiveCount
    """`passes.memory` of a trainer."""
    folder: Path
    """The folder of the job file, with the program of the pipe and the files of sources."""
    inputs: dict[str, Count] = {}
    """Files that are compared with the head's, by path: how many of their first bytes."""
    digests: dict[str, str] = {}
    """Digests of these bytes at the head."""
    secret: str = ""
    """Secret that callers must send."""
    generation: Count = 1
    """Callers of another generation are refused."""
    interface: str = LOOPBACK_INTERFACE
    """Network interface at which it listens."""
    credentials: Credentials | None = None
    """Its certificate; without one it listens for this machine alone."""
    launcher: LauncherContact | None = None
    """Where this process says where it listens; None: it was started by hand."""
    socket: Path | None = None
    """Unix socket at which this process serves; None: a port of loopback."""
    faults: tuple[ArmedFailpoint, ...] = ()
    """Failpoints at which this process is killed, in fault runs."""
    trace: TracePart | None = None
    """The timeline that this process records."""

    @property
    def processes(self) -> int:
        """Processes of the pipe here: its share of those of all trainers."""
        return -(-self.num_ranks * self.pipe.processes // self.num_readers)
