"""The background thread of rank 0 that keeps the mirror up to date. Training never waits for it.

One commit at a time waits for its upload; a newer commit replaces it, since every commit is whole. After a restart the
restored commit must be offered again: its upload may not have ended.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

from headrace.blob.signature import UNSIGNED, Signature
from headrace.deadline import Deadline
from headrace.durable import locked
from headrace.errors import HeadraceError
from headrace.trainer.checkpoint.commits import Commit
from headrace.trainer.checkpoint.mirror import Mirror
from headrace.trainer.job_status import MirrorStatus

RETRY_S = 5.0
"""Pause after a failed upload."""
UPLOAD_S = 3600.0
"""Longest time of one upload; then it starts again and skips what is uploaded."""
MAX_BEHIND_S = 900.0
"""A mirror that is behind for longer is trouble in the status, even if nothing fails."""
LOCK_S = 5.0
"""Longest wait of one try for another writer to the mirror; then the status shows it."""
GIVE_UP_S = 45.0
"""Longest wait at the end for a call that is given up: one request must end first (headrace.blob.s3)."""
LOCK = "mirror.lock"
"""Lock file in the store, held while writing to the mirror. It protects the files of a new generation from a rank 0 of
an older one that is still alive: either the old one holds the lock and the new one waits, or the old one sees that it
was replaced."""

log = logging.getLogger(__name__)


class MirrorUploader:
    """Any thread may call."""

    def __init__(
        self,
        uri: str,
        store: Path,
        keep: int,
        pinned: Callable[[], Collection[str]],
        check_rank0: Callable[[], None],
        signature: Signature = UNSIGNED,
        retry_s: float = RETRY_S,
        max_behind_s: float = MAX_BEHIND_S,
    ) -> None:
        """`pinned` names commits to keep beside the newest `keep`; `check_rank0` raises where we were replaced."""
        self._uri, self._store, self._keep, self._signature = uri, store, keep, signature
        self._pinned, self._check_rank0 = pinned, check_rank0
        self._retry_s, self._max_behind_s = retry_s, max_behind_s
        self._changed = threading.Condition()
        self._waiting: Commit | None = None
        self._in_flight: Commit | None = None
        self._stopping: Deadline | None = None
        self._mirror: Mirror | None = None
        self._version: int | None = None
        self._offered_s = 0.0
        self._behind_since_s: float | None = None
        self._trouble: str | None = None
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)
        self._thread.start()

    def offer(self, commit: Commit) -> None:
        """Upload this commit next; returns at once."""
        with self._changed:
            self._waiting, self._offered_s = commit, time.monotonic()
            if self._behind_since_s is None:
                self._behind_since_s = self._offered_s
            self._changed.notify()

    def holding(self) -> set[str]:
        """Names of commits that are or will be uploaded and must not be pruned."""
        with self._changed:
            return {commit.name for commit in (self._waiting, self._in_flight) if commit is not None}

    def status(self) -> MirrorStatus:
        """For the status: last mirrored version, how long a newer one has waited, what is wrong."""
        with self._changed:
            behind_s = 0.0 if self._behind_since_s is None else time.monotonic() - self._behind_since_s
            trouble = self._trouble
            if trouble is None and behind_s > self._max_behind_s:
                trouble = f"behind for more than {self._max_behind_s:g} s: uploads are slower than commits"
            if not self._thread.is_alive() and self._stopping is None:
                trouble = "the upload thread has ended because of a bug; see the log"
            return MirrorStatus(version=self._version, behind_s=behind_s, trouble=trouble)

    def stop(self, deadline: Deadline) -> bool:
        """Upload the waiting commit within `deadline`, then end -> whether everything offered is in the mirror."""
        with self._changed:
            self._stopping = deadline
            self._changed.notify()
        self._thread.join(deadline.left_s())
        if self._thread.is_alive() and self._mirror is not None:
            self._mirror.blobs.give_up()
            self._thread.join(GIVE_UP_S)
        with self._changed:
            return self._behind_since_s is None

    def _run(self) -> None:
        while (commit := self._next()) is not None:
            try:
                self._upload(commit)
            except (HeadraceError, OSError) as error:
                self._failed(commit, error)

    def _next(self) -> Commit | None:
        """Wait for a commit; None when none will come or no time is left."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is not None or self._stopping is not None)
            if self._stopping is not None and self._stopping.passed():
                return None
            self._in_flight, self._waiting = self._waiting, None
            return self._in_flight

    def _upload(self, commit: Commit) -> None:
        deadline = self._stopping or Deadline.after(UPLOAD_S)
        if self._mirror is None:
            self._mirror = Mirror.open(self._uri, deadline, self._signature)
        with locked(self._store / LOCK, Deadline.after(LOCK_S)):
            self._check_rank0()
            log_files = sorted((self._store / "log").glob("*.log"))
            self._mirror.upload(commit, log_files, deadline)
            self._mirrored(commit)
            self._mirror.prune(self._keep, {commit.name, *self._pinned()}, log_files, deadline)
        with self._changed:
            if self._trouble is not None:
                log.info("the mirror is up to date again, at version %d", commit.version)
            self._trouble = None

    def _mirrored(self, commit: Commit) -> None:
        with self._changed:
            self._version, self._in_flight = commit.version, None
            self._behind_since_s = None if self._waiting is None else self._offered_s

    def _failed(self, commit: Commit, error: Exception) -> None:
        """Keep the commit for another try, unless there is a newer one; then pause, if time is left."""
        log.warning("mirror, at version %d: %s", commit.version, error)
        with self._changed:
            self._in_flight, self._trouble = None, str(error)
            if self._waiting is None:
                self._waiting = commit
            if self._stopping is None:
                self._changed.wait_for(lambda: self._stopping is not None, self._retry_s)
            else:
                self._changed.wait_for(lambda: False, min(self._retry_s, self._stopping.left_s()))
