"""A resize on the side of rank 0, in both generations: the one that trains, and the one that stands by.

1. Rank 0 of the generation that trains takes the request, and asks the launcher for the new workers (PrepareWorkers).
2. The launcher starts them beside those that train (service.cluster.resizing). Their shards follow the commits of the
   generation that trains, and rank 0 makes the commits that they wait for, and keeps all of them.
3. The launcher carries each report of theirs to rank 0: how far they are (WorkersMoved), or why there are none
   (WorkersFailed).
4. Once few rows are left, rank 0 logs the resize. It acts at that close, and the generation ends.
5. The new workers take the last rows and claim the job.

Nothing is in the log before step 4: if anybody dies before that, the numbers stay. The generation that stands by claims
nothing and changes nothing in the store.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any, ClassVar, Protocol

from headrace.deadline import Deadline
from headrace.errors import HeadraceError, NotYet
from headrace.pserver.errors import StoreDamaged
from headrace.pserver.protocol.shards import Shards
from headrace.pserver.server.commands import AdvanceCommit, RestoreCommit
from headrace.trainer.checkpoint.commits import CheckedFiles, Commit, CommitDamaged, Commits, problems_of
from headrace.trainer.checkpoint.handover import acted_in, handed_over
from headrace.trainer.job_status import ResizeStatus
from headrace.trainer.journal.records import ActingOperation, ResizeOperation
from headrace.trainer.rank0.operations import ClosingPass, Decider
from headrace.trainer.rank0.resize_messages import PrepareWorkers, ResizeMessage, WorkersFailed, WorkersMoved
from headrace.trainer.spec.changes import SHARDS, TRAINERS

SMALL_S = 0.2
"""Rows that were moved in less time are few enough to stop training for those that follow."""
SHRINKS = 0.8
"""Where a round takes more than this share of the time of the one before, another one leaves no fewer rows."""
MAX_ROUNDS = 8
"""Most commits that the new shards go on to before the resize is logged, however long each one took."""
MAX_FAILED = 16
"""Most remembered requests that failed."""
LOOK_S = 0.01
"""Pause between two looks for a newer commit: training stands still from the last one on."""
MOVE_S = 3600.0
"""Longest time to restore a commit, or to go on to the next one."""

log = logging.getLogger(__name__)

# -- the generation that trains


class ResizeFailed(HeadraceError):
    """The workers of a resize cannot be prepared. The job goes on as before."""


class CommitMaker(Protocol):
    """The part of trainer.checkpoint.committer.Committer that is needed."""

    version: int
    """The last version committed."""

    @property
    def idle(self) -> bool:
        """Whether no commit is being made."""
        ...

    def ask(self) -> None:
        """Request a commit at the next close."""
        ...


class NextStep(Enum):
    """The next thing to do about a resize."""

    WAIT = auto()
    """The new shards are behind the newest commit, or are not there yet."""
    COMMIT = auto()
    """They have the newest commit, and many rows have changed since: make another one."""
    LOG = auto()
    """Few rows are left."""


def next_step(moved: WorkersMoved, committed: int, closed: int, *, idle: bool) -> NextStep:
    """The decision between passes. Pure. `committed` and `closed`: versions; `idle`: no commit is being made."""
    if moved.version is None or not idle or moved.version < committed:
        return NextStep.WAIT
    if closed <= committed:
        return NextStep.LOG
    small = moved.rounds > 0 and moved.took_s <= SMALL_S
    steady = moved.rounds > 1 and moved.took_s > SHRINKS * moved.before_s
    return NextStep.LOG if small or steady or moved.rounds >= MAX_ROUNDS else NextStep.COMMIT


@dataclass(slots=True)
class PreparedResize:
    """A request for other numbers of workers that is not logged yet."""

    id: str
    keys: Mapping[str, int]
    begun_s: float
    moved: WorkersMoved
    since: int | None = None
    """The newest version when the request came; None: not known yet. Until the new shards hold a later one, commits
    record what changed since then."""


class ResizePreparation(Decider):
    """Nothing of it outlives the generation. `ask`, `exchange`, `progress`: any thread; the rest: the loop's."""

    name: ClassVar[str] = "resizing"

    def __init__(self, *, hands_over: bool = False) -> None:
        """`hands_over`: whether the new workers can take the last rows from memory."""
        self._lock = threading.Lock()
        self._may_hand_over = hands_over
        self._pending: PreparedResize | None = None
        self._logged = False
        self._failed: dict[str, str] = {}
        self._committer: CommitMaker | None = None

    def begin(self, committer: CommitMaker) -> None:
        """Before the first pass."""
        self._committer = committer

    # -- requests, and the launcher

    def ask(self, id_: str, keys: Mapping[str, int]) -> dict[str, Any]:
        """Take a request, once for each id. Raises ResizeFailed, and NotYet while another one is prepared."""
        with self._lock:
            if id_ in self._failed:
                raise ResizeFailed(self._failed[id_])
            if self._pending is None:
                self._pending = PreparedResize(id_, keys, time.monotonic(), WorkersMoved(id_))
            elif self._pending.id != id_:
                raise NotYet("the workers of another resize are being prepared")
            return {"id": id_, "version": None, "logged": False}

    def exchange(self, message: ResizeMessage | None) -> PrepareWorkers | None:
        """Take what the launcher reports on the workers of a resize, and ask it for workers. Repeats change nothing."""
        with self._lock:
            if (pending := self._pending) is None:
                return None
            if message is not None and message.id == pending.id and not self._logged:
                match message:
                    case WorkersFailed(reason=reason):
                        self._failed[pending.id] = f"the job goes on as before, since its new workers failed: {reason}"
                        self._failed = dict(list(self._failed.items())[-MAX_FAILED:])
                        self._pending = None
                        return None
                    case WorkersMoved():
                        pending.moved = message
            if pending.since is None:  # a commit may be in flight that does not record what they need
                return None
            return PrepareWorkers(pending.id, pending.keys[SHARDS], pending.keys[TRAINERS])

    # -- commits

    def changes_since(self) -> int | None:
        """The version since which the next commit must record what changed; None: nobody needs it."""
        pending = self._pending
        if pending is None:
            return None
        return self._known_since(pending) if pending.moved.version is None else pending.moved.version

    @property
    def hands_over(self) -> bool:
        """Whether a resize is logged, and the last rows go from memory to memory."""
        return self._logged and self._may_hand_over

    @property
    def keeps_commits(self) -> bool:
        """Whether no commit may be removed, since the new shards may read it. Any thread."""
        return self._pending is not None

    def between(self, closed: int) -> None:
        """Between passes, `closed` being the last one: ask for the commit that the new shards wait for."""
        pending, committer = self._pending, self._committer
        if pending is None or committer is None:
            return
        if committer.idle:
            self._known_since(pending)
        if self._next(pending, closed) is NextStep.COMMIT:
            committer.ask()

    def _known_since(self, pending: PreparedResize) -> int | None:
        """No commit is being made, so that the next one has all changes since the newest."""
        if pending.since is None and self._committer is not None:
            pending.since = self._committer.version
        return pending.since

    def _next(self, pending: PreparedResize, closed: int) -> NextStep:
        if self._committer is None or self._logged:
            return NextStep.WAIT
        return next_step(pending.moved, self._committer.version, closed, idle=self._committer.idle)

    # -- Decider

    def due(self, close: ClosingPass, _ordered: Sequence[ActingOperation]) -> Sequence[ActingOperation]:
        with self._lock:
            pending = self._pending
            if pending is None or self._next(pending, close.version) is not NextStep.LOG:
                return []
            self._logged = True
            return [ResizeOperation(id=pending.id, keys=dict(pending.keys))]

    def wants_pass(self, ended: bool) -> bool:
        """Without events, an empty pass carries the resize."""
        pending, committer = self._pending, self._committer
        if ended or pending is None or committer is None:
            return False
        return self._next(pending, committer.version) is NextStep.LOG

    def progress(self) -> ResizeStatus | None:
        """The resize that is being prepared, for people; None without one. Any thread."""
        pending, committer = self._pending, self._committer
        if pending is None:
            return None
        waits = "waiting for a close" if pending.since is None else pending.moved.state
        return ResizeStatus(
            shards=pending.keys[SHARDS],
            trainers=pending.keys[TRAINERS],
            for_s=time.monotonic() - pending.begun_s,
            state="handing over" if self._logged else waits,
            moved=pending.moved.version,
            committed=0 if committer is None else committer.version,
        )


