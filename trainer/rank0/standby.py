"""A generation that stands by: its shards follow the commits of the one that trains, until a resize has acted there.

Nothing is claimed and nothing in the store is changed meanwhile. The launcher asks how far it is, and reports it to
rank 0 of the generation that trains (trainer.rank0.resizing).
"""

import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from headrace.deadline import Deadline
from headrace.errors import HeadraceError
from headrace.pserver.errors import StoreDamaged
from headrace.pserver.protocol.shards import Shards
from headrace.pserver.server.commands import AdvanceCommit, RestoreCommit
from headrace.trainer.checkpoint.commits import CheckedFiles, Commit, CommitDamaged, Commits, problems_of
from headrace.trainer.checkpoint.handover import acted_in, handed_over
from headrace.trainer.job_status import Status
from headrace.trainer.rank0.resizing import Moved

LOOK_S = 0.01
"""Pause between two looks for a newer commit: training stands still from the last one on."""
MOVE_S = 3600.0
"""Longest time to restore a commit, or to go on to the next one."""

log = logging.getLogger(__name__)


class StandbyEnded(HeadraceError):
    """The resize has not acted, and this generation is not needed any more."""


class Standby:
    """`status` and `end` from any thread."""

    def __init__(self, store: Path, resize: str) -> None:
        """`resize`: the id of the resize that ends the wait."""
        self._store, self._commits, self._resize = store, Commits(store), resize
        self._moved = Moved()
        self._over = threading.Event()
        self.checked: CheckedFiles = set()
        """The files of commits that were found sound."""
        self.version: int | None = None
        """The version that the shards hold; None: nothing yet."""
        self.handed: Commit | None = None
        """The state that the generation before handed over in place of a last commit, once `follow` returns."""
        self._last: Future[None] | None = None

    def status(self) -> Status:
        """For the launcher, until the generation is claimed."""
        return Status(state="standby", moved=asdict(self._moved))

    def end(self) -> None:
        """Give up."""
        self._over.set()

    def follow(self, shards: Shards) -> None:
        """Restore the newest commit, go on to each newer one, and return when there is one in which the resize acted.

        In place of that commit, its state may be handed over. The shards go on to it meanwhile: see `finish`. Raises
        StandbyEnded; StoreDamaged and CommitDamaged where a file is damaged.
        """
        name = ""
        while True:
            over = self._over.is_set()  # before the look: after it there may be something to take over
            newest = self._newest()
            if (last := self._last_state(newest)) is not None:
                self._last = ThreadPoolExecutor(1, "last-rows").submit(self._go_on, shards, last)
                return
            if over:
                raise StandbyEnded("the workers that stood by are not needed any more")
            if self.version is None or (newest is not None and newest.name != name):
                self._check(newest)
                self._go_on(shards, newest)
                name = "" if newest is None else newest.name
            self._over.wait(LOOK_S)

    def finish(self, shards: Shards, commit: Commit | None) -> None:
        """Wait until the shards have the last commit, and go on to `commit`, if that is a newer one."""
        assert self._last is not None, "followed"
        self._last.result()
        if (0 if commit is None else commit.version) != self.version:
            self._go_on(shards, commit)

    def _last_state(self, newest: Commit | None) -> Commit | None:
        """The state with which the generation before ended, if the resize has acted and the shards can go on to it."""
        if self.version is None:
            return None
        self.handed = handed_over(self._store, self._resize)
        return newest if self.handed is None and newest is not None and acted_in(newest, self._resize) else self.handed

    def _newest(self) -> Commit | None:
        """The newest commit; None: there is none. Raises CommitDamaged."""
        while names := self._commits.names():
            try:
                return self._commits.read(names[-1])
            except CommitDamaged:
                if names[-1] in self._commits.names():
                    raise  # it was not removed meanwhile
        return None

    def _go_on(self, shards: Shards, commit: Commit | None) -> None:
        first, begin_s = self.version is None, time.monotonic()
        if first:
            self._moved = Moved(state="restoring")
        move = RestoreCommit if first else AdvanceCommit
        to = (Path(), [], 0) if commit is None else (commit.folder, commit.shards, commit.version)
        shards.call(move(*to), Deadline.after(MOVE_S))
        self.version = 0 if commit is None else commit.version
        took_s = time.monotonic() - begin_s
        before = self._moved
        self._moved = Moved(self.version, before.rounds + (not first), took_s, "moving", before.took_s)
        log.info("the shards hold version %d, after %.2f s", self.version, took_s)

    def _check(self, commit: Commit | None) -> None:
        """Read the files that are new: there is no time for it when the job goes on here. Objects check themselves."""
        if commit is None or commit.objects:
            return
        for file, problem in problems_of(commit, self.checked).items():
            raise StoreDamaged(f"{commit.folder / file}: {problem}")
