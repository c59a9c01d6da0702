"""A job on test machines: its launcher on one, its workers on several, an S3 server on one of its own."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from subprocess import Popen
from typing import Any

from headrace.address import format_address
from headrace.deadline import Deadline
from headrace.service.spec.launchers import EXTERNAL
from tests import s3_server
from tests.machines.network import Machine

PORT = 7070
NODE_TIMEOUT_S = 3.0
USUAL_TIMEOUT_S = 30.0
"""The default of a job, for measurements: on slow links with few cores a machine may be silent for long."""
HEADRACE = ("-m", "headrace.service")
SERVE = "import sys; from tests.s3_server import serve; serve(sys.argv[1])"
MAKE_BUCKET = (
    "import sys; from tests.s3_server import S3Server; S3Server(int(sys.argv[2]), sys.argv[1]).make_bucket('bucket')"
)


class Output:
    """A process on a machine, and all that it said."""

    def __init__(self, process: Popen[str]) -> None:
        self.process = process
        self._lines: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def said(self) -> str:
        with self._changed:
            return "".join(self._lines)

    def until(self, words: str, within_s: float = 60.0) -> str:
        """Wait for a line with `words`; that line."""
        deadline, number = Deadline.after(within_s), 0
        with self._changed:
            while True:
                for line in self._lines[number:]:
                    if words in line:
                        return line
                number = len(self._lines)
                alive = self._reader.is_alive()
                assert alive and not deadline.passed(), f"{words!r} was not said:\n{''.join(self._lines)}"
                self._changed.wait(0.2)

    def until_often(self, words: str, times: int, within_s: float = 60.0) -> None:
        """Wait until it has said `words` so often."""
        deadline = Deadline.after(within_s)
        with self._changed:
            while (found := sum(words in line for line in self._lines)) < times:
                alive = self._reader.is_alive()
                assert alive and not deadline.passed(), f"{words!r}: {found} times:\n{''.join(self._lines)}"
                self._changed.wait(0.2)

    def end(self, within_s: float = 90.0) -> int:
        """Wait for its end; its exit code."""
        try:
            code = self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it has not ended:\n{self.said}") from None
        self._reader.join(10)
        return code

    def kill(self) -> None:
        """Leave nothing of it."""
        self.process.kill()
        self.process.wait()
        self._reader.join(10)

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                with self._changed:
                    self._lines.append(line)
                    self._changed.notify_all()


def started(machine: Machine, *words: str, **environment: str) -> Output:
    """A Python process on a machine, which may use the object store."""
    more = {"stdin": subprocess.DEVNULL, "environment": {**s3_server.ENVIRONMENT, **environment}}
    return Output(machine.python(*words, **more))


@contextmanager
def object_store(machine: Machine) -> Iterator[Callable[[str], str]]:
    """An S3 server on a machine of its own; takes a prefix, gives its address."""
    output = Output(server := machine.python("-c", SERVE, machine.address, environment=s3_server.ENVIRONMENT))
    assert server.stdin is not None
    try:
        with server.stdin:  # it ends with it
            here = s3_server.S3Server(int(output.until("\n")), machine.address)
            machine.call(sys.executable, "-c", MAKE_BUCKET, here.host, str(here.port))
            yield lambda prefix: here.uri("bucket", prefix)
    finally:
        output.kill()


class ExternalJob:
    """A job.toml in /tmp of machine `head`, run there by the external launcher, with its store in an object store."""

    def __init__(
        self,
        head: Machine,
        store: str,
        *settings: str,
        trainers: int = 2,
        shards: int = 2,
        node_timeout_s: float = NODE_TIMEOUT_S,
    ) -> None:
        self.head, self.address = head, format_address(head.address, PORT)
        self.outputs: list[Output] = []
        """Of all processes that were started."""
        cluster = {
            "launcher": EXTERNAL,
            "listen": self.address,
            "interface": "eth0",
            "trust_interface": True,
            "trainers": trainers,
            "shards": shards,
            "node_timeout": f"{node_timeout_s}s",
        }
        self.settings = [
            *(f"cluster.{name}={json.dumps(value)}" for name, value in cluster.items()),
            "store.path=store",
            "store.parts='object'",
            f"store.mirror={json.dumps(store)}",
            "store.log_mirror='sync'",
            *settings,
        ]

    def __enter__(self) -> "ExternalJob":
        return self

    def __exit__(self, *_: object) -> None:
        for output in self.outputs:
            output.kill()

    @property
    def said(self) -> str:
        """The output of all processes, for a failed test."""
        return "\n\n".join(output.said for output in self.outputs)

    def start(self, machine: Machine, *words: str) -> Output:
        """Start a Python process, which ends with this context."""
        self.outputs.append(started(machine, *words))
        return self.outputs[-1]

    def run(self) -> Output:
        """Start the launcher."""
        return self.start(self.head, *HEADRACE, "run", "job.toml", *setting(self.settings))

    def token(self, *options: str) -> str:
        """The join token, as the operator sees it."""
        words = (*HEADRACE, "join-token", "job.toml", *options, *setting(self.settings))
        return self.head.call(sys.executable, *words).strip()

    def agent(self, machine: Machine, *options: str, token: str) -> Output:
        """Start `headrace worker` on a machine."""
        return self.start(machine, *HEADRACE, *self.words(machine, token), *options)

    def words(self, machine: Machine, token: str) -> tuple[str, ...]:
        """The command for a worker on a machine, which gets the token in a file."""
        path = machine.tmp / "token"
        path.touch(0o600)
        path.write_text(token)
        return ("worker", "--join", self.address, "--token-file", "token")

    @property
    def report(self) -> dict[str, Any]:
        """The report of the run."""
        return json.loads((self.head.tmp / "store" / "report.json").read_text())  # type: ignore[no-any-return]


def setting(settings: Sequence[str]) -> list[str]:
    """The options of a command for settings."""
    return [part for each in settings for part in ("--set", each)]
