"""`headrace serve` in a process of its own, asked over HTTP; nothing of it or its jobs is left at the end."""

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from headrace.service.jobs.folder import JobFolder
from headrace.trainer.journal.log import RecordKind, read
from tests.fakes.warm import warm_environment
from tests.integration.stream_job import SPEC

CONFIG = """
root = "root"
listen = "127.0.0.1:0"
[access]
anonymous = "admin"
[allow]
pipe_commands = [["cat"]]
roots = ["data"]
[limits]
stop = "15s"
"""


def spec_of(**sections: Any) -> dict[str, Any]:
    """The small job, with a store of the service's."""
    raw = tomllib.loads(SPEC)
    del raw["store"]
    return {**raw, **sections}


class HostedService:
    """A service with its root in `folder`; `folder`/data is where jobs may read.

    Its jobs start by the warm forkserver of all tests, or with `own_forkserver` by one of the service.
    """

    def __init__(self, folder: Path, config: str = CONFIG, *, own_forkserver: bool = False) -> None:
        self.folder, self.jobs = folder, folder / "root" / "jobs"
        self._own_forkserver = own_forkserver
        (folder / "data").mkdir(exist_ok=True)
        (folder / "service.toml").write_text(config)
        self.process: subprocess.Popen[str] | None = None
        self.http = httpx.Client(timeout=30)

    def start(self) -> None:
        """Start it, and wait until it answers."""
        command = [sys.executable, "-m", "headrace.service", "serve", "--config", str(self.folder / "service.toml")]
        environment = dict(os.environ) if self._own_forkserver else warm_environment()
        environment.pop("PYTEST_CURRENT_TEST", None)  # by which NiceGUI knows a test, and leaves out compression
        with (self.folder / "serve.err").open("a") as errors:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        line = self.process.stdout.readline()
        assert line.startswith("serving "), (self.folder / "serve.err").read_text()
        self.http.base_url = line.split()[1].rstrip(",")

    def kill(self) -> None:
        """As the kernel would where memory is short."""
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def end(self) -> int:
        """As systemd would; the exit code."""
        self.process.terminate()
        code = self.process.wait(30)
        self.process.stdout.close()
        return code

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        """The answer's content, which must be no problem."""
        answer = self.http.request(method, f"/v1{path}", json=body, headers=headers)
        assert answer.is_success, answer.text
        return answer.json() if answer.content else None

    def until(self, path: str, true: Callable[[Any], bool], within_s: float = 90) -> Any:
        """Ask until `true`; what was answered then."""
        end_s = time.monotonic() + within_s
        while not true(told := self.ask("GET", path)):
            assert time.monotonic() < end_s, f"{told}\n{self.said()}"
            time.sleep(0.1)
        return told

    def said(self) -> str:
        """All that the service and the jobs' launchers had to say."""
        output = sorted(self.jobs.glob("*/launcher.out")) + sorted(self.jobs.glob("*/store/output/*.log"))
        return "\n".join(path.read_text() for path in [self.folder / "serve.err", *output])

    def clean_up(self) -> None:
        """Leave nothing of it."""
        if self.process is not None and self.process.poll() is None:
            self.kill()
        for folder in self.jobs.glob("*"):
            with suppress(Exception):
                JobFolder(folder).kill()
        self.http.close()


def launcher(folder: Path) -> tuple[str, int]:
    """The id and process number of the job's launcher."""
    known = JobFolder(folder).process()
    return known.id, known.pid


def closes(store: Path) -> list[dict[str, Any]]:
    """Every close that the log has, from the oldest commit on."""
    return [dict(record.body) for record in read(store / "log") if record.kind is RecordKind.CLOSE]


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def report(store: Path) -> dict[str, Any]:
    return json.loads((store / "report.json").read_text())
