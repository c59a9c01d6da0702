"""A worker's process on this machine, and the two ways to start one: from nothing, or forked by a forkserver.

The forkserver (headrace.forkserver) has imported what workers import. One that dies takes its workers with it; the next
start makes a new one.
"""

import io
import json
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLate
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, Protocol, TextIO

from headrace import documents
from headrace.forkserver import MAX_MESSAGE_BYTES
from headrace.process import DEVNULL, STDOUT, ChildProcess, end_at_once, is_ending, unbuffered
from headrace.service.cluster.runtime import OF_ANY_JOB, PYTHON
from headrace.service.cluster.warm import LentForkserver, borrow, can_fork
from headrace.warm_forkserver import VARIABLE

START_S = 120.0
"""Longest time for a fork; the first one waits for the imports."""
TOLD_S = 10.0
"""Longest time until the forkserver reports a process that is gone; then the forkserver is killed."""
LOOK_S = 0.5
"""Time between two looks whether a process is about to end."""
CLOSE_S = 5.0
"""Longest time for the forkserver to end."""


class WorkerProcess(Protocol):
    """A process that leads a session of its own. Its standard input stays open, unwritten, until `release`."""

    output: TextIO
    """Its standard output and standard error."""

    def terminate(self) -> None:
        """Ask the process to end now. Any thread."""
        ...

    def kill(self) -> None:
        """End the process and everything in its group, also where it is stopped. Any thread."""
        ...

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, not to its group. Any thread."""
        ...

    def wait(self) -> int:
        """Wait until the process and its group are gone; the exit code, or minus the signal's number. Called once."""
        ...

    def release(self) -> None:
        """Release what is held of a process that is gone. `output` is closed by its reader."""
        ...


class Starter(Protocol):
    """Starts processes."""

    def start(self, command: Sequence[str], folder: Path) -> WorkerProcess:
        """Start `command` in `folder`. Raises OSError where that is impossible."""
        ...


class Spawner:
    """Starts each process from nothing."""

    def start(self, command: Sequence[str], folder: Path) -> WorkerProcess:
        return SpawnedChild(command, folder)


