"""Which timelines a job's exports have had, as their places tell: a store that begins anew takes none of them again."""

import logging
import re
import tempfile
from pathlib import Path

from millrace.deadline import Deadline
from millrace.errors import MillraceError
from trainer.config import TrainerJob
from trainer.exports.ordering import address_of
from trainer.exports.outlet import open_outlet

LOOK_S = 30.0
"""How long a place may take to say what it holds."""

log = logging.getLogger(__name__)


def newest_timeline(job: TrainerJob, store: Path, folder: Path) -> int:
    """The highest number of a timeline that has exports; 0 where there is none.

    A place that does not answer is passed over: an export that finds another one at its very address is refused.
    """
    newest = 0
    for stream, section in job.exports.items():
        address = address_of(section, stream, store, folder)
        try:
            with tempfile.TemporaryDirectory(prefix="millrace-exports-") as scratch:
                names = open_outlet(address, job.name, Path(scratch), Deadline.after(LOOK_S)).folders("")
        except MillraceError as error:
            log.warning("which timelines exports of %s have had is not known: %s", stream, error)
            continue
        newest = max([newest, *(int(name[1:]) for name in names if re.fullmatch(r"t\d+", name))])
    return newest
