"""A resize while its workers are prepared: rank 0 logs it once their shards have all rows but the last few.

The launcher starts the new workers beside those that train, and reports how far they are (service.cluster.standby).
They go on from commit to commit (trainer.rank0.standby), so rank 0 makes the commits that they wait for, and keeps all
of them. Nothing is in the log before the resize acts: if anybody dies before that, the numbers stay.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, ClassVar, Protocol

from headrace.errors import HeadraceError, NotYet
from headrace.trainer.job_status import ResizeStatus
from headrace.trainer.journal.records import ActingOperation, ResizeOperation
from headrace.trainer.rank0.operations import ClosingPass, Decider, Request
from headrace.trainer.spec.changes import SHARDS, TRAINERS

SMALL_S = 0.2
"""Rows that were moved in less time are few enough to stop training for those that follow."""
SHRINKS = 0.8
"""Where a round takes more than this share of the time of the one before, another one leaves no fewer rows."""
MAX_ROUNDS = 8
"""Most commits that the new shards go on to before the resize is logged, however long each one took."""
MAX_FAILED = 16
"""Most remembered requests that failed."""


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


@dataclass(frozen=True, slots=True)
class Moved:
    """How far the new shards are."""

    version: int | None = None
    """The version that they hold; None: nothing yet."""
    rounds: int = 0
    """Commits that they went on to since the first one."""
    took_s: float = 0.0
    """Time that the last of these took."""
    state: str = "starting"
    """For people: "starting", "restoring", "moving"."""
    before_s: float = 0.0
    """Time that the one before the last took."""


def next_step(moved: Moved, committed: int, closed: int, *, idle: bool) -> NextStep:
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
    since: int | None = None
    """The newest version when the request came; None: not known yet. Until the new shards hold a later one, commits
    record what changed since then."""
    moved: Moved = Moved()


class ResizePreparation(Decider):
    """Nothing of it outlives the generation. `ask`, `report`, `progress` from any thread, the rest from the loop's."""

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

    # -- requests and reports

    def ask(self, id_: str, keys: Mapping[str, int]) -> dict[str, Any]:
        """Take a request, once for each id. Raises ResizeFailed, and NotYet while another one is prepared."""
        with self._lock:
            if id_ in self._failed:
                raise ResizeFailed(self._failed[id_])
            if self._pending is None:
                self._pending = PreparedResize(id_, keys, time.monotonic())
            elif self._pending.id != id_:
                raise NotYet("the workers of another resize are being prepared")
            return {"id": id_, "version": None, "logged": False}

    def report(self, request: Request) -> dict[str, Any]:
        """Take a report of the launcher on the workers of a resize: how far they are, or why there are none."""
        with self._lock:
            pending = self._pending
            if pending is None or self._logged or request.get("id") != pending.id:
                return {}
            if reason := request.get("failed"):
                self._failed[pending.id] = f"the job goes on as before, since its new workers failed: {reason}"
                self._failed = dict(list(self._failed.items())[-MAX_FAILED:])
                self._pending = None
            else:
                pending.moved = Moved(**request["moved"])
        return {}

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
        """The resize that is being prepared, for people and for the launcher; None without one. Any thread."""
        pending, committer = self._pending, self._committer
        if pending is None:
            return None
        waits = "waiting for a close" if pending.since is None else pending.moved.state
        return ResizeStatus(
            id=pending.id,
            shards=pending.keys[SHARDS],
            trainers=pending.keys[TRAINERS],
            for_s=time.monotonic() - pending.begun_s,
            state="handing over" if self._logged else waits,
            may_begin=pending.since is not None,
            moved=pending.moved.version,
            committed=0 if committer is None else committer.version,
        )
