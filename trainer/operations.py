"""What happens to a job beside learning: the chief logs operations, which act at closes in the log's order.

A replay repeats what was logged. Who wishes for operations of his own accord is a Decider: trainer.shrinking,
trainer.exports.exporting; what he must log at another time than a close goes through `Operator.note(body)`, from any
thread. What tables do with an operation is pserver.operations' and the tables' work.
"""

import threading
import time
from collections import ChainMap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from dataset.schema import Schema, Slot
from millrace.deadline import Deadline
from millrace.errors import NotYet, SpecError
from millrace.keys import key_of_reference
from millrace.mistakes import nearest
from millrace.points import Point, reach
from pserver.client import Shards, TableStats
from pserver.config import LAST_DAY, TableSection
from pserver.operations import Cut, DayTick, Forget, SetTables, Shrink, TableOperation
from trainer.chronicle import Chronicle
from trainer.config import TrainerJob
from trainer.respec import Overrides, after_set, with_overrides

Body = Mapping[str, Any]
"""An operation as it is logged: JSON-able, with "op" and, where somebody asked for it, "id"."""

INERT = frozenset({"spec", "restore", "partitions", "gap", "skip"})
"""Operations that have acted by the time they are logged."""
PATIENT = frozenset({"exported"})
"""Operations for which no pass of no events is made: they wait for the next one that comes."""
MAX_KEPT = 100
"""Operations that acted and are remembered, so that they are not asked for twice."""
MAX_TOLD = 20
"""Those that a status tells of."""
FROZEN = "is false: the job only predicts, and its model stays as it is; set it to true first"
"""What a person is told who wants rows to age or to go."""
SWEEP_LOOK_S = 0.02
"""How often a replay that waits for sweeps looks whether they are over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """A pass at its close: tables have closed it and ticked, nothing of it is logged."""

    version: int
    """The pass's number, and the version that it makes."""
    day: int
    """The job's day from here on, until an operation moves it."""
    ticks: int
    """Days that event time advanced at this close."""
    event_time_s: float | None
    """Highest event time of all passes up to here, unix seconds; None without event time."""
    pass_times_s: tuple[float, float] | None
    """Lowest and highest event time of this pass; None where it has none."""
    day_end_s: float | None = None
    """End of the job's day, unix seconds: half of this pass's events are before; None without event time."""
    wall_s: float
    """Now, unix seconds: alike in no replay."""
    stats: Mapping[str, TableStats]
    """By table, taken at this close."""
    positions: Mapping[str, int]
    """Where each partition stands after this pass."""
    metrics: Mapping[str, Any]
    """The report of trainer.metrics.meter: "window", "life", "pass"."""
    num_samples: int
    """Of this pass, over all ranks; 0 for a pass of no events."""
    ended: bool
    """Whether the stream is at its end: this pass has no events, and none but such follow. Alike in every replay."""
    days: Sequence[int] = ()
    """Days, as `day` counts them, of which this pass has samples; none without event time."""
    signals: Sequence[str] = ()
    """Inputs of rows' statistics that came in this pass: see trainer.signals."""


class Decider(Protocol):
    """Who logs operations of his own accord, and follows those of others. The chief's; its state is in commits.

    At a close, in this order: `saw`; not at a replayed one, `due`; the close is logged; tables act; `acted` for each
    operation of the close in log order, whoever asked for it. All on one thread at a time, while no pass is open.
    """

    def asked(self, body: Body) -> dict[str, Any] | None:
        """What to log for a person's wish, which acts at the next close; None where it is not for this decider.

        From any thread, at any time. Raises SpecError where it cannot be, NotYet where it must be asked again.
        """
        ...

    def saw(self, close: Closing) -> None:
        """A pass closes, perhaps again in a replay."""
        ...

    def due(self, close: Closing, ordered: Sequence[Body]) -> list[dict[str, Any]]:
        """What to log now, to act at this close. `ordered`: what is logged and acts here anyhow, in order.

        After a crash before the close was logged, what was given then is among these. Never called in a replay.
        """
        ...

    def acted(self, version: int, body: Body, replaying: bool) -> None:
        """An operation of the close of `version` has acted on tables and trainers."""
        ...

    def wants_pass(self, ended: bool) -> bool:
        """Whether a job to which nothing comes should make a pass of no events, so that `due` is asked.

        `ended`: the stream has ended, and it ends with it unless this is true; asked again after each such pass.
        Else from the planner's thread, now and then.
        """
        ...

    def state(self) -> dict[str, Any]:
        """What a commit holds, as JSON-able data; between passes."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a commit: before any replay."""
        ...

    def status(self) -> dict[str, Any]:
        """For people, as JSON-able data; from any thread."""
        ...


