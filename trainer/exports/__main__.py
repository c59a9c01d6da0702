"""The exporter process: `python -m headrace.trainer.exports`, a child of rank 0.

Its input is a line of JSON with an ExporterConfig, then one ExportRequest per line. It answers each request with an
ExportAnswer, one line of output. It ends when its input ends: when rank 0 closes the input, or dies for any reason.
Never imports torch.
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

from headrace import documents
from headrace.config import validate
from headrace.deadline import Deadline
from headrace.durable import locked, writing
from headrace.errors import HeadraceError, SpecError
from headrace.failpoints import Failpoint, arm
from headrace.lifecycle import run_to_end
from headrace.trainer.exports.destination import STAGES
from headrace.trainer.exports.export_messages import ExportAnswer, ExportRequest
from headrace.trainer.exports.exporter import export
from headrace.trainer.exports.exporter_process import ExporterConfig
from headrace.trainer.journal.log import Superseded
from headrace.trainer.journal.log_file import newest_generation

NICENESS = 19
"""Lowest priority: an exporter uses the CPU time that rank 0 leaves."""
POINTS = (Failpoint.EXPORT_BEGUN, Failpoint.EXPORT_ROWS, Failpoint.EXPORT_MANIFEST, Failpoint.EXPORT_DONE)
"""The failpoints of this process; the others in its configuration belong to rank 0."""
TURN_S = 600.0
"""Longest wait at the start for an exporter of another generation to end its last export."""
LOG, LOCK = "log", "lock"
"""Folder of the store's log; lock file, in the folder of prepared files, that lets one process at a time export."""
LIVE, SCRATCH = "live", "export-"
"""Folder of a store for open row stores; prefix of the names that exporters use there."""

FORMAT = "%(levelname)s: %(message)s"
"""Of a log line. Rank 0, which passes the lines on, adds time and source."""

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
    with exclusive_turn(config, Deadline.after(TURN_S)):
        remove_leftovers(config.store)
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests,), name="requests", daemon=True).start()
    while True:
        answer = answer_request(requests.get(), config)
        os.write(1, answer.model_dump_json().encode() + b"\n")


def answer_request(line: str, config: ExporterConfig) -> ExportAnswer:
    """The answer to one request; any failure becomes an answer, too."""
    name = ""
    try:
        request = ExportRequest.model_validate_json(line)
        name = request.name
        with exclusive_turn(config, Deadline.after(request.section.try_s)):
            scratch = config.store / LIVE / f"{SCRATCH}{request.stream}-{os.getpid()}"
            return export(request, scratch, config.generation)
    except HeadraceError as error:
        return ExportAnswer(name=name, outcome="failed", error=str(error))
    except Exception as error:  # noqa: BLE001  # outermost handler: a bug in one export does not end the others
        log.exception("export %s failed", name)
        return ExportAnswer(name=name, outcome="failed", error=f"a bug in the exporter: {error!r}; see the log")


@contextmanager
def exclusive_turn(config: ExporterConfig, deadline: Deadline) -> Iterator[None]:
    """Lock the job's exports against exporters of other generations. Raises Superseded, DeadlineExceeded, Unwritable.

    A rank 0 that was taken for dead may continue for a while, with its exporter. Both exporters write to one folder.
    """
    folder = config.store / STAGES
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / LOCK, deadline):
        newest = newest_generation(config.store / LOG)
        if config.generation is not None and newest > config.generation:
            raise Superseded(config.store / LOG, config.generation, newest)
        yield


def remove_leftovers(store: Path) -> None:
    """Remove what earlier processes left behind when they were killed."""
    for path in (store / LIVE).glob(f"{SCRATCH}*"):
        shutil.rmtree(path, ignore_errors=True)


def _read(requests: "queue.SimpleQueue[str]") -> None:
    """Thread that reads lines. At the end of the input it kills the process and all its children at once."""
    for line in sys.stdin:
        requests.put(line)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(0)


def _json(line: str) -> dict[str, object]:
    try:
        return documents.parse_object(line, "the first line of the exporter's input")
    except documents.InvalidDocument as error:
        raise SpecError(str(error)) from error


if __name__ == "__main__":
    run_to_end(run)
