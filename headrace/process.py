"""Child processes: started in a group of their own, ended with the whole group, in bounded time.

Every child of Headrace is started here, except for forked workers (headrace.forkserver) and for launchers that outlive
the service (service.jobs). The caller reads the output of a child and judges its end. Linux only (pidfds).
"""

import os
import select
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO

from headrace.deadline import Deadline
from headrace.errors import DeadlineExceeded

DEVNULL, PIPE, STDOUT = subprocess.DEVNULL, subprocess.PIPE, subprocess.STDOUT
KILL_S = 30.0
"""Longest wait for a process after SIGKILL. Beyond it the operating system is at fault: DeadlineExceeded."""
GONE_S = 0.5
"""Longest wait for the rest of a killed group: zombies that nobody reaps never leave it."""
GONE_POLL_S = 0.001
READ_BYTES = 1 << 16
MAX_OUTPUT_BYTES = 16 << 20
"""`run` keeps so many of the last bytes of each output."""
PASSED_ON = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH")
"""Variables that a user's command inherits. None of them is secret."""


class ChildProcess:
    """A child that leads a process group. One thread waits for it; `signal`, `kill` and `end` are for any thread."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        stdin: int = PIPE,
        stdout: int | None = PIPE,
        stderr: int | None = PIPE,
        new_session: bool = True,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Start `command`. Without `new_session` it leads a group in this process's session. Raises OSError.

        Pipes are unbuffered.
        """
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            bufsize=0,
            start_new_session=new_session,
            process_group=None if new_session else 0,
            pass_fds=pass_fds,
        )
        self.code: int | None = None
        """The exit code, or minus the signal's number; set by `end`."""
        self._reaping = threading.Lock()  # until the process is reaped, its number is its own and can be signalled
        self._ending = threading.Lock()  # the wait for the rest of the group happens once

    @property
    def pid(self) -> int:
        """Number of the process and of its group."""
        return self._process.pid

    @property
    def stdin(self) -> IO[bytes]:
        """The pipe to its standard input."""
        assert self._process.stdin is not None, "stdin is no pipe"
        return self._process.stdin

    @property
    def stdout(self) -> IO[bytes]:
        """The pipe from its standard output."""
        assert self._process.stdout is not None, "stdout is no pipe"
        return self._process.stdout

    @property
    def stderr(self) -> IO[bytes]:
        """The pipe from its standard error."""
        assert self._process.stderr is not None, "stderr is no pipe"
        return self._process.stderr

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, not to its group. Without effect after its end."""
        with self._reaping:
            if self.code is None:
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL to the group and return at once. Without effect after `end`."""
        with self._reaping:
            if self.code is None:
                kill_group(self.pid)

    def ends_within(self, seconds: float | None) -> bool:
        """True if the process ends by itself within `seconds` (None: wait without a bound). It is not reaped."""
        if self.code is not None:
            return True
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:  # another thread has reaped it
            return True
        try:
            watch = select.poll()
            watch.register(handle, select.POLLIN)
            return bool(watch.poll(None if seconds is None else seconds * 1000))
        finally:
            os.close(handle)

    def end(self) -> int:
        """Kill the group, wait until it is gone, and return `code`. May be repeated. Raises DeadlineExceeded.

        1. Kill the group while the leader, dead or alive, still holds its number. 2. Reap the leader. 3. Wait for the
        rest of the group.
        """
        with self._ending:
            if self.code is None:
                with self._reaping:
                    kill_group(self.pid)  # 1
                    if not self.ends_within(KILL_S):
                        raise DeadlineExceeded(f"process {self.pid} did not end within {KILL_S:g} s after SIGKILL")
                    self.code = self._process.wait()  # 2
                wait_until_gone(self.pid, Deadline.after(GONE_S))  # 3
            return self.code

    def close(self) -> None:
        """`end`, then close the pipes."""
        self.end()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


def kill_group(leader: int) -> None:
    """Send SIGKILL to the group of a child that is not reaped yet. Its leader ends at normal priority."""
    with suppress(PermissionError):  # everybody in it has ended, as some systems say it
        try:
            os.killpg(leader, signal.SIGKILL)
        except ProcessLookupError:  # it does not lead its group yet
            os.kill(leader, signal.SIGKILL)
    end_at_once(leader)


