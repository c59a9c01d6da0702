"""The news job at a service: its callers with their tokens, its processes, what follows its live feed."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
import tomllib
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from headrace.deadline import Deadline
from headrace.trainer.journal.job_history import JobHistory
from headrace.trainer.journal.log import read
from tests.integration.hosted_service import HostedService
from tests.integration.running_job import runs
from tests.kafka.cluster import free_ports

EXAMPLE = Path(__file__).resolve().parents[2] / "deploy" / "examples" / "news"
JOB = "news"
CONFIG = """
root = "root"
listen = "127.0.0.1:{port}"
[allow]
pipe_commands = [["python", "generator.py"]]
models = ["deepfm"]
roots = ["data"]
bootstrap_servers = ["{servers}"]
[limits]
stop = "30s"
"""
MARK = "HEADRACE_E2E"
"""In the environment of every process that the service starts, and those start."""
WITHIN_S = 300.0
"""Of what takes seconds where nobody else needs the machine."""
LOOK_S = 0.1


def spec(servers: str, topic: str, **sections: Any) -> dict[str, Any]:
    """The shipped spec, reading a topic that goes on, with two streams of exports; the store is the service's."""
    raw = tomllib.loads((EXAMPLE / "job.toml").read_text())
    del raw["store"]
    raw["sources"]["impressions"] = {
        "kind": "kafka",
        "topics": [topic],
        "event_time": {"field": "ts", "unit": "s"},
        "options": {"bootstrap_servers": servers},
    }
    raw["tables"]["default"] |= {
        "admission": [{"kind": "count", "n": 2}],
        "slots": {"article": {"decay": 0.5}},
    }
    raw["passes"] = {"wait": "500ms", "max_events": 2000}
    raw["commit"] = {"every": "5s", "keep": 1000}
    raw["exports"] = {"hourly": {"delta": "1h", "keep": 100}, "whole": {"keep": 100}}
    return {**raw, **sections}


