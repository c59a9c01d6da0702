"""Event files of TensorBoard: the figures of each close in a job's log, as scalars.

Each timeline is a run of its own, in a folder of its name. The step is the number of the pass; the time is that of the
newest event, or that of writing where events have no time. The log is read, and nothing is asked of the workers.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from headrace.durable import writing
from headrace.errors import Unwritable
from headrace.extras import require
from headrace.periodic import periodically
from headrace.service.history.closes import Close, Closes, TimelineVersion
from headrace.trainer.exposed_figures import numbers

EVERY_S = 5.0
"""Pause between two looks at the log."""
PART = 1_000
"""Closes written at a time."""

log = logging.getLogger(__name__)


def figures_of(close: Close) -> Iterator[tuple[str, float]]:
    """The tag and value of each figure: metrics of pass and window by task, and numbers of events and samples."""
    content = close.content
    for span, tasks in (("window", content.window), ("pass", content.of_pass)):
        for task, measures in tasks.items():
            yield from ((f"{span}/{task}/{name}", float(value)) for name, value in numbers(measures).items())
    rejected = sum(content.rejected.values())
    for name, value in (("events", content.events), ("samples", content.samples), ("rejected", rejected)):
        yield f"stream/{name}", float(value)
    yield from ((f"rejected/{reason}", float(number)) for reason, number in content.rejected.items() if number)


class EventFiles:
    """Writes the closes of the log in `log_folder` to `folder`. One thread at a time."""

    def __init__(self, log_folder: Path, folder: Path) -> None:
        """Raises SpecError without the library of TensorBoard, Unwritable."""
        require("tensorboard", "writing event files of TensorBoard")
        self._closes, self._folder = Closes(log_folder), folder
        self._writers: dict[str, Any] = {}
        self._written = TimelineVersion(0, 0)
        """The last close that was written."""
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)

    def write_on(self) -> int:
        """Write the closes since the last call; their number. After Unwritable, the next call begins with the first."""
        number = 0
        try:
            with writing(self._folder):
                while found := self._closes.after(self._closes.placed(self._written).version, PART):
                    for close in found:
                        self._write(close)
                    number += len(found)
                for writer in self._writers.values():
                    writer.flush()
        except Unwritable:
            self.close()
            self._writers, self._written = {}, TimelineVersion(0, 0)
            raise
        return number

    def close(self) -> None:
        """Write what is in memory."""
        for writer in self._writers.values():  # each has a thread
            with suppress(OSError):  # its lines are lost, as told before
                writer.close()

    def _write(self, close: Close) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        at_s = close.content.event_time_s
        time_s = time.time() if at_s is None else at_s
        if (writer := self._writers.get(close.timeline)) is None:
            writer = self._writers[close.timeline] = self._begun(close, time_s)
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in figures_of(close)]
        writer.add_event(Event(wall_time=time_s, step=close.version, summary=Summary(value=values)))
        self._written = close.moment

    def _begun(self, close: Close, time_s: float) -> Any:
        """A new file. Its mark of a start replaces what older files have of this step and later ones."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        writer = EventFileWriter(str(self._folder / (close.timeline or "t1")), filename_suffix=".headrace")
        start = SessionLog(status=SessionLog.START)
        writer.add_event(Event(wall_time=time_s, step=close.version, session_log=start))
        return writer


@contextmanager
def event_files(log_folder: Path, folder: Path | None) -> Iterator[None]:
    """Write event files to `folder` while the context lasts, and the rest at its end; None: none.

    A disk that takes no more is reported once, and training goes on. Raises SpecError and Unwritable at the start.
    """
    if folder is None:
        yield
        return
    files, failing = EventFiles(log_folder, folder), False

    def write_on() -> None:
        nonlocal failing
        try:
            files.write_on()
            failing = False
        except Unwritable as error:
            if not failing:
                log.warning("event files of TensorBoard: %s", error)
            failing = True

    try:
        with periodically(write_on, EVERY_S, "event-files"):
            yield
        write_on()
    finally:
        files.close()
