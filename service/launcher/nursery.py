"""The launcher's side of millrace.nursery: workers are forked there, signalled from here, and their ends told here.

A nursery that dies takes its workers with it; the next start makes a new one.
"""

import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLate
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, TextIO

from millrace import documents
from millrace.nursery import MAX_MESSAGE_BYTES
from millrace.process import DEVNULL, ChildProcess, unbuffered
from service.launcher.child import Child, Spawner
from service.launcher.plan import PYTHON

START_S = 120.0
"""How long a fork may take; the first one waits for the imports."""
TOLD_S = 10.0
"""How long the nursery may take to tell of a process that is gone; then the nursery is ended."""
CLOSE_S = 5.0
"""How long the nursery may take to end."""


class NurseryChild:
    """A process forked by a nursery."""

    def __init__(self, nursery: "_Running", given: int, output: TextIO) -> None:
        self.output = output
        self._nursery, self._given = nursery, given
        self.started: Future[tuple[int, int]] = Future()  # process number and pidfd
        self.ended: Future[int] = Future()
        self._lock = threading.Lock()  # between signals and `let_go`: the pidfd stays its own
        self._open = True

    def terminate(self) -> None:
        """See Child."""
        self.signal(signal.SIGTERM)

    def kill(self) -> None:
        """See Child. The nursery kills the rest of the group when it sees the leader gone."""
        self.signal(signal.SIGKILL)

    def wait(self) -> int:
        """See Child."""
        poll = select.poll()
        poll.register(self.started.result()[1], select.POLLIN)
        poll.poll()
        try:
            return self.ended.result(TOLD_S)
        except TooLate:
            self._nursery.process.kill()
            return self.ended.result()

    def let_go(self) -> None:
        """See Child."""
        with self._lock:
            self._open = False
            os.close(self.started.result()[1])
            os.close(self._given)

    def lost(self) -> None:
        """The nursery is gone. The process dies with it, its group by our hand."""
        if not self.started.done():
            self.started.set_exception(OSError("the nursery that was to fork it has died"))
        elif not self.ended.done():
            pid, handle = self.started.result()
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)  # it may lead no group yet
                os.killpg(pid, signal.SIGKILL)
            self.ended.set_result(-signal.SIGKILL)

    def signal(self, number: signal.Signals) -> None:
        """See Child."""
        with self._lock, suppress(ProcessLookupError):
            if self._open:
                signal.pidfd_send_signal(self.started.result()[1], number)


class _Running:
    """A nursery process and the thread that listens to it."""

    def __init__(self, preload: Sequence[str]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = (*PYTHON, "millrace.nursery", "--socket", str(theirs.fileno()), "--preload", *preload)
            self.process = ChildProcess(
                command,
                environment=unbuffered(os.environ),
                stdin=DEVNULL,
                stdout=None,
                stderr=None,
                pass_fds=[theirs.fileno()],
            )
        self._numbers = count()
        self._children: dict[int, NurseryChild] = {}
        self._lock = threading.Lock()  # between a new child and the end of the nursery
        self.gone = False
        self._listener = threading.Thread(target=self._listen, name="nursery", daemon=True)
        self._listener.start()

    def start(self, module: str, argv: Sequence[str], folder: Path) -> Child:
        """Fork. Raises OSError."""
        their_input, given = os.pipe()
        read, their_output = os.pipe()
        child = NurseryChild(self, given, os.fdopen(read, encoding="utf-8", errors="replace"))
        number = next(self._numbers)
        try:
            with self._lock:
                if self.gone:
                    raise OSError("the nursery has died")
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
            raise OSError(f"the nursery did not fork within {START_S:g} s") from None
        return child

    def close(self) -> None:
        """End it, and with it what it forked."""
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
            self._take(documents.parse_object(message, "the nursery's answer"), descriptors)
        with self._lock:
            self.gone = True
        for child in self._children.values():
            child.lost()

    def _take(self, told: dict[str, Any], descriptors: list[int]) -> None:
        if "pid" in told:
            self._children[told["id"]].started.set_result((told["pid"], descriptors[0]))
        elif "code" in told:
            self._children.pop(told["id"]).ended.set_result(told["code"])
        else:
            self._children.pop(told["id"]).started.set_exception(OSError(told["error"]))


class Nursery:
    """Starts `python -m` commands by forking a process that has `preload` imported, others from nothing.

    A context: at its end no process of it is left.
    """

    def __init__(self, preload: Sequence[str]) -> None:
        self._preload = preload
        self._running: _Running | None = None

    def __enter__(self) -> "Nursery":
        self._running = _Running(self._preload)  # its imports take a while: begin
        return self

    def __exit__(self, *_: object) -> None:
        if self._running is not None:
            self._running.close()

    def start(self, command: Sequence[str], folder: Path) -> Child:
        """See Starter.start."""
        if tuple(command[:3]) != PYTHON:
            return Spawner().start(command, folder)
        if self._running is None or self._running.gone:
            if self._running is not None:
                self._running.close()
            self._running = _Running(self._preload)
        return self._running.start(command[3], command[4:], folder)


def able() -> bool:
    """Whether this system has what a nursery needs: Linux."""
    return sys.platform == "linux"
