"""The command that a user has run after each complete export: no shell, little environment, not for ever."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

MAX_SAID = 2000
"""Of its output, so many last characters are repeated where it fails."""
PASSED_ON = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH")
"""What it sees of our environment; nothing in it is secret."""


def run(command: Sequence[str], address: str, folder: Path, seconds: float) -> str | None:
    """Run `command` in `folder`, with an export's address as last argument. -> how it failed, None where it did not."""
    name = " ".join(command)
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    environment |= {"TZ": "UTC", "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"}
    program = sys.executable if command[0] == "python" else command[0]
    if "/" in program:
        program = str(folder / program)
    if shutil.which(program) is None:
        return f"{name}: no such program on PATH, or it may not be executed; give its path from {folder}"
    try:
        process = subprocess.Popen(
            (program, *command[1:], address),
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        return f"{name}: cannot be started: {error}"
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"{name}: did not end in {seconds:g} s (command_deadline) and was killed"
    finally:
        _end(process)
    if process.returncode:
        return (
            f"{name}: ended with {process.returncode}; it said: {said.decode('utf-8', 'replace')[-MAX_SAID:].strip()}"
        )
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill it and what it started, and let go of the pipe."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # all of them have ended
        pass
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