def end_at_once(pid: int) -> None:
    """Give the threads of a process that is killed, and not reaped yet, the normal priority, where that is allowed.

    The last of them frees the memory of the process. On a busy machine, one that runs after all others takes many
    seconds for it (headrace.priority), and until then the process counts as alive.
    """
    with suppress(OSError):  # it is gone, or this system has no such folder
        for thread in map(int, os.listdir(f"/proc/{pid}/task")):
            with suppress(OSError):
                if os.sched_getscheduler(thread) == os.SCHED_IDLE:
                    os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


def is_ending(pid: int) -> bool:
    """Whether the first thread of a process that is not reaped yet has ended, and others may not have."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return False


def wait_until_gone(group: int, deadline: Deadline) -> bool:
    """Wait until a killed group, whose leader is reaped, has no member left; whether that came before the deadline.

    Members that are children of this process, because it adopts orphans, are reaped.
    """
    while True:
        with suppress(ChildProcessError):
            while os.waitpid(-group, os.WNOHANG)[0]:
                pass
        try:
            os.killpg(group, 0)
        except (ProcessLookupError, PermissionError):
            return True
        if deadline.passed():
            return False
        time.sleep(GONE_POLL_S)


@cache
def _setpriv() -> str | None:
    return shutil.which("setpriv")


def dying_with_parent(command: Sequence[str]) -> tuple[str, ...]:
    """`command`, which the kernel kills when the thread that started it ends, however that ends.

    Where the tool for it (util-linux) is missing: `command` as it is.
    """
    setpriv = _setpriv()
    return tuple(command) if setpriv is None else (setpriv, "--pdeathsig", "KILL", "--", *command)


def user_environment() -> dict[str, str]:
    """The environment of a user's command: fixed time zone and locale, no secrets."""
    passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    return passed | {"TZ": "UTC", "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"}


def unbuffered(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment`, in which Python does not hold output back."""
    return {**environment, "PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a command that `run` started."""

    code: int | None
    """The exit code, or minus the signal's number; None: it did not end before the deadline and was killed."""
    output: bytes
    errors: bytes
    """Standard error, unless it went into `output`."""


def run(
    command: Sequence[str],
    *,
    deadline: Deadline,
    data: bytes = b"",
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    stderr: int = PIPE,
) -> Finished:
    """Run `command` to its end, with `data` as its standard input. Nothing of its group is left. Raises OSError.

    It has ended when it has closed its output and is gone. It dies with the thread that calls this.
    """
    child = ChildProcess(dying_with_parent(command), folder=folder, environment=environment, stderr=stderr)
    try:
        outputs = [child.stdout, child.stderr] if stderr == PIPE else [child.stdout]
        held = {pipe.fileno(): bytearray() for pipe in outputs}
        in_time = _exchange(child, data, held, deadline) and child.ends_within(deadline.left_s())
    finally:
        child.close()
    output, errors = [*(bytes(each) for each in held.values()), b""][:2]
    return Finished(child.code if in_time else None, output, errors)


def _exchange(child: ChildProcess, data: bytes, held: Mapping[int, bytearray], deadline: Deadline) -> bool:
    """Write `data` and read every output to its end; False where the deadline comes first."""
    watch, given, left, still_open = select.poll(), child.stdin.fileno(), memoryview(data), set(held)
    os.set_blocking(given, False)
    for output in held:
        watch.register(output, select.POLLIN)
    watch.register(given, select.POLLOUT)
    while still_open:
        if deadline.passed():
            return False
        for pipe, _ in watch.poll(deadline.left_s() * 1000):
            if pipe == given:
                left = _written(given, left)
                if not left:
                    watch.unregister(given)
                    child.stdin.close()
            elif read := os.read(pipe, READ_BYTES):
                held[pipe].extend(read)
                del held[pipe][:-MAX_OUTPUT_BYTES]
            else:
                watch.unregister(pipe)
                still_open.remove(pipe)
    return True


def _written(pipe: int, data: memoryview) -> memoryview:
    """The rest of `data` after a write; empty where the reader is gone."""
    try:
        return data[os.write(pipe, data) :] if data else data
    except BlockingIOError:
        return data
    except BrokenPipeError:
        return data[:0]
