"""Operations: changes of a job beside learning. Rank 0 logs them; they act at closes, in the log's order.

A replay repeats the logged operations. A Decider logs operations by itself (trainer.rank0.shrinks,
trainer.exports.coordinator), at a close or, through `OperationRunner.note`, at any other time. The effect on rows is
left to pserver.protocol.table_operations and the tables.
"""

import threading
import time
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from msgspec.structs import replace

from headrace.codec import NotUnderstood
from headrace.dataset.samples.slot_counters import SlotCounters
from headrace.dataset.spec.schema import NUM_GROUPS, Schema, Slot
from headrace.deadline import Deadline
from headrace.errors import NotYet, SpecError
from headrace.failpoints import Failpoint, failpoint
from headrace.keys import key_of_reference
from headrace.pserver.config import LAST_DAY, TableSection
from headrace.pserver.protocol.shards import Shards, TableStats
from headrace.pserver.protocol.table_operations import (
    AdvanceDay,
    ExportCut,
    ForgetRow,
    SetTables,
    ShrinkRows,
    TableOperation,
)
from headrace.pserver.server.commands import CountRows, Operate
from headrace.trainer.config import TrainerJob
from headrace.trainer.job_status import OperationsStatus
from headrace.trainer.journal.records import (
    ActingOperation,
    DayTickOperation,
    ExportedOperation,
    ExportOperation,
    ForgetOperation,
    Operation,
    PassClose,
    RequestedOperation,
    ResizeOperation,
    SetOperation,
    ShrinkOperation,
    encode,
)
from headrace.trainer.rank0.replay_log import ReplayLog
from headrace.trainer.spec.changes import SHARDS, TRAINERS, Overrides, after_set, present_names, with_overrides
from headrace.trainer.spec.history_tables import history_tables, keyed_like
from headrace.trainer.spec.join_tables import windows_of
from headrace.trainer.spec.shard_tables import tables_on_shards
from headrace.validation import nearest

Request = Mapping[str, Any]
"""A client's request for an operation: JSON-able, with "op" and an "id" of its own."""

MAX_KEPT = 100
"""Remembered operations that acted: a request that is repeated acts once."""
MAX_SHOWN = 20
"""A status has at most this many of them."""
FROZEN = "is false: the job only predicts, and its model stays as it is; set it to true first"
"""The answer to a request that would age or remove rows."""
MAX_FORGOTTEN = 4096
"""Most other rows of one request to forget: 80 KiB of the log."""
ALSO = "also"
"""The key of the other rows, which operations that acted are remembered without."""
MAX_WORKERS = 64
"""Most workers of each role."""
SWEEP_LOOK_S = 0.02
"""Pause between two checks of a replay that waits for sweeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosingPass:
    """A pass at its close: the tables have closed it and their day has advanced; its close is not logged yet."""

    version: int
    """Number of the pass, and the version that it makes."""
    day: int
    """The job's day from here on, until an operation moves it."""
    ticks: int
    """Days by which event time advanced at this close."""
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


