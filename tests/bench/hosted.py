"""Processes of a bench as users start them: a service where the clicks example may run, others beside it."""

import contextlib
import http.client
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from headrace.deadline import Deadline
from tests.integration.hosted_service import HostedService

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "deploy" / "examples" / "clicks"
START_S, STOP_S = 75.0, 15.0
Found = TypeVar("Found")
CONFIG = """
root = "root"
listen = "127.0.0.1:0"
[access]
anonymous = "admin"
[allow]
pipe_commands = [["python", "generator.py"]]
roots = ["data"]
"""


@contextlib.contextmanager
def service(folder: Path) -> Iterator[HostedService]:
    """A service where the clicks job may run, and its jobs' processes; all of it is gone at the end."""
    hosted = HostedService(folder, CONFIG)
    shutil.copy(EXAMPLE / "generator.py", folder / "data")
    try:
        hosted.start()
        yield hosted
        hosted.end()
    finally:
        hosted.clean_up()


@contextlib.contextmanager
def process(folder: Path, name: str, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is told to end, and killed where it does not; what it says goes to a file."""
    with (folder / f"{name}.log").open("wb") as said:
        started = subprocess.Popen([sys.executable, "-m", *command], cwd=ROOT, stdout=said, stderr=said)
    try:
        yield started
    finally:
        started.terminate()
        try:
            started.wait(STOP_S)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


def until(found: Callable[[], Found | None], what: str, folder: Path) -> Found:
    """What `found` finds, within START_S."""
    deadline = Deadline.after(START_S)
    while not deadline.passed():
        with contextlib.suppress(OSError, http.client.HTTPException):
            if (value := found()) is not None:
                return value
        time.sleep(0.1)
    said = "\n".join(path.read_text()[-2000:] for path in sorted(folder.glob("*.log")))
    raise TimeoutError(f"{what}: not within {START_S:g} s\n{said}")


class Asked:
    """Asked over a connection of its own."""

    def __init__(self, address: str) -> None:
        self._http = http.client.HTTPConnection(address, timeout=10)

    def get(self, path: str) -> bytes | None:
        """What is there; None where it is not. Raises OSError and HTTPException."""
        try:
            return self._got(path)
        except (http.client.RemoteDisconnected, ConnectionResetError):  # idle for too long
            return self._got(path)

    def _got(self, path: str) -> bytes | None:
        try:
            self._http.request("GET", path)
            answer = self._http.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException):
            self._http.close()  # the next request connects anew
            raise
        return content if answer.status == 200 else None