class Word(NamedTuple):
    """What changes on every rank with the operations of a close."""

    dense_lr: float | None
    """The dense part's learning rate from here on; None: as it was."""
    acted: bool
    """Whether there were any."""


class Operator:
    """See module docstring. `ask`, `note` and `status` from any thread; the rest while no pass is open."""

    def __init__(self, job: TrainerJob, chronicle: Chronicle, shards: Shards, close_s: float) -> None:
        """`job` is as the job file has it; `close_s`: how long operations of one close may take."""
        self._job = self._now = job
        self._timed = next(iter(job.sources.values())).event_time.kind != "none"
        self._schema = Schema.of(job.slots)
        self._chronicle, self._shards, self._close_s = chronicle, shards, close_s
        self._deciders: tuple[Decider, ...] = ()
        self._lock = threading.Lock()
        self._overrides: dict[str, Any] = {}
        self._waiting: tuple[Body, ...] = ()
        self._acted: tuple[Body, ...] = ()
        self._replaying = True
        self.day = 0
        """The job's day; a close may advance it, and a day tick."""

    def add(self, decider: Decider) -> None:
        """Ask this one, too, from here on: after those added before."""
        self._deciders += (decider,)

    @property
    def tables(self) -> Mapping[str, TableSection]:
        """The tables' sections in force, with what was set. Any thread."""
        return self._now.tables

    # -- going on

    def begin(
        self, version: int, day: int, state: Mapping[str, Any], overrides: Overrides, waiting: Iterable[Body]
    ) -> Word:
        """Go on from what a commit of `version` holds, which the shards have restored, under the present job file.

        `overrides` are those of its state that this job file left; `waiting` acts at the first new close.
        """
        for name, decider in self._named():
            decider.load_state(state.get("deciders", {}).get(name, {}))
        self._acted, self._waiting = tuple(state.get("acted", ())), tuple(_acting(waiting))
        self.day, self._replaying = day, self._chronicle.replaying
        settings = self._set(overrides)
        if settings:
            self._shards.operate(version, settings, Deadline.after(self._close_s))
        return Word(self._now.train.dense_optimizer.lr, bool(settings))

    def state(self) -> dict[str, Any]:
        """What a commit holds of it, as JSON-able data."""
        return {
            "overrides": dict(self._overrides),
            "acted": list(self._acted),
            "deciders": {name: decider.state() for name, decider in self._named()},
        }

    def status(self) -> dict[str, Any]:
        """For people."""
        told = {name: decider.status() for name, decider in self._named()}
        return {"logged": list(self._waiting), "acted": list(self._acted[-MAX_TOLD:]), **told}

    @property
    def overrides(self) -> Overrides:
        """What was set and holds. Any thread."""
        return dict(self._overrides)

    def _named(self) -> list[tuple[str, Decider]]:
        return [(type(decider).__name__.lower(), decider) for decider in self._deciders]

    # -- what is asked for

    def ask(self, wish: Body) -> dict[str, Any]:
        """Log what a person wishes, once for each "id"; -> {"id", "version"}, the version None until it has acted.

        Raises SpecError where it cannot be, NotYet where it must be asked again, and as Log.append.
        """
        name = wish.get("id")
        if not isinstance(name, str) or not name:
            raise SpecError('an operation that is asked for needs an "id", so that it acts once')
        if (known := self._known(name)) is not None:
            return known
        if self._replaying:
            raise NotYet("the job trains again what its log says; what it then holds is not known yet")
        if wish.get("op") == "shrink" and any(body["op"] == "set" for body in self._waiting):
            raise NotYet("what was set acts at the next close, and rows are counted by it after that")
        claimed = next((body for each in self._deciders if (body := each.asked(wish)) is not None), None)
        with self._lock:
            if (known := self._known(name)) is None:
                self._log(self._checked(wish) if claimed is None else claimed)
        return known or {"id": name, "version": None}

    def note(self, body: Body) -> None:
        """Log what a decider must say at another time than a close; it acts at the next one. Raises as Log.append."""
        with self._lock:
            self._log(body)

    def _log(self, body: Body) -> None:
        self._chronicle.note(body)
        self._waiting += (body,)

    def _known(self, name: str) -> dict[str, Any] | None:
        if any(each.get("id") == name for each in self._waiting):
            return {"id": name, "version": None}
        found = next((each for each in self._acted if each.get("id") == name), None)
        return None if found is None else {"id": name, "version": found["version"]}

    def _checked(self, wish: Body) -> dict[str, Any]:
        """The wish as it is logged. Under the lock: what waits comes first."""
        match wish.get("op"):
            case "set":
                keys = dict(wish.get("keys") or {})
                waiting = [body["keys"] for body in self._waiting if body["op"] == "set"]
                after_set(self._job, {**self._overrides, **dict(ChainMap(*reversed(waiting)))}, keys)
                return {"op": "set", "id": wish["id"], "keys": keys}
            case "day_tick":
                return {"op": "day_tick", "id": wish["id"], "to": self._check_day(wish.get("to"))}
            case "forget":
                slot, key = self.key_of(wish.get("slot"), wish.get("sign"))
                facts = {"slot": slot.name, "table": slot.sparse.table, "group": slot.group, "key": key}
                return {"op": "forget", "id": wish["id"], **facts}
            case other:
                raise SpecError(f"{other!r} is no operation that may be asked for")

    def _check_day(self, to: object) -> int:
        if not self._job.train.learn:
            raise SpecError(FROZEN, "train.learn")
        if self._timed:
            raise SpecError("the job has event time, by which its days go; a day tick is for jobs without")
        if not isinstance(to, int) or isinstance(to, bool) or not 0 <= to <= LAST_DAY:
            raise SpecError(f"{to!r} is no day: they are counted from 0 to {LAST_DAY:,}")
        most = self.day + self._job.passes.max_day_jump
        if to > most:
            raise SpecError(f"is day {self.day} and would be {to}; at most {most} at once", "passes.max_day_jump")
        return to

    def key_of(self, slot: object, sign: object) -> tuple[Slot, int]:
        """A sparse slot, and the key that a sign has in it. Raises SpecError."""
        names = [each.name for each in self._schema.sparse]
        if not isinstance(slot, str) or slot not in names:
            raise SpecError(f"there is no sparse slot {slot!r}; {nearest(str(slot), names)}")
        if not isinstance(sign, int) or isinstance(sign, bool) or not 0 <= sign < 1 << 64:
            raise SpecError(f"{sign!r} is no sign: a number of 64 bits")
        found = self._schema.by_name[slot]
        return found, key_of_reference(sign, found.group)

    def wants_pass(self, ended: bool = False) -> bool:
        """Whether a pass of no events is wanted, since nothing comes. Any thread."""
        pressing = any(body["op"] not in PATIENT for body in self._waiting)
        return pressing or any(decider.wants_pass(ended) for decider in self._deciders)

    # -- closes

    def close(self, closing: Closing, body: Body) -> Word:
        """Log the close of a pass, and have operations act.

        1. Deciders see the pass; what is due is logged, then the close: an operation logged later acts at a later one.
        2. Tables act, in the log's order. 3. Deciders hear of it. An export was cut while no table was swept: a replay,
        whose sweeps may be later, waits for them.
        """
        version, again = closing.version, self._chronicle.operations(closing.version)
        self.day = closing.day
        for decider in self._deciders:
            decider.saw(closing)
        with self._lock:  # 1
            ordered = list(_of_close(version, again)) if again is not None else self._due(closing)
            self._waiting = self._waiting if again is not None else ()
            self._chronicle.close(body)
            self._remember(version, ordered)
        self._replaying = self._chronicle.replaying
        lr = self._now.train.dense_optimizer.lr
        if operations := [operation for each in ordered for operation in self._of_tables(each)]:
            self._shards.operate(version, operations, Deadline.after(self._close_s))  # 2
        if again is not None:
            exported = {table for each in ordered if each["op"] == "export" for table in each.get("tables", ())}
            self._await_sweeps(exported, closing.stats)
        for each in ordered:  # 3
            for decider in self._deciders:
                decider.acted(version, each, again is not None)
        if ordered:
            reach(Point.OPERATED)
        dense_lr = self._now.train.dense_optimizer.lr
        return Word(None if dense_lr == lr else dense_lr, bool(ordered))

    def _await_sweeps(self, tables: Collection[str], stats: Mapping[str, TableStats]) -> None:
        deadline = Deadline.after(self._close_s)
        while any(stats[table].sweeping for table in tables if table in stats) and not deadline.passed():
            time.sleep(SWEEP_LOOK_S)
            stats = self._shards.stats(deadline)

    def _due(self, closing: Closing) -> list[Body]:
        ordered = list(_of_close(closing.version, self._waiting))
        for decider in self._deciders:
            for body in decider.due(closing, tuple(ordered)):
                self._chronicle.operate(body)
                ordered.append(body)
        return ordered

    def _remember(self, version: int, ordered: Sequence[Body]) -> None:
        self._acted = (*self._acted, *({**body, "version": version} for body in ordered))[-MAX_KEPT:]

    def _of_tables(self, body: Body) -> list[TableOperation]:
        """What an operation asks of the tables; what it asks of this process is done."""
        match body["op"]:
            case "set":
                return self._set({**self._overrides, **body["keys"]})
            case "day_tick":
                self.day = max(self.day, int(body["to"]))
                return [DayTick(to=self.day)]
            case "shrink":
                return [
                    Shrink(
                        table=body["table"],
                        delete_below=body["delete_below"],
                        delete_after_days=body["delete_after_days"],
                        at_once=body["at_once"],
                    )
                ]
            case "forget":
                return [Forget(table=body["table"], group=body["group"], key=body["key"])]
            case "export" if body["clears"]:
                return [cut_of(body)]
            case _:
                return []

    def _set(self, overrides: Overrides) -> list[TableOperation]:
        before, self._overrides = self._now.tables, dict(overrides)
        self._now = with_overrides(self._job, overrides)
        new = {name: table for name, table in self._now.tables.items() if table != before[name]}
        return [SetTables(tables={name: table.model_dump(mode="json") for name, table in new.items()})] if new else []


def _acting(bodies: Iterable[Body]) -> Iterator[Body]:
    return (body for body in bodies if body["op"] not in INERT)


def _of_close(version: int, bodies: Iterable[Body]) -> Iterator[Body]:
    """What acts at a close: of exports those of its version, for a pass may be withdrawn before it is closed."""
    return (body for body in _acting(bodies) if body["op"] != "export" or body.get("version", version) == version)


def cut_of(export: Body) -> Cut:
    """What an export takes from the tables' counts."""
    delta = export["type"] == "delta"
    return Cut(
        tables=tuple(export["tables"]),
        since=export["parent"]["version"] if delta else 0,
        base_threshold=export["base_threshold"],
        delta_threshold=export["delta_threshold"] if delta and not export["all"] else 0.0,
        delta_keep_days=export["delta_keep_days"] if delta else None,
    )
