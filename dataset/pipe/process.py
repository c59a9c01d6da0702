"""Talks to one child process: feeds its stdin, reads its stdout, logs its stderr, and kills it when it hangs.

One thread does all three by `poll`, so nothing can block on a full pipe and no thread outlives the child. The child
leads a process group of its own, which is killed as a whole at the end.
"""

import contextlib
import fcntl
import logging
import os
import select
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator

from dataset.pipe.command import Command
from millrace.occurrences import is_told
from millrace.printable import printable

PIPE_BYTES = 1 << 20
READ_BYTES = 1 << 20
MAX_TAIL_LINES = 20
MAX_LINE_BYTES = 4096
MAX_LOGGED_LINES, LOGGED_WINDOW_S = 20, 10.0
"""Of stderr, so many lines are logged in so many seconds; the others are counted."""

MAX_SAID_LINES = 1_000
"""Different lines remembered; after them each is taken for a new one."""

Chunk = bytes | bytearray | memoryview

log = logging.getLogger(__name__)


class ChildFailed(Exception):
    """The command broke its promise; the pool tries again or tells the user."""

    def __init__(self, what: str, exit_code: int | None = None, stderr: str = "") -> None:
        super().__init__(what)
        self.what, self.exit_code, self.stderr = what, exit_code, stderr


class Repeats:
    """Lines that earlier processes of a command have said, too: a traceback is logged once, not once a process."""

    def __init__(self) -> None:
        self._before: set[str] = set()
        self._said: set[str] = set()
        self._count = 0

    def begin(self) -> None:
        """A new process."""
        self._before |= self._said
        self._said = set()

    def add(self, line: str) -> str | None:
        """What to log for a line: itself, the count of repeats at the 10th, 100th, 1,000th, else nothing."""
        if line not in self._before:
            if len(self._before) + len(self._said) < MAX_SAID_LINES:
                self._said.add(line)
            return line
        self._count += 1
        if self._count >= 10 and is_told(self._count):
            return f"{self._count:,} lines so far are as earlier processes said them; the last: {line}"
        return None


class Stderr:
    """Lines of a child's stderr: to the log, rate-limited, repeats counted; the last ones are kept for messages."""

    def __init__(self, name: str, repeats: Repeats | None = None) -> None:
        self._name, self._rest, self._repeats = name, b"", repeats or Repeats()
        self._repeats.begin()
        self._lines: deque[str] = deque(maxlen=MAX_TAIL_LINES)
        self._window_s, self._num_logged, self._num_silent = -LOGGED_WINDOW_S, 0, 0

    def add(self, data: bytes, now_s: float) -> None:
        """Take what was read."""
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[-MAX_LINE_BYTES:]
        for line in lines:
            self._take(_text(line[:MAX_LINE_BYTES]).rstrip(), now_s)

    def tail(self) -> str:
        """The last lines."""
        return "\n".join([*self._lines, *filter(None, [_text(self._rest)])])

    def close(self) -> None:
        """Log what is left, and how much was not."""
        if self._rest:
            self._take(_text(self._rest), time.monotonic())
            self._rest = b""
        self._report()

    def _take(self, line: str, now_s: float) -> None:
        self._lines.append(line)
        told = self._repeats.add(line)
        if told is None:
            return
        if now_s - self._window_s >= LOGGED_WINDOW_S:
            self._report()
            self._window_s, self._num_logged = now_s, 0
        if self._num_logged < MAX_LOGGED_LINES:
            self._num_logged += 1
            log.info("%s: %s", self._name, told)
        else:
            self._num_silent += 1

    def _report(self) -> None:
        if self._num_silent:
            log.info("%s: %d more lines on stderr were not logged", self._name, self._num_silent)
            self._num_silent = 0


def _text(line: bytes) -> str:
    return printable(line.decode("utf-8", "replace"))


