"""Operations: changes of a job beside learning. Rank 0 logs them; they act at closes, in the log's order.

A replay repeats the logged operations. A Decider logs operations by itself (trainer.rank0.shrinks,
trainer.exports.coordinator), at a close or, through `OperationRunner.note`, at any other time. The effect on rows is
left to pserver.protocol.table_operations and the tables.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from msgspec.structs import replace

from headrace.codec import NotUnderstood
from headrace.dataset.samples.slot_counters import SlotCounters
from headrace.deadline import Deadline
from headrace.errors import NotYet, SpecError
from headrace.failpoints import Failpoint, failpoint
from headrace.pserver.protocol.shards import Shards
from headrace.pserver.protocol.table_stats import TableStats
from headrace.pserver.server.commands import CountRows, Operate
from headrace.trainer.job_status import OperationsStatus
from headrace.trainer.journal.records import (
    ActingOperation,
    ExportedOperation,
    ExportOperation,
    Operation,
    PassClose,
    RequestedOperation,
    ResizeOperation,
    SetOperation,
    ShrinkOperation,
    encode,
)
from headrace.trainer.rank0.job_in_force import JobInForce
from headrace.trainer.rank0.replay_log import ReplayLog
from headrace.trainer.rank0.requests import ALSO, Request, operation_of, resize_requested
from headrace.trainer.spec.changes import Overrides

MAX_KEPT = 100
"""Remembered operations that acted: a request that is repeated acts once."""
MAX_SHOWN = 20
"""A status has at most this many of them."""
SWEEP_LOOK_S = 0.02
"""Pause between two checks of a replay that waits for sweeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosingPass:
    """A pass at its close: the tables have closed it and their day has advanced; its close is not logged yet."""

    version: int
    """Number of the pass, and the version that it makes."""
    day: int
    """The job's day from here on, until an operation moves it."""
    event_time_s: float | None
    """Highest event time of all passes so far, unix seconds; None without event time."""
    pass_times_s: tuple[float, float] | None
    """Lowest and highest event time of this pass; None without event time."""
    day_end_s: float | None = None
    """End of the job's day, unix seconds: half of this pass's events are before it; None without event time."""
    wall_s: float
    """Now, unix seconds: different in every replay."""
    stats: Mapping[str, TableStats]
    """By table, taken at this close."""
    positions: Mapping[str, int]
    """The position of each partition after this pass."""
    metrics: Mapping[str, Any]
    """The report of trainer.metrics.meter: "window", "life", "pass"."""
    num_samples: int
    """Number of samples in this pass, over all ranks; 0 for an empty pass."""
    ended: bool
    """True if the stream has ended: this pass has no events, nor has any later one. The same in every replay."""
    days: Sequence[int] = ()
    """Days, counted as in `day`, with samples in this pass; none without event time."""
    signals: Sequence[str] = ()
    """Inputs of rows' statistics that this pass has: see trainer.train.observer."""
    slots: SlotCounters | None = None
    """Counters of the slots in this pass, over all ranks."""


class Decider:
    """Logs operations by itself, and follows all others. It runs on rank 0; its state is part of commits.

    This one does nothing: a subclass has the methods that it needs.

    The order at a close: `saw`; `due`, unless this is a replay; the close is logged; tables act; `acted` for each
    operation of the close, in log order. These calls come one at a time, while no pass is open.
    """

    name: ClassVar[str]
    """The key of its state in commits, and of its status: it never changes."""

    def asked(self, request: Request) -> ActingOperation | None:
        """The operation to log for a client's request; it acts at the next close. None: not for this decider.

        From any thread, at any time. Raises SpecError for a request that cannot be granted, NotYet for one to repeat.
        """
        return None

    def saw(self, close: ClosingPass) -> None:
        """A pass closes, perhaps again in a replay."""

    def due(self, close: ClosingPass, ordered: Sequence[ActingOperation]) -> Sequence[ActingOperation]:
        """The operations to log now, which act at this close. `ordered`: the logged ones that act here, in order.

        After a crash before the close was logged, `ordered` has the operations from before. Never called in a replay.
        """
        return ()

    def acted(self, version: int, operation: ActingOperation, replaying: bool) -> None:
        """An operation of the close of `version` has acted on tables and trainers."""

    def wants_pass(self, ended: bool) -> bool:
        """True if a job without new events should make an empty pass, so that `due` is called.

        `ended`: the stream has ended, and the job ends unless this is true; called again after each such pass.
        Otherwise it is called from the planner's thread, now and then.
        """
        return False

    def state(self) -> dict[str, Any]:
        """The state for a commit, as JSON-able data; between passes."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a commit; before any replay."""

    def status(self) -> object:
        """For people: the field of OperationsStatus with its name, None without such a field; from any thread."""
        return None


