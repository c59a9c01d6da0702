"""Rank 0's side of the exporter process: one request at a time, never waited for; started again after its death.

Rank 0 submits a request and polls for its answer between passes. One thread per request talks to the process, so that
the process cannot delay training. The work of the process is in trainer.exports.__main__.
"""

import contextlib
import logging
import os
import select
import sys
import threading
import time

from pydantic import ValidationError

from headrace import documents
from headrace.deadline import Deadline
from headrace.failpoints import LAST_WORDS
from headrace.logs import StderrLog
from headrace.process import ChildProcess
from headrace.trainer.exports.request import ExportAnswer, ExporterConfig, ExportRequest

GRACE_S = 15.0
"""The process is killed so long after the deadlines of its export, if it has not answered."""
POLL_S = 0.2
"""Longest wait of one poll; the deadline is checked after each."""
END_S = 5.0
"""Longest wait for a process that closed its output, and for a thread whose process is gone."""
READ_BYTES = 1 << 16
MAX_ANSWER_BYTES = 16 << 20

log = logging.getLogger(__name__)


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
    """Implements trainer.exports.attempts.Exporter. One thread."""

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
        deadline = Deadline.after(section.deadline + (section.command_deadline if section.command else 0) + GRACE_S)
        try:
            if self._child is None:
                self._child = ExporterChild(self._config)
            self._answer = self._child.ask(request, deadline)
        except ExporterGone as error:
            self._answer = ExportAnswer(name=request.name, outcome="failed", error=f"the exporter process {error}")
            if not self._closed and (child := self._child) is not None:
                self._child, self._config = None, self._config.model_copy(update={"faults": ()})  # it dies once
                child.close()
