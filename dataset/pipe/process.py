"""Talks to one child process: feeds its stdin, reads its stdout, logs its stderr, and kills it when it hangs.

One thread does all three by `poll`, so nothing blocks on a full pipe and no thread outlives the child. Starting the
child and ending it with its group is headrace.process' work.
"""

import contextlib
import fcntl
import os
import select
import time
from collections import deque
from collections.abc import Iterable, Iterator

from headrace.dataset.pipe.command import Command
from headrace.logs import RepeatedLines, StderrLog
from headrace.process import ChildProcess

PIPE_BYTES = 1 << 20
READ_BYTES = 1 << 20

Chunk = bytes | bytearray | memoryview


class PipeProcessFailed(Exception):
    """The command failed. The pool tries again, or raises PipeFailed."""

    def __init__(self, what: str, exit_code: int | None = None, stderr: str = "") -> None:
        super().__init__(what)
        self.what, self.exit_code, self.stderr = what, exit_code, stderr


class PipeProcess:
    """One running command. One thread at a time; `kill` from any."""

    def __init__(self, command: Command, idle_s: float, repeats: RepeatedLines | None = None) -> None:
        self._idle_s = idle_s
        self.waited_s = 0.0
        """Seconds in which the command neither read nor wrote, so far."""
        try:
            self._process = ChildProcess(command.argv, folder=command.folder, environment=command.environment)
        except OSError as error:
            raise PipeProcessFailed(f"cannot be started: {error}") from error
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
        self._stderr = StderrLog(f"pipe[{self._process.pid}]", repeats)
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
        """Some output; b"" at its end. Raises PipeProcessFailed where the command hangs or never stops printing."""
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
        """After the end of its output: wait for its end. Raises PipeProcessFailed unless it read all and exits with
        0."""
        ended = self.ends_within(self._idle_s)
        self._drain_stderr()
        self.kill()
        if not ended:
            raise self.failure(f"closed its output but did not end in {self._idle_s:g} s and was killed")
        code = self._process.code
        if code:
            raise self.failure(f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}")
        if self._refused:
            raise self.failure("closed its input before it had read all events")

    def failure(self, what: str) -> PipeProcessFailed:
        """A PipeProcessFailed with the exit code and the last lines of the process."""
        self._drain_stderr()
        return PipeProcessFailed(what, self._process.code, self._stderr.tail())

    def ends_within(self, seconds: float) -> bool:
        """True if the process ends by itself within `seconds`."""
        return self._process.ends_within(seconds)

    def kill(self) -> None:
        """End the process and everything in its group. May be repeated. Any thread."""
        self._process.end()

    def close(self) -> None:
        """Kill, and close the pipes."""
        self.kill()
        self._drain_stderr()
        self._stderr.close()
        self._process.close()

    # -- called for a pipe that is ready; each returns whether the child read or wrote

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
        if self._close_after or self._refused:
            self._process.stdin.close()

    def _serve_stderr(self) -> None:
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._err, 1 << 16)
            self._stderr.add(data, time.monotonic())
            if not data:
                self._err_ended = True
                self._poll.unregister(self._err)

    def _drain_stderr(self) -> None:
        """Read the rest, within a bound: a grandchild may hold the pipe and go on writing."""
        with contextlib.suppress(BlockingIOError, ValueError, OSError):
            for _ in range(64):
                if self._err_ended or not (data := os.read(self._err, 1 << 16)):
                    return
                self._stderr.add(data, time.monotonic())