@dataclass(frozen=True, slots=True)
class RankUpdate:
    """Changes on every rank by the operations of a close."""

    dense_lr: float | None
    """The new learning rate of the dense part; None: unchanged."""
    acted: bool
    """True if there were operations."""
    schedule: dict[str, Any] | None = None
    """The new schedule of that rate, as JSON-able data; None: unchanged."""
    commit: bool = False
    """Whether the version is to be committed now."""
    forgotten: dict[str, list[int]] = field(default_factory=dict)
    """By sparse slot: the signs whose rows were deleted by name."""


class OperationRunner:
    """Logs operations and has them act. `ask`, `note` and `status` from any thread; the rest while no pass is open."""

    def __init__(
        self,
        job: JobInForce,
        replay_log: ReplayLog,
        shards: Shards,
        close_s: float,
        prepare: Callable[[str, Mapping[str, int]], dict[str, Any]] | None = None,
    ) -> None:
        """`close_s`: time limit for the operations of one close.

        `prepare` takes the id and the numbers of a resize whose workers are prepared before it is logged
        (trainer.rank0.resizing).
        """
        self.job = job
        """Changed by operations; any thread may read it."""
        self._prepare = prepare
        self.resizes = False
        """True once the job goes on with other numbers of workers: this generation ends. Any thread."""
        self._replay_log, self._shards, self._close_s = replay_log, shards, close_s
        self._deciders: tuple[Decider, ...] = ()
        self._lock = threading.Lock()
        self._waiting: tuple[ActingOperation, ...] = ()
        self._acted: tuple[Mapping[str, Any], ...] = ()
        """As JSON-able data, each with the "version" at whose close it acted."""
        self._replaying = True

    def add(self, decider: Decider) -> None:
        """Add a decider; it is called after those added before."""
        self._deciders += (decider,)

    # -- restart

    def begin(
        self, version: int, day: int, state: Mapping[str, Any], overrides: Overrides, waiting: Iterable[Operation]
    ) -> RankUpdate:
        """Continue from a commit of `version`, which the shards have restored, under the present job file.

        `overrides` are those of the commit that remain under this job file; `waiting` acts at the first new close.
        """
        try:
            for decider in self._deciders:
                decider.load_state(state.get("deciders", {}).get(decider.name, {}))
        except NotUnderstood as error:
            raise NotUnderstood(f"the commit of version {version}: {error}") from error
        self._acted, self._waiting = (
            tuple(state.get("acted", ())),
            tuple(each for each in waiting if isinstance(each, ActingOperation)),
        )
        self.job.day, self._replaying = day, self._replay_log.replaying
        settings = self.job.set(overrides)
        if settings:
            self._shards.call(Operate(version, settings), Deadline.after(self._close_s))
        return RankUpdate(self.job.now.dense.optimizer.lr, bool(settings), self.job.schedule)

    def state(self) -> dict[str, Any]:
        """The state for a commit, as JSON-able data."""
        return {
            "overrides": self.job.overrides,
            "acted": list(self._acted),
            "deciders": {decider.name: decider.state() for decider in self._deciders},
        }

    def status(self) -> OperationsStatus:
        """For people."""
        deciders = {decider.name: status for decider in self._deciders if (status := decider.status()) is not None}
        logged = [encode(each) for each in self._waiting]
        return replace(
            OperationsStatus(logged=logged, acted=[dict(each) for each in self._acted[-MAX_SHOWN:]]), **deciders
        )

    # -- requests

    def ask(self, request: Request) -> dict[str, Any]:
        """Log a client's request, once for each "id". Returns {"id", "version"}; version is None until it has acted.

        Raises SpecError for a request that cannot be granted, NotYet for one to repeat, and as Log.append.
        """
        name = request.get("id")
        if not isinstance(name, str) or not name:
            raise SpecError('a requested operation needs an "id", so that it acts once')
        if (known := self._known(name)) is not None:
            return known
        if self._replaying:
            raise NotYet("the job replays its log; its state is not known yet")
        if request.get("op") == ShrinkOperation.op and any(isinstance(each, SetOperation) for each in self._waiting):
            raise NotYet("a set acts at the next close; rows are counted under the new values after that")
        if self.resizes and request.get("op") == ResizeOperation.op:
            raise NotYet("the workers of another resize are about to take over")
        if self._prepare is not None and request.get("op") == ResizeOperation.op:
            keys = resize_requested(request, self.job).keys
            if keys != dict(self.job.workers or {}):
                return self._prepare(name, keys)
        granted = next((found for each in self._deciders if (found := each.asked(request)) is not None), None)
        with self._lock:
            if (known := self._known(name)) is None:
                self._log(operation_of(request, self.job, self._waiting) if granted is None else granted)
        return known or {"id": name, "version": None}

    def note(self, operation: ActingOperation) -> None:
        """Log an operation of a decider outside of a close; it acts at the next one. Raises as Log.append."""
        with self._lock:
            self._log(operation)

    def _log(self, operation: ActingOperation) -> None:
        self._replay_log.note(operation)
        self._waiting += (operation,)

    def _known(self, name: str) -> dict[str, Any] | None:
        if any(isinstance(each, RequestedOperation) and each.id == name for each in self._waiting):
            return {"id": name, "version": None}
        found = next((each for each in self._acted if each.get("id") == name), None)
        return None if found is None else {"id": name, "version": found["version"]}

    def wants_pass(self, ended: bool = False) -> bool:
        """True if an empty pass is wanted, as there are no new events. Any thread."""
        pressing = any(not isinstance(each, ExportedOperation) for each in self._waiting)  # nobody waits for these
        return pressing or any(decider.wants_pass(ended) for decider in self._deciders)

    # -- closes

    def close(self, closing: ClosingPass, close: PassClose) -> RankUpdate:
        """Log the close of a pass, and have its operations act.

        1. Deciders see the pass; due operations are logged, then the close. Later operations act at a later close.
        2. Tables act, in the log's order. An export was cut while no table was swept: a replay, whose sweeps may be
        later, waits for them.
        3. Deciders are notified.
        """
        version, again = closing.version, self._replay_log.operations(closing.version)
        self.job.day = closing.day
        for decider in self._deciders:
            decider.saw(closing)
        with self._lock:  # 1
            ordered = list(_of_close(version, again)) if again is not None else self._due(closing)
            self._waiting = self._waiting if again is not None else ()
            self._replay_log.close(close)
            self._remember(version, ordered)
        self._replaying = self._replay_log.replaying
        self.resizes |= again is None and self.job.is_resized_by(ordered)
        lr, schedule = self.job.now.dense.optimizer.lr, self.job.schedule
        if operations := [operation for each in ordered for operation in self.job.act(each)]:
            self._shards.call(Operate(version, operations), Deadline.after(self._close_s))  # 2
        if again is not None:
            exported = {table for each in ordered if isinstance(each, ExportOperation) for table in each.tables}
            self._await_sweeps(exported, closing.stats)
        for each in ordered:  # 3
            for decider in self._deciders:
                decider.acted(version, each, again is not None)
        if ordered:
            failpoint(Failpoint.OPERATED)
        dense_lr, now = self.job.now.dense.optimizer.lr, self.job.schedule
        return RankUpdate(
            None if dense_lr == lr else dense_lr,
            bool(ordered),
            None if now == schedule else now,
            forgotten=self.job.forgotten(ordered),
        )

    def _await_sweeps(self, tables: Collection[str], stats: Mapping[str, TableStats]) -> None:
        deadline = Deadline.after(self._close_s)
        while any(stats[table].sweeping for table in tables if table in stats) and not deadline.passed():
            time.sleep(SWEEP_LOOK_S)
            stats = self._shards.call(CountRows(), deadline).tables

    def _due(self, closing: ClosingPass) -> list[ActingOperation]:
        ordered = list(_of_close(closing.version, self._waiting))
        for decider in self._deciders:
            for operation in decider.due(closing, tuple(ordered)):
                self._replay_log.operate(operation)
                ordered.append(operation)
        return ordered

    def _remember(self, version: int, ordered: Sequence[ActingOperation]) -> None:
        acted = ({**encode(each), "version": version} for each in ordered)
        short = ({name: value for name, value in each.items() if name != ALSO} for each in acted)
        self._acted = (*self._acted, *short)[-MAX_KEPT:]


def _of_close(version: int, operations: Iterable[Operation]) -> Iterator[ActingOperation]:
    """The operations that act at a close. An export of another version does not: its pass was withdrawn."""
    for each in operations:
        if isinstance(each, ActingOperation) and not (isinstance(each, ExportOperation) and each.version != version):
            yield each
