"""A warm forkserver, as its owner keeps it and as launchers get theirs from it (headrace.warm_forkserver).

The owner starts many launchers: the service, a test run. It passes the variables on to them.
"""

import json
import logging
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress

from headrace import documents
from headrace.errors import Unwritable
from headrace.forkserver import MAX_MESSAGE_BYTES
from headrace.private_folder import private_folder
from headrace.process import ChildProcess, unbuffered
from headrace.service.cluster.runtime import PYTHON
from headrace.warm_forkserver import VARIABLE

WAITING = 64
"""Most launchers that wait for their turn."""
ANSWER_S = 60.0
"""Longest wait for an answer: the warm forkserver may still import. Then a launcher starts its own."""
END_S = 5.0
"""Longest time for a warm forkserver to end."""

log = logging.getLogger(__name__)


def can_fork() -> bool:
    """True if this system can run a forkserver: it is Linux."""
    return sys.platform == "linux"


@contextmanager
def warm_forkserver(preload: Sequence[str]) -> Iterator[Mapping[str, str]]:
    """A warm forkserver that ends with this process; the variables by which launchers find it. What it forked goes on.

    No variables where this process has them already, and where no forkserver can run: then launchers start their own.
    """
    if VARIABLE in os.environ or not can_fork():
        yield {}
        return
    with ExitStack() as held:
        try:
            variables = held.enter_context(_running(preload))
        except (OSError, Unwritable) as error:  # a full disk, a temporary folder with a path too long for a socket
            log.warning("there is no warm forkserver, so each launcher starts its own: %s", error)
            variables = {}
        yield variables


@contextmanager
def _running(preload: Sequence[str]) -> Iterator[Mapping[str, str]]:
    """Raises OSError and Unwritable."""
    with private_folder("forkserver") as folder, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        address = str(folder / "socket")
        listener.bind(address)
        listener.listen(WAITING)
        process = ChildProcess(
            (*PYTHON, "headrace.warm_forkserver", "--socket", str(listener.fileno()), "--preload", *preload),
            environment=unbuffered(os.environ),
            stdout=None,
            stderr=None,
            pass_fds=[listener.fileno()],
        )
        listener.close()
        try:
            yield {VARIABLE: address}
        finally:
            process.stdin.close()
            process.ends_within(END_S)
            process.close()


@contextmanager
def warm_launchers(preload: Sequence[str]) -> Iterator[None]:
    """Meanwhile launchers get their forkservers from a warm one: those of this process, and those that it starts."""
    with warm_forkserver(preload) as variables:
        os.environ.update(variables)
        try:
            yield
        finally:
            for name in variables:
                del os.environ[name]


class LentForkserver:
    """The process of a forkserver that a warm one forked: no child of this process."""

    def __init__(self, handle: int) -> None:
        self._handle = handle  # a pidfd

    def kill(self) -> None:
        """Send SIGKILL and return at once. Its workers die with it."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def ends_within(self, seconds: float | None) -> bool:
        """True if it ends by itself within `seconds` (None: wait without a bound)."""
        watch = select.poll()
        watch.register(self._handle, select.POLLIN)
        return bool(watch.poll(None if seconds is None else seconds * 1000))

    def end(self) -> None:
        """Kill it, and wait until it is gone. Called once."""
        self.kill()
        self.ends_within(END_S)
        os.close(self._handle)


def borrow(preload: Sequence[str]) -> tuple[socket.socket, LentForkserver] | None:
    """A forkserver with `preload` from the warm one that the environment names, and the socket that controls it.

    None where none is named, or it does not answer, or refuses: the log says why.
    """
    if (address := os.environ.get(VARIABLE)) is None:
        return None
    request = {"prefix": sys.prefix, "environment": unbuffered(os.environ), "folder": os.getcwd(), "preload": preload}
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    handles: list[int] = []
    try:
        control.settimeout(ANSWER_S)
        control.connect(address)
        socket.send_fds(control, [json.dumps(request).encode()], [1, 2])
        message, handles, _, _ = socket.recv_fds(control, MAX_MESSAGE_BYTES, 1)
        if not message:
            raise ConnectionError("it has closed the connection")
        refused = documents.parse_object(message, "the warm forkserver's answer").get("refused")
    except OSError as error:
        refused = str(error)
    if refused is None:
        control.settimeout(None)
        return control, LentForkserver(*handles)
    control.close()
    log.warning("the warm forkserver at %s cannot be used, so this launcher starts its own: %s", address, refused)
    return None
