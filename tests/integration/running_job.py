"""A job while it runs: started by the command line, listened to, and looked for in the system afterwards."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from millrace.deadline import Deadline


class RunningJob:
    """`millrace run` in a process of its own, with its store in `folder`/store. End it with `kill`."""

    def __init__(self, job: Path, folder: Path, *settings: str) -> None:
        self.store = folder / "store"
        more = [part for setting in (*settings, f"store.path={self.store}") for part in ("--set", setting)]
        self.said: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "service", "run", str(job), *more],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def until_said(self, words: str) -> str:
        """Read on to a line that holds `words`; that line."""
        for line in self.process.stdout:
            self.said.append(line)
            if words in line:
                return line
        raise AssertionError(f"the job ended without saying {words!r}:\n{''.join(self.said)}")

    def until_events(self, number: int) -> None:
        """Read on until so many events are trained."""
        for line in self.process.stdout:
            self.said.append(line)
            word, _, rest = line.partition("  events ")
            if rest and word.startswith(("training", "done")) and count(rest.split()[0]) >= number:
                return
        raise AssertionError(f"the job ended before it trained {number} events:\n{''.join(self.said)}")

    def end(self, within_s: float = 40) -> tuple[int, str]:
        """Wait for its end; exit code and all it said."""
        rest, _ = self.process.communicate(timeout=within_s)
        return self.process.returncode, "".join(self.said) + rest

    @property
    def report(self) -> dict | None:
        """What the run wrote at its end, if it did."""
        path = self.store / "report.json"
        return json.loads(path.read_text()) if path.exists() else None

    def workers(self) -> dict[str, int]:
        """Process numbers of the job's workers by name."""
        found = {}
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = re.split(rb"[\0 ]", path.read_bytes())  # a title is one text
            except (FileNotFoundError, ProcessLookupError):
                continue
            for word in words:
                if word.startswith(os.fsencode(self.store / "workers")):
                    found[Path(os.fsdecode(word)).stem] = int(path.parent.name)
        return found

    def ports(self) -> list[int]:
        """Ports that the job's workers listen on."""
        files = (self.store / "workers").glob("*/*.address")
        return [int(path.read_text().rpartition(":")[2]) for path in files]

    def kill(self) -> None:
        """Leave nothing of it, whatever state it is in."""
        self.process.kill()
        self.process.communicate()
        for pid in self.workers().values():
            os.kill(pid, signal.SIGKILL)


def count(text: str) -> int:
    """A number as status lines print it; a dash is 0."""
    return 0 if text == "-" else int(text.replace(",", ""))


def assert_gone(job: RunningJob, *pids: int) -> None:
    """No worker of the job, and none of these processes, is left; they may take a moment to go."""
    deadline = Deadline.after(10)
    while left := [*job.workers().values(), *filter(runs, pids)]:
        deadline.check(f"waiting for {left} to be gone")
        time.sleep(0.02)


def assert_gone_pids(*pids: int) -> None:
    """None of these processes is left; no grace."""
    assert not [pid for pid in pids if runs(pid)]


def assert_free(ports: list[int]) -> None:
    """Every one of these ports can be listened on."""
    for port in ports:
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", port))
            again.listen()


def runs(pid: int) -> bool:
    """Whether a process is there and is no zombie, which waits only for whoever adopted it."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
