"""The warm forkserver: has imported what workers import, and forks a forkserver for each launcher that asks for one:
`python -P -m headrace.warm_forkserver`.

A forked forkserver belongs to its launcher: it ends with it, and goes on where the warm one ends. It equals one that
the launcher would start itself, or the launcher is refused: both processes inherit the same user, limits, cores,
control group and namespaces, and load the same code with the same settings.

A request is one datagram, `{"prefix", "environment", "folder", "preload"}` with the descriptors of standard output and
standard error. The forked forkserver answers `{"pid"}` with a pidfd, and the connection is its control
(headrace.forkserver). A refusal is `{"refused"}` with the reason. The warm forkserver ends when its standard input
closes.

Its owner's side and the launcher's are in service.cluster.warm.
"""

import argparse
import gc
import json
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import setproctitle

from headrace import documents
from headrace.forkserver import MAX_MESSAGE_BYTES, preload, serve_launcher

VARIABLE = "HEADRACE_FORKSERVER"
"""Variable of the environment: the socket of a warm forkserver, from which launchers get theirs."""
ASK_S = 1.0
"""Longest wait for the request of a launcher that has connected."""
AT_IMPORT = (
    "ARROW_", "CUDA_", "GLOO_", "GOTO_", "GRPC_", "KMP_", "LANG", "LC_", "LD_", "LLVM", "MALLOC_", "MKL_", "NCCL_",
    "NPY_", "NUMBA_", "OMP_", "OPENBLAS_", "PYTHON", "TORCH", "TZ",
)  # fmt: skip
"""Variables that interpreter and libraries read when they are loaded: beginnings of their names."""
STATUS = ("Uid", "Gid", "Groups", "Umask", "NoNewPrivs", "Seccomp", "CapEff", "Cpus_allowed", "Mems_allowed")
"""Lines of /proc/PID/status that a child inherits."""
LINKS = ("ns/cgroup", "ns/ipc", "ns/mnt", "ns/net", "ns/pid", "ns/user", "root")
Stamp = tuple[int, int, int]


class Warm:
    """The state of this process that a launcher's own forkserver would share."""

    def __init__(self) -> None:
        """After the imports; `os.environ` may have more than at the start."""
        self._code = {path: _stamp(path) for path in _loaded_files()}
        self._inherited = inherited(os.getpid())

    def lacks(self, started: Mapping[str, str], asked: Mapping[str, Any], launcher: int) -> str:
        """Why the process `launcher` needs a forkserver of its own; "" if it can have one from here.

        `started`: the environment that this process was started in; `asked`: the launcher's request.
        """
        if asked["prefix"] != sys.prefix:
            return f"it runs in {sys.prefix}"
        names = sorted(name for name in {*started, *asked["environment"]} if name.startswith(AT_IMPORT))
        if differs := [name for name in names if started.get(name) != asked["environment"].get(name)]:
            return f"it was started with another {differs[0]}"
        theirs = inherited(launcher)
        if other := [name for name, value in self._inherited.items() if theirs[name] != value]:
            return f"it has another {other[0]}"
        changed = next((path for path, stamp in self._code.items() if _stamp(path) != stamp), None)
        return "" if changed is None else f"{changed} has changed since it was loaded"


def inherited(pid: int) -> dict[str, str]:
    """All that a child of the process would inherit beside its environment, by name. Raises OSError."""
    of = Path(f"/proc/{pid}")
    lines = dict(line.split(":", 1) for line in (of / "status").read_text().splitlines())
    return {
        **{name: lines.get(name, "") for name in STATUS},
        **{name: os.readlink(of / name) for name in LINKS},
        **{name: (of / name).read_text() for name in ("cgroup", "limits", "oom_score_adj")},
        "priority": str(os.getpriority(os.PRIO_PROCESS, pid)),
        "interpreter": os.readlink(of / "exe"),
    }


def _loaded_files() -> set[str]:
    return {path for module in list(sys.modules.values()) if (path := getattr(module, "__file__", None)) is not None}


def _stamp(path: str) -> Stamp | None:
    """Changes with the file's content; None: there is no file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _request(
    warm: Warm, started: Mapping[str, str], connection: socket.socket
) -> tuple[dict[str, Any], list[int]] | None:
    """The request of the launcher at `connection`, with its descriptors; None: it was refused.

    Raises OSError, ValueError and KeyError where the launcher is gone, or sends no request.
    """
    connection.settimeout(ASK_S)
    message, descriptors, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 2)
    with ExitStack() as held:
        for descriptor in descriptors:
            held.callback(os.close, descriptor)
        asked = documents.parse_object(message, "the launcher's request")
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if reason := warm.lacks(started, asked, struct.unpack("3i", peer)[0]):
            connection.send(json.dumps({"refused": reason}).encode())
            return None
        held.pop_all()
    return asked, descriptors


def _separate(asked: Mapping[str, Any], started: Mapping[str, str], outputs: Sequence[int]) -> None:
    """Make this fork a process as the launcher would start it."""
    setproctitle.setproctitle("python -P -m headrace.forkserver")  # first: it finds the title beside the environment
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    given = os.open(os.devnull, os.O_RDONLY)
    for source, target in zip((given, *outputs), (0, 1, 2), strict=True):
        os.dup2(source, target)
        os.close(source)
    for name in started:  # what libraries have added stays
        os.environ.pop(name, None)
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])


def _serve(
    listener: socket.socket, warm: Warm, started: Mapping[str, str]
) -> tuple[socket.socket, dict[str, Any], list[int]] | None:
    """Answer launchers until standard input closes; None then. In a fork: its control, the request and descriptors."""
    while True:
        ready, _, _ = select.select([0, listener.fileno()], [], [])
        if 0 in ready:
            return None
        connection, _ = listener.accept()
        try:
            found = _request(warm, started, connection)
        except (OSError, ValueError, KeyError) as error:
            print(f"warm forkserver: a launcher got no answer: {error}", file=sys.stderr, flush=True)
            found = None
        if found is not None:
            if os.fork() == 0:
                return connection, *found
            for descriptor in found[1]:
                os.close(descriptor)
        connection.close()


def main() -> None:
    """Serve until standard input closes."""
    started = dict(os.environ)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", type=int, required=True, help="descriptor of the socket that launchers connect to")
    parser.add_argument("--preload", nargs="*", default=[], help="modules to import")
    arguments = parser.parse_args()
    with socket.socket(fileno=arguments.socket) as listener:
        gc.disable()  # as in headrace.forkserver
        for module in arguments.preload:
            preload(module)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the forks
        forked = _serve(listener, Warm(), started)
    if forked is None:
        return
    control, asked, outputs = forked
    _separate(asked, started, outputs)
    own = os.pidfd_open(os.getpid())
    control.settimeout(None)
    try:
        socket.send_fds(control, [json.dumps({"pid": os.getpid()}).encode()], [own])
    except (BrokenPipeError, ConnectionResetError):
        return  # the launcher has given up and started its own
    os.close(own)
    serve_launcher(control, asked["preload"])


if __name__ == "__main__":
    main()