class Child:
    """One running command. One thread at a time; `kill` from any."""

    def __init__(self, command: Command, idle_s: float, repeats: Repeats | None = None) -> None:
        self._idle_s, self._killing = idle_s, threading.Lock()
        self.waited_s = 0.0
        """How long the command neither read nor wrote, so far."""
        try:
            self._process = subprocess.Popen(
                command.argv,
                cwd=command.folder,
                env=command.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            raise ChildFailed(f"cannot be started: {error}") from error
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._in, self._out, self._err = (
            self._process.stdin.fileno(),
            self._process.stdout.fileno(),
            self._process.stderr.fileno(),
        )
        for fd in (self._in, self._out, self._err):
            os.set_blocking(fd, False)
        for fd in (self._in, self._out):
            with contextlib.suppress(OSError):  # beyond the user's limit: the default size does as well
                fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._poll = select.poll()
        self._poll.register(self._out, select.POLLIN)
        self._poll.register(self._err, select.POLLIN)
        self._stderr = Stderr(f"pipe[{self._process.pid}]", repeats)
        self._chunks: Iterator[Chunk] = iter(())
        self._pending = memoryview(b"")
        self._close_after = self._refused = self._out_ended = self._err_ended = False
        self._output: deque[bytes] = deque()
        self._left_bytes = 0

    def send(self, chunks: Iterable[Chunk], *, max_output_bytes: int, close: bool) -> None:
        """Feed `chunks` while output is read; `close`: then end its stdin. Output beyond the limit is a failure."""
        assert not self._pending
        self._chunks, self._close_after, self._left_bytes = iter(chunks), close, max_output_bytes
        self._poll.register(self._in, select.POLLOUT)

    def read(self) -> bytes:
        """Some output; b"" at its end. Raises ChildFailed where the command hangs or never stops printing."""
        last_s = time.monotonic()
        while not self._output and not self._out_ended:
            left_s = last_s + self._idle_s - time.monotonic()
            asked_s = time.monotonic()
            ready = self._poll.poll(max(0.0, left_s) * 1000) if left_s > 0 else []
            self.waited_s += time.monotonic() - asked_s
            if not ready and left_s <= 0:
                self.kill()
                raise self.failure(f"neither read nor wrote for {self._idle_s:g} s and was killed (pipe.deadline)")
            if any([self._serve(fd) for fd, _ in ready]):
                last_s = time.monotonic()
        return self._output.popleft() if self._output else b""

    def finish(self) -> None:
        """After the end of its output: wait for its end. Raises ChildFailed unless it read all and exits with 0."""
        ended = self.ends_within(self._idle_s)
        self._drain_stderr()
        if not ended:
            self.kill()
            raise self.failure(f"closed its output but did not end in {self._idle_s:g} s and was killed")
        self.kill()
        code = self._process.returncode
        if code:
            raise self.failure(f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}")
        if self._refused:
            raise self.failure("closed its input before it had read all events")

    def failure(self, what: str) -> ChildFailed:
        """A ChildFailed with what is known of the process."""
        self._drain_stderr()
        return ChildFailed(what, self._process.returncode, self._stderr.tail())

    def ends_within(self, seconds: float) -> bool:
        """Whether the process ends by itself in so many seconds."""
        if self._process.returncode is not None:
            return True
        try:
            pid_fd = os.pidfd_open(self._process.pid)
        except ProcessLookupError:  # another thread has killed and reaped it
            return True
        try:
            watch = select.poll()
            watch.register(pid_fd, select.POLLIN)
            return bool(watch.poll(seconds * 1000))
        finally:
            os.close(pid_fd)

    def kill(self) -> None:
        """End the process and all it started. Harmless when repeated."""
        with self._killing:
            if self._process.returncode is None:
                # The leader is not reaped yet, so the group's number is still its own.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()

    def close(self) -> None:
        """Kill, and let go of the pipes."""
        self.kill()
        self._drain_stderr()
        self._stderr.close()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    # -- what poll says is ready; each tells whether the child read or wrote

    def _serve(self, fd: int) -> bool:
        if fd == self._out:
            return self._serve_output()
        if fd == self._in:
            return self._serve_input()
        self._serve_stderr()
        return False

    def _serve_output(self) -> bool:
        data = os.read(self._out, READ_BYTES)
        if not data:
            self._out_ended = True
            self._poll.unregister(self._out)
            return True
        self._left_bytes -= len(data)
        if self._left_bytes < 0:
            self.kill()
            raise self.failure("printed far more than its events can explain and was killed; does it ever end?")
        self._output.append(data)
        return True

    def _serve_input(self) -> bool:
        try:
            for _ in range(8):
                if not self._pending:
                    chunk = next(self._chunks, None)
                    if chunk is None:
                        self._end_input()
                        return True
                    self._pending = memoryview(chunk).cast("B")
                self._pending = self._pending[os.write(self._in, self._pending) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._refused, self._pending = True, memoryview(b"")
            self._end_input()
        return True

    def _end_input(self) -> None:
        self._poll.unregister(self._in)
        if (self._close_after or self._refused) and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.stdin = None

    def _serve_stderr(self) -> None:
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._err, 1 << 16)
            self._stderr.add(data, time.monotonic())
            if not data:
                self._err_ended = True
                self._poll.unregister(self._err)

    def _drain_stderr(self) -> None:
        """Read what is there, at most so much: a grandchild may hold the pipe and write on."""
        with contextlib.suppress(BlockingIOError, ValueError, OSError):
            for _ in range(64):
                if self._err_ended or not (data := os.read(self._err, 1 << 16)):
                    return
                self._stderr.add(data, time.monotonic())