class Caller:
    """Who asks a service over HTTP, by a token."""

    def __init__(self, url: str, token: str) -> None:
        # A connection that is kept may be closed by the other side just when it is used again: none is.
        limits = httpx.Limits(max_keepalive_connections=0)
        told = {"Authorization": f"Bearer {token}"}
        self.http = httpx.Client(base_url=f"{url}/v1", headers=told, timeout=60, limits=limits)

    def answer(self, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.http.request(method, path, json=body, headers=names)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        answer = self.answer(method, path, body, **headers)
        assert answer.is_success, f"{method} {path}: {answer.status_code} {answer.text}"
        return answer.json() if answer.content else None

    def get(self, path: str) -> Any:
        return self.ask("GET", path)

    def all(self, path: str) -> list[Any]:
        """All entries of a list, page by page."""
        found, after, sign = [], "", "&" if "?" in path else "?"
        while True:
            page = self.get(f"{path}{sign}limit=200{after}")
            found += page["items"]
            if page["next"] is None:
                return found
            after = f"&after={page['next']}"

    def done(self, operation: dict[str, Any], within_s: float = WITHIN_S) -> Any:
        """The result of an operation once it is over; it must be well."""
        deadline = Deadline.after(within_s)
        while operation["state"] in ("waiting", "running"):
            assert not deadline.passed(), f"an operation is not over after {within_s:g} s: {operation}"
            time.sleep(LOOK_S)
            operation = self.get(f"/operations/{operation['id']}")
        assert operation["state"] == "done", operation
        return operation["result"]

    def do(self, path: str, body: Any = None, within_s: float = WITHIN_S, **headers: str) -> Any:
        """POST what begins an operation, and wait for its result."""
        return self.done(self.ask("POST", path, body, **headers), within_s)


class NewsService:
    """A service in `folder`, with tokens, whose one job is `news`; `folder`/data is where the job may read."""

    def __init__(self, folder: Path, servers: str) -> None:
        (port,) = free_ports(1)
        self.folder = folder
        self.service = HostedService(folder, CONFIG.format(port=port, servers=servers))
        self.mark = uuid.uuid4().hex
        self.data, self.store = folder / "data", folder / "root" / "jobs" / JOB / "store"
        shutil.copy(EXAMPLE / "generator.py", self.data)
        os.environ[MARK] = self.mark
        self.url = f"http://127.0.0.1:{port}"
        self.job_url = f"{self.url}/v1/jobs/{JOB}"
        self.tokens = {"ada": self._first_token()}
        self.service.start()
        self.admin = Caller(self.url, self.tokens["ada"])
        self.operator, self.viewer = self._new("olga", "operator"), self._new("vera", "viewer")

    def _first_token(self) -> str:
        command = [sys.executable, "-m", "headrace.service", "token", "create", "ada", "--role", "admin"]
        config = ["--config", str(self.folder / "service.toml")]
        return subprocess.run(
            [*command, *config], capture_output=True, text=True, check=True, timeout=60
        ).stdout.strip()

    def _new(self, name: str, role: str) -> Caller:
        self.tokens[name] = self.admin.ask("POST", "/tokens", {"name": name, "role": role})["token"]
        return Caller(self.url, self.tokens[name])

    def job(self) -> dict[str, Any]:
        return self.viewer.get(f"/jobs/{JOB}")

    def until(self, true: Callable[[dict[str, Any]], Any], what: str, within_s: float = WITHIN_S) -> dict[str, Any]:
        """Ask how the job is until `true`; how it is then."""
        deadline = Deadline.after(within_s)
        while not true(told := self.job()):
            assert not deadline.passed(), f"{within_s:g} s passed before {what}: {told}\n{self.service.said()[-3000:]}"
            time.sleep(LOOK_S)
        return told

    def closed(self) -> int:
        """The last version that the log has closed, whether or not a service runs."""
        return JobHistory.of(read(self.store / "log")).closed

    def processes(self) -> dict[int, str]:
        """Those that the service, or what it started, or a replica, has started, and that still run."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                marked = f"{MARK}={self.mark}".encode() in (path / "environ").read_bytes().split(b"\0")
                if (marked or (path / "cwd").resolve().is_relative_to(self.folder)) and runs(int(path.name)):
                    found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        found.pop(os.getpid(), None)
        return found

    def clean_up(self) -> None:
        """Leave nothing of it."""
        os.environ.pop(MARK, None)
        self.service.clean_up()
        for caller in (self.admin, self.operator, self.viewer):
            caller.http.close()


class Watching:
    """Listens to the job's server-sent events as long as it goes on, also across a service that dies."""

    def __init__(self, caller: Caller) -> None:
        self.closes: list[dict[str, Any]] = []
        self.num_figures, self.num_streams = 0, 0
        self.end: dict[str, Any] | None = None
        self.error: BaseException | None = None
        self._caller, self._left = caller, threading.Event()
        self._thread = threading.Thread(target=self._listen, name="watching", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait(self, within_s: float = WITHIN_S) -> None:
        """Until it heard of the job's end."""
        self._thread.join(within_s)
        assert self.end is not None, f"nobody told of the job's end; heard of {len(self.closes)} closes, {self.error}"

    def leave(self) -> None:
        self._left.set()

    def _listen(self) -> None:
        try:
            while self.end is None and not self._left.is_set():
                with suppress(httpx.TransportError):
                    self._listen_once()
                self._left.wait(LOOK_S)
        except BaseException as error:  # noqa: BLE001  # told where the test waits
            self.error = error

    def _listen_once(self) -> None:
        headers = {"Last-Event-ID": str(self.closes[-1]["version"])} if self.closes else {}
        path = f"/jobs/{JOB}/metrics/stream"
        with self._caller.http.stream("GET", path, headers=headers, timeout=30) as answer:
            assert answer.status_code == 200, answer.status_code
            self.num_streams += 1
            kind = ""
            for line in answer.iter_lines():
                word, _, rest = line.partition(": ")
                if word == "event":
                    kind = rest
                elif word == "data":
                    self._hear(kind, json.loads(rest))
                if self._left.is_set():
                    return

    def _hear(self, kind: str, data: dict[str, Any]) -> None:
        match kind:
            case "close":
                self.closes.append(data)
            case "figures":
                self.num_figures += 1
            case "end":
                self.end = data
