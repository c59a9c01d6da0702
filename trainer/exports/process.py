"""The exporter process as its chief has it: one request at a time, never waited for; started anew when it has died.

The chief hands over a line of JSON and looks, between passes, whether an answer came. A thread a request talks to the
process, so that nothing of it can hold up training. What the process does is trainer.exports.__main__'s.
"""

import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time

from pydantic import ValidationError

from dataset.pipe.process import Stderr
from millrace import documents
from millrace.deadline import Deadline
from millrace.points import LAST_WORDS
from trainer.exports.request import ExportAnswer, ExporterConfig, ExportRequest

GRACE_S = 15.0
"""How long after an export's deadlines its process may still be silent; then it is killed."""
LOOK_S = 0.2
"""How often a thread that waits looks whether it is to end."""
END_S = 5.0
"""How long a process may take to end that was told to, and a thread whose process is gone."""
READ_BYTES = 1 << 16
MAX_ANSWER_BYTES = 16 << 20

log = logging.getLogger(__name__)


class ChildGone(Exception):
    """The process died, hung, or said what is no answer."""


class Child:
    """One running exporter. One thread at a time; `kill` from any."""

    def __init__(self, config: ExporterConfig) -> None:
        """Raises ChildGone."""
        try:
            self._process = subprocess.Popen(
                (sys.executable, "-m", "trainer.exports"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                process_group=0,  # its group ends with us; our session, so that its niceness counts
            )
        except OSError as error:
            raise ChildGone(f"cannot be started: {error}") from error
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._in, self._out, self._err = self._process.stdin, self._process.stdout, self._process.stderr
        self._stderr = Stderr("exporter")
        self._said = b""
        self._send(config.model_dump_json())

    def ask(self, request: ExportRequest, deadline: Deadline) -> ExportAnswer:
        """Have one made. Raises ChildGone."""
        self._send(request.model_dump_json())
        while True:
            line = self._line(deadline)
            try:
                return ExportAnswer.model_validate(documents.parse(line, "the exporter's answer"))
            except (ValueError, ValidationError):
                self._pass_on(line)

    @staticmethod
    def _pass_on(line: bytes) -> None:
        """What is no answer: last words go where those of all workers do."""
        if line.startswith(LAST_WORDS.encode()):
            os.write(1, line + b"\n")
        else:
            log.warning("exporter: %s", line.decode("utf-8", "replace"))

    def kill(self) -> None:
        """End it at once, and all it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill, and let go of the pipes."""
        if self._process.poll() is None:
            self.kill()
        self._process.wait()
        self._drain()
        self._stderr.close()
        for pipe in (self._in, self._out, self._err):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _send(self, line: str) -> None:
        try:
            self._in.write(line.encode() + b"\n")
        except BrokenPipeError:
            raise ChildGone(self._end()) from None

    def _line(self, deadline: Deadline) -> bytes:
        """The next line of its output."""
        watch = select.poll()
        for pipe in (self._out, self._err):
            watch.register(pipe, select.POLLIN)
        while b"\n" not in self._said:
            if deadline.passed():
                raise ChildGone("did not answer in time and was killed; is its disk or object store slow?")
            for fd, _ in watch.poll(LOOK_S * 1000):
                data = os.read(fd, READ_BYTES)
                if fd == self._err.fileno():
                    self._stderr.add(data, time.monotonic())
                    if not data:
                        watch.unregister(self._err)
                elif not data or len(self._said) > MAX_ANSWER_BYTES:
                    raise ChildGone(self._end())
                else:
                    self._said += data
        line, _, self._said = self._said.partition(b"\n")
        return line

    def _end(self) -> str:
        """How it ended, which it has, or is about to."""
        try:
            code = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            return "closed its output and was killed"
        self._drain()
        said = self._stderr.tail()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"{how}; its last words:\n{said}" if said else f"{how}; it said nothing"

    def _drain(self) -> None:
        os.set_blocking(self._err.fileno(), False)
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._err.fileno(), READ_BYTES):
                self._stderr.add(data, time.monotonic())


class ExporterProcess:
    """See module docstring; trainer.exports.attempts.Exporter. One thread."""

    def __init__(self, config: ExporterConfig) -> None:
        """Nothing is started before the first request."""
        self._config = config
        self._child: Child | None = None
        self._thread: threading.Thread | None = None
        self._answer: ExportAnswer | None = None
        self._closed = False

    def submit(self, request: ExportRequest) -> None:
        """Begin this one; none is being made."""
        assert self._thread is None, "one at a time"
        self._answer = None
        self._thread = threading.Thread(target=self._run, args=(request,), name="exporter", daemon=True)
        self._thread.start()

    def poll(self) -> ExportAnswer | None:
        """How the one that was begun ended; None: it did not, or none was begun. Each answer once."""
        if self._thread is None or self._thread.is_alive():
            return None
        self._thread.join()
        self._thread, answer = None, self._answer
        assert answer is not None, "the thread leaves an answer"
        return answer

    def close(self) -> None:
        """End the process, whatever it is making: what is half made is removed by the next that makes it."""
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
        """A thread: one request to its end."""
        section = request.section
        deadline = Deadline.after(section.deadline + (section.command_deadline if section.command else 0) + GRACE_S)
        try:
            if self._child is None:
                self._child = Child(self._config)
            self._answer = self._child.ask(request, deadline)
        except ChildGone as error:
            self._answer = ExportAnswer(name=request.name, outcome="failed", error=f"the exporter process {error}")
            if not self._closed and (child := self._child) is not None:
                self._child, self._config = None, self._config.model_copy(update={"faults": ()})  # they are its own
                child.close()
                self._config = self._config.model_copy(update={"faults": ()})  # a fault run kills it once
