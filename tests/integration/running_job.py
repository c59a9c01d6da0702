"""A job while it runs: started by the command line, listened to, and looked for in the system afterwards."""

import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from headrace.deadline import Deadline
from headrace.rpc.unix_sockets import SCHEME, target_of
from tests.fakes.warm import warm_environment


class RunningJob:
    """`headrace run` in a process of its own, with its store in `folder`/store. End it with `kill`.

    Whatever is waited for is named, with all that the job said, when it has not come by a deadline.
    """

    def __init__(self, job: Path, folder: Path, *settings: str, options: Sequence[str] = ()) -> None:
        self.store = folder / "store"
        more = [part for setting in (*settings, f"store.path={self.store}") for part in ("--set", setting)]
        self.said: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headrace.service", "run", str(job), *more, *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env=warm_environment(),
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # None: it has closed its output
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def until_said(self, words: str, within_s: float = 60) -> str:
        """Read on to a line that holds `words`; that line."""
        for line in self._read_on(f"it said {words!r}", within_s):
            if words in line:
                return line
        raise AssertionError(f"the job ended without saying {words!r}:\n{''.join(self.said)}")

    def until_events(self, number: int, within_s: float = 60) -> int:
        """Read on until at least `number` events are trained; how many are.

        A job that was restarted counts those it had trained before, too: ask for more than those.
        """
        for line in self._read_on(f"it trained {number} events", within_s):
            word, _, rest = line.partition("  events ")
            if rest and word.startswith(("training", "done")) and count(rest.split()[0]) >= number:
                return count(rest.split()[0])
        raise AssertionError(f"the job ended before it trained {number} events:\n{''.join(self.said)}")

    def until_stored(self, within_s: float = 60) -> None:
        """Wait until it has made its store, which a replica of it needs."""
        deadline = Deadline.after(within_s)
        while not self.store.exists():
            assert not deadline.passed(), f"it made no store:\n{''.join(self.said)}"
            time.sleep(0.05)

    def end(self, within_s: float = 40) -> tuple[int, str]:
        """Wait for its end; exit code and all it said."""
        for _ in self._read_on("it ended", within_s):
            pass
        return self.process.wait(within_s), "".join(self.said)

    def _read(self) -> None:
        with self.process.stdout as output:
            for line in output:
                self._lines.put(line)
        self._lines.put(None)

    def _read_on(self, what: str, within_s: float) -> Iterator[str]:
        """Its lines as they come, to the last one. Raises AssertionError where time runs out."""
        deadline = Deadline.after(within_s)
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline.left_s()))
            except queue.Empty:
                raise AssertionError(f"{within_s:g} s passed before {what}:\n{''.join(self.said)}") from None
            if line is None:
                self._lines.put(None)  # for whoever asks again
                return
            self.said.append(line)
            yield line

    @property
    def report(self) -> dict | None:
        """What the run wrote at its end, if it did."""
        path = self.store / "report.json"
        return json.loads(path.read_text()) if path.exists() else None

    def workers(self) -> dict[str, int]:
        """Process numbers of the job's workers by name."""
        return workers_of(self.store)

    def sockets(self) -> list[str]:
        """Addresses of the unix sockets that the job's launcher and workers listen at."""
        return [f"{SCHEME}{path}" for path in (self.store / "workers").glob("*/*.socket")]

    def kill(self) -> None:
        """Leave nothing of it, whatever state it is in."""
        self.process.kill()
        self.process.wait()
        for pid in self.workers().values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._reader.join(10)


def workers_of(store: Path) -> dict[str, int]:
    """Process numbers, by name, of the workers of the job that runs in a store."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = re.split(rb"[\0 ]", path.read_bytes())  # a title is one text
        except (FileNotFoundError, ProcessLookupError):
            continue
        for word in words:
            if word.startswith(os.fsencode(store / "workers")):
                found[Path(os.fsdecode(word)).stem] = int(path.parent.name)
    return found


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


def assert_unanswered(sockets: list[str]) -> None:
    """Nobody listens at any of these unix sockets."""
    for address in sockets:
        with ExitStack() as stack, pytest.raises((FileNotFoundError, ConnectionRefusedError)):
            target, descriptor = target_of(address)
            if descriptor is not None:
                stack.callback(os.close, descriptor)
            stack.enter_context(socket.socket(socket.AF_UNIX)).connect(target.removeprefix(SCHEME))


def runs(pid: int) -> bool:
    """Whether a process is there and is no zombie, which waits only for whoever adopted it."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
