"""Agents of the external launcher (`headrace worker`) in processes of their own, as a person starts them."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from headrace.service.cli.worker_command import RANKS

ROOT = Path(__file__).parents[2]


class AgentProcess:
    """One `headrace worker`. Its output goes to a file."""

    def __init__(self, address: str, token_file: Path, output: Path, *options: str, **environment: str) -> None:
        self.output = output
        command = [
            sys.executable,
            "-m",
            "headrace.service",
            "worker",
            "--join",
            address,
            "--token-file",
            str(token_file),
        ]
        given = {name: value for name, value in os.environ.items() if name not in RANKS}
        with output.open("w") as file:
            self.process = subprocess.Popen(
                [*command, *options],
                env=given | environment,
                stdout=file,
                stderr=file,
                cwd=ROOT,
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        """All that it said so far."""
        return self.output.read_text()

    def children(self) -> list[int]:
        """Process numbers of its children, and theirs."""
        return children_of(self.process.pid)

    def kill(self) -> None:
        """Leave nothing of it and of its children, frozen ones included."""
        for pid in (self.process.pid, *self.children()):
            for number in (signal.SIGCONT, signal.SIGKILL):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
        self.process.wait()


def children_of(pid: int) -> list[int]:
    """Process numbers of all processes below `pid`."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fields[0] != "Z":
            parents[int(path.parent.name)] = int(fields[1])
    found, front = [], [pid]
    while front:
        front = [child for child, parent in parents.items() if parent in front]
        found += front
    return found