class SpawnedChild:
    """A direct child of this process."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self._process = ChildProcess(command, folder=folder, environment=unbuffered(os.environ), stderr=STDOUT)
        raw = io.FileIO(os.dup(self._process.stdout.fileno()))  # the reader closes its own
        self._process.stdout.close()
        self.output: TextIO = io.TextIOWrapper(io.BufferedReader(raw), encoding="utf-8", errors="replace")

    def terminate(self) -> None:
        self.signal(signal.SIGTERM)

    def signal(self, number: signal.Signals) -> None:
        self._process.signal(number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> int:
        self._process.ends_within(None)
        return self._process.end()

    def release(self) -> None:
        self._process.close()


class ForkedChild:
    """A process that the forkserver forked."""

    def __init__(self, server: "_Running", given: int, output: TextIO) -> None:
        self.output = output
        self._server, self._given = server, given
        self.started: Future[tuple[int, int]] = Future()  # process number and pidfd
        self.ended: Future[int] = Future()
        self._lock = threading.Lock()  # held by signals and `release`: a signal never uses a closed pidfd
        self._open = True

    def terminate(self) -> None:
        self.signal(signal.SIGTERM)

    def kill(self) -> None:
        """The forkserver kills the rest of the group when the leader is gone."""
        self.signal(signal.SIGKILL)

    def wait(self) -> int:
        poll = select.poll()
        pid, handle = self.started.result()
        poll.register(handle, select.POLLIN)
        while not poll.poll(LOOK_S * 1000):
            if is_ending(pid):  # it was killed by somebody else
                end_at_once(pid)
        try:
            return self.ended.result(TOLD_S)
        except TooLate:
            self._server.process.kill()
            return self.ended.result()

    def release(self) -> None:
        with self._lock:
            self._open = False
            os.close(self.started.result()[1])
            os.close(self._given)

    def lost(self) -> None:
        """The forkserver is gone. The process dies with it; its group is killed here."""
        if not self.started.done():
            self.started.set_exception(OSError("the forkserver died before it forked"))
        elif not self.ended.done():
            pid, handle = self.started.result()
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)  # it may not lead its group yet
                os.killpg(pid, signal.SIGKILL)
            self.ended.set_result(-signal.SIGKILL)

    def signal(self, number: signal.Signals) -> None:
        with self._lock, suppress(ProcessLookupError):
            if self._open:
                pid, handle = self.started.result()
                signal.pidfd_send_signal(handle, number)
                if number is signal.SIGKILL:
                    end_at_once(pid)


def _started(preload: Sequence[str]) -> tuple[socket.socket, ChildProcess]:
    """A new forkserver, and the socket that controls it."""
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = (*PYTHON, "headrace.forkserver", "--socket", str(theirs.fileno()), "--preload", *preload)
        try:
            process = ChildProcess(
                command,
                environment=unbuffered(os.environ),
                stdin=DEVNULL,
                stdout=None,
                stderr=None,
                pass_fds=[theirs.fileno()],
            )
        except OSError:
            control.close()
            raise
    return control, process


_early: list[tuple[socket.socket, ChildProcess]] = []
"""A forkserver that no starter has taken yet."""


@contextmanager
def early_forkserver() -> Iterator[Callable[[], None]]:
    """Start a forkserver that the first starter of this process takes, so that its imports run beside those of this
    process: of all that some job needs. One that nobody takes ends with the context, or by what this gives.
    """
    mine = list[tuple[socket.socket, ChildProcess]]()

    def end() -> None:
        for each in mine:
            with suppress(ValueError):  # taken
                _early.remove(each)
                control, process = each
                control.close()
                process.kill()
                process.end()

    if can_fork() and VARIABLE not in os.environ and find_spec("torch") is not None:
        with suppress(OSError):  # a starter will say why
            mine.append(_started(OF_ANY_JOB))
    _early.extend(mine)
    try:
        yield end
    finally:
        end()


def _taken_early() -> tuple[socket.socket, ChildProcess] | None:
    try:
        return _early.pop()
    except IndexError:
        return None


class _Running:
    """A forkserver process and the thread that listens to it."""

    def __init__(self, preload: Sequence[str]) -> None:
        self.process: ChildProcess | LentForkserver
        self._control, self.process = borrow(preload) or _taken_early() or _started(preload)
        self._numbers = count()
        self._children: dict[int, ForkedChild] = {}
        self._lock = threading.Lock()  # held for a new child and for the end of the forkserver
        self.gone = False
        self._listener = threading.Thread(target=self._listen, name="forkserver", daemon=True)
        self._listener.start()

    def start(self, module: str, argv: Sequence[str], folder: Path) -> WorkerProcess:
        """Fork. Raises OSError."""
        their_input, given = os.pipe()
        read, their_output = os.pipe()
        child = ForkedChild(self, given, os.fdopen(read, encoding="utf-8", errors="replace"))
        number = next(self._numbers)
        try:
            with self._lock:
                if self.gone:
                    raise OSError("the forkserver has died")
                self._children[number] = child
            request = {"id": number, "module": module, "argv": argv, "cwd": str(folder)}
            socket.send_fds(self._control, [json.dumps(request).encode()], [their_input, their_output])
        finally:
            os.close(their_input)
            os.close(their_output)
        try:
            child.started.result(START_S)
        except TooLate:
            self.process.kill()
            raise OSError(f"the forkserver did not fork within {START_S:g} s") from None
        return child

    def close(self) -> None:
        """End the forkserver and all that it forked."""
        self._control.shutdown(socket.SHUT_RDWR)
        if not self.process.ends_within(CLOSE_S):
            self.process.kill()
        self._listener.join()
        self.process.end()
        self._control.close()

    def _listen(self) -> None:
        while True:
            try:
                message, descriptors, _, _ = socket.recv_fds(self._control, MAX_MESSAGE_BYTES, 1)
            except ConnectionResetError:
                message = b""
            if not message:
                break
            self._take(documents.parse_object(message, "the forkserver's answer"), descriptors)
        with self._lock:
            self.gone = True
        for child in self._children.values():
            child.lost()

    def _take(self, message: dict[str, Any], descriptors: list[int]) -> None:
        if "pid" in message:
            self._children[message["id"]].started.set_result((message["pid"], descriptors[0]))
        elif "code" in message:
            self._children.pop(message["id"]).ended.set_result(message["code"])
        else:
            self._children.pop(message["id"]).started.set_exception(OSError(message["error"]))


class ForkingStarter:
    """Starts `python -m` commands by forking a process that has imported `preload`; other commands from nothing.

    A context. No process of it is left at its end.
    """

    def __init__(self, preload: Sequence[str]) -> None:
        self._preload = preload
        self._running: _Running | None = None

    def __enter__(self) -> "ForkingStarter":
        self._running = _Running(self._preload)  # its imports take a while
        return self

    def __exit__(self, *_: object) -> None:
        if self._running is not None:
            self._running.close()

    def start(self, command: Sequence[str], folder: Path) -> WorkerProcess:
        if tuple(command[:3]) != PYTHON:
            return Spawner().start(command, folder)
        if self._running is None or self._running.gone:
            if self._running is not None:
                self._running.close()
            self._running = _Running(self._preload)
        return self._running.start(command[3], command[4:], folder)


@contextmanager
def local_starter(preload: Sequence[str]) -> Iterator[Starter]:
    """Starts processes by forking one that has imported `preload`, where that is possible; else each from nothing."""
    if preload and can_fork():
        with ForkingStarter(preload) as starter:
            yield starter
    else:
        yield Spawner()
