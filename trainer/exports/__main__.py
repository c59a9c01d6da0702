"""The exporter process: `python -m trainer.exports`, a child of the chief.

Its input is an ExporterConfig as a line of JSON, then an ExportRequest a line; each gets an ExportAnswer, a line of its
output. It ends with its input: when the chief closes it, or dies, however it does. Never imports torch.
"""

import logging
import os
import queue
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from millrace import documents
from millrace.config import validate
from millrace.deadline import Deadline
from millrace.durable import writing
from millrace.errors import MillraceError, SpecError
from millrace.lifecycle import exit_code_of
from millrace.locks import locked
from millrace.points import Point, arm
from trainer.exports.ordering import STAGES
from trainer.exports.request import ExportAnswer, ExporterConfig, ExportRequest
from trainer.exports.writing import export
from trainer.log import Superseded
from trainer.log_file import newest_generation

NICENESS = 19
"""How far training goes before: an exporter lives off what its chief's threads leave of the cores."""
POINTS = (Point.EXPORT_BEGUN, Point.EXPORT_ROWS, Point.EXPORT_MANIFEST, Point.EXPORT_DONE)
"""Where it dies when it is told to; others that its chief is told of are not its own."""
TURN_S = 600.0
"""How long a process waits at most, before it begins, until one of another generation has made its last export."""
LOG, LOCK = "log", "lock"
"""The store's log; and the file, in the folder of what chiefs prepare, by which one process at a time makes exports."""
LIVE, SCRATCH = "live", "export-"
"""Where in a store stores of rows are open, and what names of ours begin with."""

FORMAT = "%(levelname)s: %(message)s"
"""Of a record: when it came, and of whom, the chief's log says, through which it goes."""

log = logging.getLogger(__name__)


def run() -> None:
    """Answer requests until the input ends."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=FORMAT)
    os.nice(NICENESS)
    pa.set_cpu_count(1)
    pa.set_io_thread_count(2)
    first = sys.stdin.readline()
    if not first:
        return
    config = validate(ExporterConfig, _json(first))
    arm(tuple(fault for fault in config.faults if fault.point in POINTS))
    with turn(config, Deadline.after(TURN_S)):
        clear(config.store)
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests,), name="requests", daemon=True).start()
    while True:
        answer = answered(requests.get(), config)
        os.write(1, answer.model_dump_json().encode() + b"\n")


def answered(line: str, config: ExporterConfig) -> ExportAnswer:
    """What comes of one request, whatever goes wrong with it."""
    name = ""
    try:
        request = ExportRequest.model_validate_json(line)
        name = request.name
        with turn(config, Deadline.after(request.section.deadline)):
            return export(request, config.store / LIVE / f"{SCRATCH}{request.stream}-{os.getpid()}")
    except MillraceError as error:
        return ExportAnswer(name=name, outcome="failed", error=str(error))
    except Exception as error:  # noqa: BLE001  # the rim: a bug in one export is not the end of all
        log.exception("export %s failed", name)
        return ExportAnswer(name=name, outcome="failed", error=f"a bug in the exporter: {error!r}; see the log")


@contextmanager
def turn(config: ExporterConfig, deadline: Deadline) -> Iterator[None]:
    """Hold the job's exports against exporters of other generations. Raises Superseded, DeadlineExceeded, Unwritable.

    A chief that was taken for dead may go on for a while, and so does its exporter: both write to the same folder.
    """
    folder = config.store / STAGES
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / LOCK, deadline):
        newest = newest_generation(config.store / LOG)
        if config.generation is not None and newest > config.generation:
            raise Superseded(config.store / LOG, config.generation, newest)
        yield


def clear(store: Path) -> None:
    """Remove what processes before this one left when they were killed."""
    for path in (store / LIVE).glob(f"{SCRATCH}*"):
        shutil.rmtree(path, ignore_errors=True)


def _read(requests: "queue.SimpleQueue[str]") -> None:
    """A thread: lines in; at their end the process ends, in the middle of what it is doing, with all it started."""
    for line in sys.stdin:
        requests.put(line)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(0)


def _json(line: str) -> dict[str, object]:
    try:
        return documents.parse_object(line, "the first line of the exporter's input")
    except documents.NotReadable as error:
        raise SpecError(str(error)) from error


if __name__ == "__main__":
    sys.exit(exit_code_of(run))
