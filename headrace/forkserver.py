"""The forkserver: a preloaded parent that forks workers in milliseconds: `python -P -m headrace.forkserver`.

It imports the modules that workers need and starts no thread, channel or GPU of ours: a fork copies one thread only.
(OpenBLAS and jemalloc each keep a thread from their import on; both handle forks through pthread_atfork.)

Requests come over a Unix socket, one datagram each: `{"id", "module", "argv", "cwd"}` with the descriptors of standard
input and of output. The answer is `{"id", "pid"}` with a pidfd, or `{"id", "error"}`. `{"id", "code"}` follows once the
process and its group are gone; after the last worker, also once everything is gone that any of them left behind. The
forkserver ends when the other end of the socket closes, and its children end with it.

The launcher's side is service.cluster.child.
"""

import argparse
import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import setproctitle

from headrace import documents
from headrace.deadline import Deadline
from headrace.process import kill_group, wait_until_gone

MAX_MESSAGE_BYTES = 64 << 10
"""Longest request; a longer one is a bug."""
GROUP_S = 10.0
"""Longest wait for the rest of a killed group. The launcher ends a forkserver that is silent for as long."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
"""Options of prctl(2): the signal at the parent's death; adoption of the orphans below this process."""


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """The program of a child: `python -m module *argv`."""

    id: int
    module: str
    argv: tuple[str, ...]
    cwd: str


class Forkserver:
    """Forks children, waits for them, and reports. Single-threaded."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._children: dict[int, int] = {}  # id of the request, by process number
        self._woken, wake = socket.socketpair()
        self._woken.setblocking(False)
        wake.setblocking(False)
        self._wake = wake
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake.fileno())
        _prctl(PR_SET_CHILD_SUBREAPER, 1)

    def serve(self, *, wait: bool) -> tuple[ForkRequest, list[int]] | None:
        """Serve the requests that are there or, with `wait`, all requests until the launcher is gone.

        Returns None in this process; in a child, the request with its descriptors.
        """
        while True:
            ready, _, _ = select.select([self._control, self._woken], [], [], None if wait else 0)
            if self._woken in ready:
                self._reap()
            if self._control in ready:
                try:
                    message, descriptors, _, _ = socket.recv_fds(self._control, MAX_MESSAGE_BYTES, 2)
                except ConnectionResetError:  # the launcher is gone, and has not read all
                    message, descriptors = b"", []
                if not message:
                    self._end()
                raw = documents.parse_object(message, "the launcher's request")
                request = ForkRequest(raw["id"], raw["module"], tuple(raw["argv"]), raw["cwd"])
                if self._fork(request):
                    return request, descriptors
                for descriptor in descriptors:
                    os.close(descriptor)
            if not ready:
                return None

    def _fork(self, request: ForkRequest) -> bool:
        """True if this is the child."""
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self._report({"id": request.id, "error": f"cannot fork: {error.strerror}"})
            return False
        if pid == 0:
            _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # the parent died before the prctl
                os._exit(1)
            signal.set_wakeup_fd(-1)
            for ours in (self._control, self._woken, self._wake):
                ours.close()
            return True
        self._children[pid] = request.id
        pidfd = os.pidfd_open(pid)  # the child is not reaped yet, so its number is its own
        self._report({"id": request.id, "pid": pid}, pidfd)
        os.close(pidfd)
        return False

    def _reap(self) -> None:
        """Report children that are gone with their groups. While a worker lives, adopted orphans are only reaped."""
        try:
            while self._woken.recv(4096):
                pass
        except BlockingIOError:
            pass
        while self._children and (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)):
            pid = ended.si_pid
            if pid not in self._children:
                os.waitpid(pid, 0)
                continue
            kill_group(pid)  # while the zombie holds the group's number
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            wait_until_gone(pid, Deadline.after(GROUP_S))  # this process adopts the orphans of the group
            number = self._children.pop(pid)
            if not self._children:
                _kill_adopted()
            self._report({"id": number, "code": code})

    def _report(self, message: dict[str, Any], *descriptors: int) -> None:
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], descriptors)
        except BrokenPipeError:
            self._end()

    def _end(self) -> None:
        """The launcher is gone: end every process below this one, also stopped ones."""
        for pid in self._children:
            kill_group(pid)
        _kill_adopted()
        os._exit(0)  # without the messages that libraries print at their end


def _load_kernels() -> None:
    """Load the kernels of the imported modules, if any of these has some."""
    if "headrace.kernel_cache" in sys.modules:
        from headrace.kernel_cache import load_kernels

        load_kernels()


def become(request: ForkRequest, descriptors: Sequence[int]) -> None:
    """In a child: run the module as `python -m` would. Raises what the module raises, usually SystemExit."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the launcher runs in the background
    given, output = descriptors
    for source, target in ((given, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    for descriptor in descriptors:
        os.close(descriptor)
    os.chdir(request.cwd)
    atexit.register(gc.unfreeze)  # else libraries that count their objects complain at the end
    setproctitle.setproctitle(" ".join(("python -m", request.module, *request.argv)))
    sys.argv = [request.module, *request.argv]
    runpy.run_module(request.module, run_name="__main__", alter_sys=True)


def _kill_adopted() -> None:
    """End all children of this process. The workers are gone or dying; the others are orphans that they left behind.

    Orphans may lead sessions of their own, as pipe commands do. While a worker lives, an orphan may work for it.
    """
    while pids := _children():
        for pid in pids:
            kill_group(pid)
        for pid in pids:
            os.waitpid(pid, 0)  # its own children become ours, for the next round


def _children() -> list[int]:
    """Process numbers of our children. A number is not used again until we wait for its process."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            parent = int(path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1])
            if parent == os.getpid():
                found.append(int(path.parent.name))
    return found


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def preload(module: str) -> None:
    """Import a module and load its kernels. Children share its objects, and their garbage collectors skip them."""
    importlib.import_module(module)
    _load_kernels()
    gc.freeze()


def serve_launcher(control: socket.socket, modules: Sequence[str]) -> None:
    """Import `modules`, and serve the requests that come by `control`. Returns in children only, after their work."""
    server, child = Forkserver(control), None
    gc.disable()  # what is imported stays: looking for garbage among it takes a tenth of the time
    for module in modules:
        preload(module)
        if child := server.serve(wait=False):
            break
    child = child or server.serve(wait=True)
    assert child is not None, "serving ends in a child only"
    gc.enable()
    become(*child)


def main() -> None:
    """Serve until the parent closes the socket."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", type=int, required=True, help="descriptor of the socket to the launcher")
    parser.add_argument("--preload", nargs="*", default=[], help="modules to import; requests are served after each")
    arguments = parser.parse_args()
    serve_launcher(socket.socket(fileno=arguments.socket), arguments.preload)


if __name__ == "__main__":
    main()