# -- the generation that stands by


class StandbyEnded(HeadraceError):
    """The resize has not acted, and this generation is not needed any more."""


class Standby:
    """A generation that stands by: its shards follow the commits of the one that trains until a resize has acted.

    `moved` and `end` from any thread.
    """

    def __init__(self, store: Path, resize: str) -> None:
        """`resize`: the id of the resize that ends the wait."""
        self._store, self._commits, self._resize = store, Commits(store), resize
        self._moved = WorkersMoved(resize)
        self._over = threading.Event()
        self.checked: CheckedFiles = set()
        """The files of commits that were found sound."""
        self.version: int | None = None
        """The version that the shards hold; None: nothing yet."""
        self.handed: Commit | None = None
        """The state that the generation before handed over in place of a last commit, once `follow` returns."""
        self._last: Future[None] | None = None

    @property
    def moved(self) -> WorkersMoved:
        """How far it is, for the launcher."""
        return self._moved

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
            self._moved = WorkersMoved(self._resize, state="restoring")
        move = RestoreCommit if first else AdvanceCommit
        to = (Path(), [], 0) if commit is None else (commit.folder, commit.shards, commit.version)
        shards.call(move(*to), Deadline.after(MOVE_S))
        self.version = 0 if commit is None else commit.version
        took_s = time.monotonic() - begin_s
        before = self._moved
        rounds = before.rounds + (not first)
        self._moved = WorkersMoved(self._resize, self.version, rounds, took_s, "moving", before.took_s)
        log.info("the shards hold version %d, after %.2f s", self.version, took_s)

    def _check(self, commit: Commit | None) -> None:
        """Read the files that are new: there is no time for it when the job goes on here. Objects check themselves."""
        if commit is None or commit.objects:
            return
        for file, problem in problems_of(commit, self.checked).items():
            raise StoreDamaged(f"{commit.folder / file}: {problem}")
