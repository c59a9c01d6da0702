"""Starts a job's launcher such that it outlives the service."""

import os
import secrets
import subprocess

from millrace.deadline import Deadline
from millrace.durable import writing
from millrace.locks import locked
from millrace.process import unbuffered
from service.hosting.folder import JobFolder, Told
from service.hosting.printed import begun
from service.launcher.plan import PYTHON

LOCK_S = 1.0
"""How long to wait for who only looks whether a launcher runs."""


def start(folder: JobFolder, ask: int, *, paused: bool, max_output: int) -> "subprocess.Popen[bytes]":
    """A launcher for the job of `folder`. Raises DeadlineExceeded where one runs, Unwritable, and OSError.

    1. Hold the folder's lock. 2. Tell the launcher who it is. 3. Start it; it inherits the lock, so that there is no
    instant at which it runs and does not hold it, and it holds it as long as it lives.
    """
    with locked(folder.lock, Deadline.after(LOCK_S)) as lock:  # 1
        folder.address.unlink(missing_ok=True)
        folder.tell(Told(secrets.token_hex(8), ask, secrets.token_hex(32)))  # 2
        with writing(folder.printed):
            printed = begun(folder.printed)
        command = [*PYTHON, "service.hosting.launching", str(folder.path), "--lock", str(lock)]
        with printed:
            return subprocess.Popen(  # 3
                [*command, "--max-output", str(max_output), *(["--paused"] if paused else [])],
                cwd=folder.path,
                env=unbuffered(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                pass_fds=[lock],
                start_new_session=True,
            )
