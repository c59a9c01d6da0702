"""The exporter process as rank 0 sees it: the exports that it tries again, and the process itself.

Messages are JSON objects, one per line in each direction. Rank 0 submits a request and polls for its answer between
passes. One thread per request talks to the process, so that the process cannot delay training; after its death it is
started again. trainer.exports.coordinator decides which exports to make; the work of the process is in
trainer.exports.__main__.
"""

import contextlib
import logging
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from headrace import documents
from headrace.config import Count, Section
from headrace.deadline import Deadline
from headrace.failpoints import LAST_WORDS, ArmedFailpoint
from headrace.logs import StderrLog
from headrace.process import ChildProcess
from headrace.retry import Backoff
from headrace.trainer.exports.export_messages import ExportAnswer, ExportRequest

GRACE_S = 15.0
"""The process is killed so long after the deadlines of its export, if it has not answered."""
POLL_S = 0.2
"""Longest wait of one poll; the deadline is checked after each."""
END_S = 5.0
"""Longest wait for a process that closed its output, and for a thread whose process is gone."""
READ_BYTES = 1 << 16
MAX_ANSWER_BYTES = 16 << 20

FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 120.0
"""Pause before another try of an export: it doubles each time, up to the longest."""
BACKOFF = Backoff.doubling(FIRST_PAUSE_S, LONGEST_PAUSE_S)

log = logging.getLogger(__name__)


class ExporterConfig(Section):
    """The first line of the exporter process's input."""

    store: Path
    """The job's store; its folder `live` takes the row stores that are open during an export."""
    generation: Count | None = None
    """Generation of rank 0: once a newer one has claimed the job, requests are refused. None: not checked."""
    faults: tuple[ArmedFailpoint, ...] = ()
    """Failpoints where the process dies, for fault tests."""


# Attempts


class Exporter(Protocol):
    """Makes one export at a time, in another process, and never waits for it. One thread."""

    def submit(self, request: ExportRequest) -> None:
        """Begin an export. None may be in progress."""
        ...

    def poll(self) -> ExportAnswer | None:
        """How the export ended; None while it has not, or where none was begun. Returns each answer once."""
        ...

    def close(self) -> None:
        """End, even in the middle of an export."""
        ...


@dataclass
class ExportAttempt:
    """An export to make."""

    request: ExportRequest
    tried: int = 0
    not_before_s: float = 0.0


class ExportAttempts:
    """One thread, except for `failing`."""

    def __init__(
        self,
        exporter: Exporter,
        clock: Callable[[], float] = time.monotonic,
        trouble: Callable[[], str] = lambda: "",
    ) -> None:
        """`trouble`: why none may begin now; empty where one may."""
        self._exporter, self._clock, self._trouble = exporter, clock, trouble
        self._waiting: deque[ExportAttempt] = deque()
        self._flying: ExportAttempt | None = None
        self.failing: dict[str, tuple[float, str]] = {}
        """By stream: since when an export fails that is tried again, and its last error. Replaced, never changed."""

    def add(self, request: ExportRequest) -> None:
        """Make this export after those that wait."""
        self._waiting.append(ExportAttempt(request))

    def __iter__(self) -> Iterator[ExportRequest]:
        """The requests that have not ended."""
        flying = () if self._flying is None else (self._flying,)
        return (attempt.request for attempt in (*flying, *self._waiting))

    def tick(self) -> list[tuple[ExportRequest, ExportAnswer]]:
        """Begin the next export that may begin -> exports that ended for good since the last call, and how."""
        over = []
        if self._flying is not None and (answer := self._exporter.poll()) is not None:
            attempt, self._flying = self._flying, None
            if self._ended(attempt, answer):
                over.append((attempt.request, answer))
        now_s = self._clock()
        ready = next((each for each in self._waiting if each.not_before_s <= now_s), None)
        if self._flying is None and ready is not None and not self._trouble():
            self._waiting.remove(ready)
            self._flying = ready
            self._exporter.submit(ready.request)
        return over

    def close(self) -> None:
        """End the exporter. The next run makes what was not complete."""
        self._exporter.close()

    def _ended(self, attempt: ExportAttempt, answer: ExportAnswer) -> bool:
        """Whether the export ended for good."""
        request, failing = attempt.request, dict(self.failing)
        since_s, _ = failing.pop(request.stream, (self._clock(), ""))
        attempt.tried += 1
        over = answer.outcome == "complete" or answer.final or attempt.tried >= request.section.tries
        if not over:
            attempt.not_before_s = self._clock() + BACKOFF.pause_s(attempt.tried)
            why = answer.error or "it failed"
            log.warning(
                "export %s of %s failed, try %d of %d: %s",
                *(request.name, request.stream, attempt.tried, request.section.tries, why),
            )
            self._waiting.append(attempt)
            failing[request.stream] = (since_s, why)
        self.failing = failing
        return over


def log_export_end(request: ExportRequest, answer: ExportAnswer) -> None:
    """Log how an export ended for good."""
    what = f"export {request.name} of {request.stream}"
    if answer.outcome == "failed":
        log.error("%s failed and is given up; the next one includes what it lacks: %s", what, answer.error)
        return
    log.info("%s: %d rows, %d deleted, %.1f s; %s", what, answer.rows, answer.tombstones, answer.seconds, answer.path)
    if answer.failed_gates:
        log.warning("current.json does not point to %s: %s", what, "; ".join(answer.failed_gates))


