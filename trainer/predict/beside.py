"""Runs a module of Millrace behind everything else: `python -m trainer.predict.beside MODULE ARGUMENTS`.

Niceness counts only among the processes of a session where the kernel groups them by session (autogroup), and each of
our processes leads one of its own: so the whole session is made nice, too. A pipe command again leads its own; it is
held back by the pauses of the worker that reads from it (trainer.predict.pace).
"""

import contextlib
import os
import runpy
import sys
from pathlib import Path

NICENESS = 19
AUTOGROUP = Path("/proc/self/autogroup")


def step_back() -> None:
    """Let every other process go first."""
    os.nice(NICENESS)
    with contextlib.suppress(OSError):  # no such grouping here, or it is not ours to change
        AUTOGROUP.write_text(str(NICENESS))


if __name__ == "__main__":
    step_back()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