class OperationRunner:
    """Logs operations and has them act. `ask`, `note` and `status` from any thread; the rest while no pass is open."""

    def __init__(
        self,
        job: TrainerJob,
        replay_log: ReplayLog,
        shards: Shards,
        close_s: float,
        workers: Mapping[str, int] | None = None,
        prepare: Callable[[str, Mapping[str, int]], dict[str, Any]] | None = None,
    ) -> None:
        """`job` is as in the job file. `close_s`: time limit for the operations of one close.

        `workers`: the numbers of this generation, by key; None in a rerun. `prepare` takes the id and the numbers of a
        resize whose workers are prepared before it is logged (trainer.rank0.resizing).
        """
        self._workers, self._prepare = workers, prepare
        self.resizes = False
        """True once the job goes on with other numbers of workers: this generation ends. Any thread."""
        self._job = self._now = job
        self._timed = next(iter(job.sources.values())).event_time.kind != "none"
        self._schema = Schema.of(job.slots)
        self._replay_log, self._shards, self._close_s = replay_log, shards, close_s
        self._deciders: tuple[Decider, ...] = ()
        self._lock = threading.Lock()
        self._overrides: dict[str, Any] = {}
        self._waiting: tuple[ActingOperation, ...] = ()
        self._acted: tuple[Mapping[str, Any], ...] = ()
        """As JSON-able data, each with the "version" at whose close it acted."""
        self._replaying = True
        self.day = 0
        """The job's day; closes and day ticks advance it."""

    def add(self, decider: Decider) -> None:
        """Add a decider; it is called after those added before."""
        self._deciders += (decider,)

    @property
    def schema(self) -> Schema:
        """The job's slots."""
        return self._schema

    @property
    def tables(self) -> Mapping[str, TableSection]:
        """The tables' sections in force, with overrides. Any thread."""
        return self._now.tables

    @property
    def tables_on_shards(self) -> Mapping[str, TableSection]:
        """As `tables`, with slices of the dense parameters if shards hold them, and histories. Any thread."""
        now = self._now
        return tables_on_shards(now.tables, now.dense, now.slots, now.join)

    @property
    def aging_tables(self) -> Mapping[str, TableSection]:
        """As `tables`, with histories. Any thread."""
        return {**self._now.tables, **history_tables(self._schema)}

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
        self.day, self._replaying = day, self._replay_log.replaying
        settings = self._set(overrides)
        if settings:
            self._shards.call(Operate(version, settings), Deadline.after(self._close_s))
        return RankUpdate(self._now.dense.optimizer.lr, bool(settings), self._schedule())

    def state(self) -> dict[str, Any]:
        """The state for a commit, as JSON-able data."""
        return {
            "overrides": dict(self._overrides),
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

    @property
    def overrides(self) -> Overrides:
        """Values that were set and hold. Any thread."""
        return dict(self._overrides)

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
            keys = self._check_size(request.get("shards"), request.get("trainers"))
            if keys != dict(self._workers or {}):
                return self._prepare(name, keys)
        granted = next((found for each in self._deciders if (found := each.asked(request)) is not None), None)
        with self._lock:
            if (known := self._known(name)) is None:
                self._log(self._checked(request, name) if granted is None else granted)
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

    def _checked(self, request: Request, id_: str) -> ActingOperation:
        """The operation of a request that no decider took. Under the lock: waiting operations come first."""
        match request.get("op"):
            case SetOperation.op:
                keys = present_names(request.get("keys") or {})
                waiting = [present_names(each.keys) for each in self._waiting if isinstance(each, SetOperation)]
                after_set(self._job, {**self._overrides, **dict(ChainMap(*reversed(waiting)))}, keys)
                return SetOperation(id=id_, keys=keys)
            case ResizeOperation.op:
                return ResizeOperation(id=id_, keys=self._check_size(request.get("shards"), request.get("trainers")))
            case DayTickOperation.op:
                return DayTickOperation(id=id_, to=self._check_day(request.get("to")))
            case ForgetOperation.op:
                slot, key = self.key_of(request.get("slot"), request.get("sign"))
                also, table = self._check_rows(request.get(ALSO)), slot.sparse.table
                return ForgetOperation(id=id_, slot=slot.name, table=table, group=slot.group, key=key, also=also)
            case other:
                raise SpecError(f"{other!r} is not an operation that a client may request")

    def _check_size(self, shards: object, trainers: object) -> dict[str, int]:
        """The numbers of workers to go on with; what is not given stays. One trainer may hold the rows itself."""
        now = self._workers or {}
        if shards is None and trainers is None:
            raise SpecError("nothing is resized: give a number of shards, of trainers, or both")
        world = _number_of(TRAINERS, now.get(TRAINERS) if trainers is None else trainers, 1)
        least = int(world > 1)
        if shards is None:
            return {SHARDS: max(now.get(SHARDS, 0), least), TRAINERS: world}
        return {SHARDS: _number_of(SHARDS, shards, least), TRAINERS: world}

    def _check_day(self, to: object) -> int:
        if not self._job.train.learn:
            raise SpecError(FROZEN, "train.learn")
        if self._timed:
            raise SpecError("the job's days follow its event time; a day tick is for jobs without event time")
        if not isinstance(to, int) or isinstance(to, bool) or not 0 <= to <= LAST_DAY:
            raise SpecError(f"{to!r} is not a day: days are numbers from 0 to {LAST_DAY:,}")
        most = self.day + self._job.passes.max_day_jump
        if to > most:
            raise SpecError(f"is day {self.day} and would be {to}; at most {most} at once", "passes.max_day_jump")
        return to

    def _check_rows(self, rows: object) -> list[dict[str, Any]] | None:
        """Other rows that a request forgets, as ForgetOperation has them; None without any."""
        if rows is None:
            return None
        if not isinstance(rows, list) or not all(isinstance(each, Mapping) for each in rows):
            raise SpecError("is not a list of rows: {table, group, keys} each", ALSO)
        found = [(each.get("table"), each.get("group"), each.get("keys")) for each in rows]
        known = {*self.aging_tables, *windows_of(self._job.join)}
        for table, group, keys in found:
            if table not in known:
                raise SpecError(f"there is no table {table!r}; {nearest(str(table), known)}", ALSO)
            if not _is_number(group, NUM_GROUPS) or not isinstance(keys, list) or not _are_keys(keys):
                raise SpecError(f"rows of table {table!r} need a slot group, and a list of keys of 64 bits", ALSO)
        if (num_keys := sum(len(keys) for _, _, keys in found)) > MAX_FORGOTTEN:
            raise SpecError(f"{num_keys:,} rows are too many for one request: at most {MAX_FORGOTTEN:,}", ALSO)
        return [{"table": table, "group": group, "keys": keys} for table, group, keys in found]

    def key_of(self, slot: object, sign: object) -> tuple[Slot, int]:
        """A sparse slot, and the key of a feature id (`sign`) in it. Raises SpecError."""
        names = [each.name for each in self._schema.sparse]
        if not isinstance(slot, str) or slot not in names:
            raise SpecError(f"there is no sparse slot {slot!r}; {nearest(str(slot), names)}")
        if not isinstance(sign, int) or isinstance(sign, bool) or not 0 <= sign < 1 << 64:
            raise SpecError(f"{sign!r} is not a sign: a number of 64 bits")
        found = self._schema.by_name[slot]
        return found, key_of_reference(sign, found.group)

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
        self.day = closing.day
        for decider in self._deciders:
            decider.saw(closing)
        with self._lock:  # 1
            ordered = list(_of_close(version, again)) if again is not None else self._due(closing)
            self._waiting = self._waiting if again is not None else ()
            self._replay_log.close(close)
            self._remember(version, ordered)
        self._replaying = self._replay_log.replaying
        self.resizes |= again is None and self._is_resized_by(ordered)
        lr, schedule = self._now.dense.optimizer.lr, self._schedule()
        if operations := [operation for each in ordered for operation in self._of_tables(each)]:
            self._shards.call(Operate(version, operations), Deadline.after(self._close_s))  # 2
        if again is not None:
            exported = {table for each in ordered if isinstance(each, ExportOperation) for table in each.tables}
            self._await_sweeps(exported, closing.stats)
        for each in ordered:  # 3
            for decider in self._deciders:
                decider.acted(version, each, again is not None)
        if ordered:
            failpoint(Failpoint.OPERATED)
        dense_lr, now = self._now.dense.optimizer.lr, self._schedule()
        return RankUpdate(None if dense_lr == lr else dense_lr, bool(ordered), None if now == schedule else now)

    def _schedule(self) -> dict[str, Any]:
        return self._now.dense.schedule.model_dump(mode="json")

    def _is_resized_by(self, ordered: Sequence[ActingOperation]) -> bool:
        """Whether the operations of a close, taken together, change the numbers of workers of this generation."""
        if self._workers is None:
            return False
        wanted = dict(self._workers)
        for each in ordered:
            wanted |= each.keys if isinstance(each, ResizeOperation) else {}
        wanted[SHARDS] = max(wanted[SHARDS], int(wanted[TRAINERS] > 1))
        return wanted != dict(self._workers)

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

    def _of_tables(self, operation: ActingOperation) -> list[TableOperation]:
        """The part of an operation that tables carry out; the part of this process is carried out here."""
        match operation:
            case SetOperation() | ResizeOperation():
                return self._set({**self._overrides, **operation.keys})
            case DayTickOperation():
                self.day = max(self.day, operation.to)
                return [AdvanceDay(to=self.day)]
            case ShrinkOperation():
                return [
                    ShrinkRows(
                        table=operation.table,
                        delete_below=operation.delete_below,
                        delete_after_days=operation.delete_after_days,
                        at_once=operation.at_once,
                    )
                ]
            case ForgetOperation():
                where = operation.table, *keyed_like(self._schema, operation.table, operation.group)
                own = [ForgetRow(table=name, group=operation.group, key=operation.key) for name in where]
                rows = ((each["table"], each["group"], key) for each in operation.also or () for key in each["keys"])
                return [*own, *(ForgetRow(table=name, group=group, key=key) for name, group, key in rows)]
            case ExportOperation():
                return [cut_of(operation)] if operation.clears else []
            case _:
                return []

    def _set(self, overrides: Overrides) -> list[TableOperation]:
        before, self._overrides = self.tables_on_shards, present_names(overrides)
        self._now = with_overrides(self._job, overrides)
        new = {name: table for name, table in self.tables_on_shards.items() if table != before[name]}
        return [SetTables(tables={name: table.model_dump(mode="json") for name, table in new.items()})] if new else []


def _number_of(key: str, number: object, least: int) -> int:
    """A number of workers. Raises SpecError."""
    if not isinstance(number, int) or isinstance(number, bool) or not least <= number <= MAX_WORKERS:
        why = "; the rows live in the trainer only where there is one" if key == SHARDS and least else ""
        raise SpecError(f"{number!r} is not a number from {least} to {MAX_WORKERS}{why}", key)
    return number


def _is_number(value: object, end: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < end


def _are_keys(values: Sequence[object]) -> bool:
    return all(_is_number(value, 1 << 64) for value in values)


def _of_close(version: int, operations: Iterable[Operation]) -> Iterator[ActingOperation]:
    """The operations that act at a close. An export of another version does not: its pass was withdrawn."""
    for each in operations:
        if isinstance(each, ActingOperation) and not (isinstance(each, ExportOperation) and each.version != version):
            yield each


def cut_of(export: ExportOperation) -> ExportCut:
    """The table operation of an export."""
    assert export.type == "base" or export.parent is not None, "a delta has a parent"
    parent = export.parent if export.type == "delta" else None
    return ExportCut(
        tables=tuple(export.tables),
        since=0 if parent is None else parent.version,
        base_threshold=export.base_threshold,
        delta_threshold=0.0 if parent is None or export.all else export.delta_threshold,
        delta_keep_days=None if parent is None else export.delta_keep_days,
    )