# The process


class ExporterGone(Exception):
    """The process died, hung, or printed something that is no answer."""


class ExporterChild:
    """One running exporter. One thread at a time; `kill` from any."""

    def __init__(self, config: ExporterConfig) -> None:
        """Raises ExporterGone."""
        try:  # in the session of this process, so that its niceness counts
            self._process = ChildProcess((sys.executable, "-m", "headrace.trainer.exports"), new_session=False)
        except OSError as error:
            raise ExporterGone(f"cannot be started: {error}") from error
        self._in, self._out, self._err = self._process.stdin, self._process.stdout, self._process.stderr
        self._stderr = StderrLog("exporter")
        self._received = b""
        self._send(config.model_dump_json())

    def ask(self, request: ExportRequest, deadline: Deadline) -> ExportAnswer:
        """Send a request and wait for its answer. Raises ExporterGone."""
        self._send(request.model_dump_json())
        while True:
            line = self._line(deadline)
            try:
                return ExportAnswer.model_validate(documents.parse(line, "the exporter's answer"))
            except (ValueError, ValidationError):
                self._pass_on(line)

    @staticmethod
    def _pass_on(line: bytes) -> None:
        """Handle a line that is no answer. Last words of a fault run go to standard output, as those of workers do."""
        if line.startswith(LAST_WORDS.encode()):
            os.write(1, line + b"\n")
        else:
            log.warning("exporter: %s", line.decode("utf-8", "replace"))

    def kill(self) -> None:
        """Send SIGKILL to the process and its group."""
        self._process.kill()

    def close(self) -> None:
        """End the process and its group, and close the pipes."""
        self._process.end()
        self._drain()
        self._stderr.close()
        self._process.close()

    def _send(self, line: str) -> None:
        try:
            self._in.write(line.encode() + b"\n")
        except BrokenPipeError:
            raise ExporterGone(self._end()) from None

    def _line(self, deadline: Deadline) -> bytes:
        """The next line of its output."""
        watch = select.poll()
        for pipe in (self._out, self._err):
            watch.register(pipe, select.POLLIN)
        while b"\n" not in self._received:
            if deadline.passed():
                raise ExporterGone("did not answer in time and was killed; is its disk or object store slow?")
            for fd, _ in watch.poll(POLL_S * 1000):
                data = os.read(fd, READ_BYTES)
                if fd == self._err.fileno():
                    self._stderr.add(data, time.monotonic())
                    if not data:
                        watch.unregister(self._err)
                elif not data or len(self._received) > MAX_ANSWER_BYTES:
                    raise ExporterGone(self._end())
                else:
                    self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _end(self) -> str:
        """The end of the process in words. It has ended, or does soon."""
        if not self._process.ends_within(END_S):
            return "closed its output and was killed"
        code = self._process.end()
        self._drain()
        tail = self._stderr.tail()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"{how}; its last words:\n{tail}" if tail else f"{how}; it printed nothing on stderr"

    def _drain(self) -> None:
        os.set_blocking(self._err.fileno(), False)
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._err.fileno(), READ_BYTES):
                self._stderr.add(data, time.monotonic())


class ExporterProcess:
    """An Exporter. One thread."""

    def __init__(self, config: ExporterConfig) -> None:
        """The process starts with the first request."""
        self._config = config
        self._child: ExporterChild | None = None
        self._thread: threading.Thread | None = None
        self._answer: ExportAnswer | None = None
        self._closed = False

    def submit(self, request: ExportRequest) -> None:
        """Begin this request. No other is in progress."""
        assert self._thread is None, "one at a time"
        self._answer = None
        self._thread = threading.Thread(target=self._run, args=(request,), name="exporter", daemon=True)
        self._thread.start()

    def poll(self) -> ExportAnswer | None:
        """The answer to the request, once; None while there is none."""
        if self._thread is None or self._thread.is_alive():
            return None
        self._thread.join()
        self._thread, answer = None, self._answer
        assert answer is not None, "the thread leaves an answer"
        return answer

    def close(self) -> None:
        """End the process at once. The next attempt removes a half-made export."""
        self._closed = True
        if (child := self._child) is not None:
            child.kill()
        if self._thread is not None:
            self._thread.join(END_S)
            self._thread = None
        if (child := self._child) is not None:
            child.close()
            self._child = None

    def _run(self, request: ExportRequest) -> None:
        """Runs on a thread: one request to its end."""
        section = request.section
        deadline = Deadline.after(section.try_s + (section.command_deadline if section.command else 0) + GRACE_S)
        try:
            if self._child is None:
                self._child = ExporterChild(self._config)
            self._answer = self._child.ask(request, deadline)
        except ExporterGone as error:
            self._answer = ExportAnswer(name=request.name, outcome="failed", error=f"the exporter process {error}")
            if not self._closed and (child := self._child) is not None:
                self._child, self._config = None, self._config.model_copy(update={"faults": ()})  # it dies once
                child.close()
