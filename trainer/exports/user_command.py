"""The user's command after each complete export: run without a shell, with a small environment and a deadline."""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from headrace import process
from headrace.deadline import Deadline

MAX_SHOWN = 2000
"""The message of a failure repeats so many of the last characters of the output."""


def run(command: Sequence[str], address: str, folder: Path, seconds: float) -> str | None:
    """Run `command` in `folder`, with the export's address as its last argument.

    -> why it failed; None where it succeeded.
    """
    name = " ".join(command)
    program = sys.executable if command[0] == "python" else command[0]
    if "/" in program:
        program = str(folder / program)
    if shutil.which(program) is None:
        return f"{name}: no such program on PATH, or it may not be executed; give its path from {folder}"
    try:
        finished = process.run(
            (program, *command[1:], address),
            deadline=Deadline.after(seconds),
            folder=folder,
            environment=process.user_environment(),
            stderr=process.STDOUT,
        )
    except OSError as error:
        return f"{name}: cannot be started: {error}"
    if finished.code is None:
        return f"{name}: did not end in {seconds:g} s (command_deadline) and was killed"
    if finished.code:
        output = finished.output.decode("utf-8", "replace")[-MAX_SHOWN:].strip()
        return f"{name}: ended with {finished.code}; its output: {output}"
    return None
