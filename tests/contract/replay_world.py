"""A job of a rank 0 without a trainer: real shards, stores, commits, the decider of exports and what makes them.

What happens to it is data, a list of `Pass`; what is random is drawn elsewhere. The log is a list that outlives its
rank 0: a crash drops everything else, and the next one goes on from the newest commit, training the same passes
again.
Whether exports are right is tests.contract.replay_law's question.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from msgspec import structs
from safetensors.numpy import save_file

from headrace.dataset.spec.config import SparseSlot
from headrace.dataset.spec.schema import Schema
from headrace.errors import NotYet, Unwritable
from headrace.failpoints import Failpoint
from headrace.keys import key_of_reference
from headrace.pserver.admission_entries import CountEntry
from headrace.pserver.config import Bounds, Initial, ShardProcess, SlotLife, TableSection
from headrace.pserver.errors import StoreFailed
from headrace.pserver.lifecycle import deletions
from headrace.pserver.protocol.shards import Gradients, Keys, StepScale
from headrace.pserver.protocol.table_operations import AdvanceDay, ClearSlot, ForgetRow, SetTables, ShrinkRows
from headrace.pserver.row_optimizers import Adagrad
from headrace.pserver.rows.row_cache import CacheBound
from headrace.pserver.server.commands import (
    CountRows,
    DigestRows,
    Operate,
    RestoreCommit,
    SettleSnapshot,
    TakeSnapshot,
    WriteSnapshot,
)
from headrace.pserver.server.embedded import EmbeddedShards
from headrace.pserver.server.shard_server import ShardServer
from headrace.pserver.store.rocks_store import RocksRowStore
from headrace.pserver.tables.sweeping import Sweeper
from headrace.trainer.checkpoint.commits import Commit, Commits, hash_of, name_of, read_commit, write_manifest
from headrace.trainer.config import ExportSection
from headrace.trainer.exports.coordinator import ExportCoordinator
from headrace.trainer.exports.export_messages import ExportAnswer, ExportRequest, ExportSettings
from headrace.trainer.exports.exporter import export
from headrace.trainer.journal.records import (
    ActingOperation,
    DayTickOperation,
    ExportedOperation,
    ExportOperation,
    ForgetOperation,
    SetOperation,
    ShrinkOperation,
    SlotOperation,
)
from headrace.trainer.rank0.job_in_force import cut_of
from headrace.trainer.rank0.operations import ClosingPass
from tests.contract import shards_world as w
from tests.fakes.manifests import manifest_of

GROUPS = {"a": 0, "b": 1, "c": 2, "d": 3}
SLOTS = {"plain": ("a", "b"), "choosy": ("c", "d")}
NUM_SIGNS = 12
KEYS = {
    table: [(key_of_reference(sign, GROUPS[slots[sign % 2]]), GROUPS[slots[sign % 2]]) for sign in range(NUM_SIGNS)]
    for table, slots in SLOTS.items()
}
"""Key and slot group of every sign, by table; even signs are of the table's first slot."""
MAX_RESIDENT, MAX_WAITING = 40, 12
"""Rows of a bounded table in memory on a shard, and rows changed there after which a commit comes."""

TABLES = {
    "plain": TableSection(
        dim=2,
        init_range=0.5,
        optimizer=Adagrad(per="element", lr=0.5),
        decay=0.9,
        delete_below=0.3,
        slots={"b": SlotLife(decay=0.5, lr=0.25, bounds=Bounds(low=-0.25, high=0.25), delete_after_days=2)},
    ),
    "choosy": TableSection(
        dim=3,
        init=Initial.NORMAL,
        init_range=0.25,
        clip_norm=0.5,
        extend_at=0.4,
        delete_after_days=3,
        admission=(CountEntry(kind="count", n=3, exact=True, memory=1 << 20),),
        slots={"d": SlotLife(admission=(), extend_at=0.0)},
    ),
}
STREAMS = {
    "main": ExportSection(delta=1.0),
    "half": ExportSection(delta=1.0, dtype="float16"),
    "small": ExportSection(delta=1.0, dtype="int8"),
    "picky": ExportSection(delta=1.0, base_threshold=0.3, delta_threshold=0.45, delta_keep_days=1),
}
FOREVER = {"keep": 10_000, "tries": 1, "clock": "wall", "at_end": False}


class Crash(BaseException):
    """Rank 0 dies here; nothing below it may look at this as an error."""


def told(value: Any) -> str:
    """What differs from the defaults, for readable examples."""
    own = [each for each in fields(value) if getattr(value, each.name) != each.default]
    return f"{type(value).__name__}({', '.join(f'{each.name}={getattr(value, each.name)!r}' for each in own)})"


@dataclass(frozen=True, repr=False)
class Death:
    """Rank 0 dies at a place of a pass, and comes back."""

    at: str = "end"
    """"trained", "logged", "acted", "written", "committed", "exporting", "exported" or "end"."""
    shards: int = 0
    """Of the next rank 0; 0: embedded."""
    older: bool = False
    """Whether the newest commit turns out to be damaged, where there is another one."""

    __repr__ = told


@dataclass(frozen=True, repr=False)
class Pass:
    """What is learnt, and what happens at its close and around it."""

    learns: tuple[int, ...] = ()
    """Signs, of both tables."""
    clicks: int = 0
    """Of each."""
    days: int = 0
    sweeps: int = 0
    """Pieces of a sweep in the background while it trains."""
    operations: tuple[Any, ...] = ()
    """("shrink", table, below, after, at_once), ("forget" or "clear", table, sign), ("tick", days),
    ("set", table, decay, lr)."""
    wishes: tuple[tuple[str, str], ...] = ()
    """Stream and kind of exports that are asked for."""
    commit: str = ""
    """"made", "fails", or "late": written while the next pass trains."""
    export: str = "complete"
    """What becomes of exports begun here: "complete", "fails" for good, "killed" and made again, "late"."""
    loses: str = ""
    """Stream of which somebody removes the newest export before the pass."""
    death: Death | None = None

    __repr__ = told


@dataclass
class Closed:
    """The log's record of a pass."""

    version: int
    day: int
    ran: Pass
    operations: list[Any]
    """Of exports as the log has them, others as tables take them."""
    digest: dict[str, int] | None = None
    """After its operations, the first time."""


def as_logged(operation: Any) -> ActingOperation:
    """An operation of tables as the log would have it."""
    match operation:
        case AdvanceDay(to=to):
            return DayTickOperation(id="x", to=to)
        case ShrinkRows():
            return ShrinkOperation(id="x", **structs.asdict(operation))
        case ForgetRow():
            return ForgetOperation(id="x", slot="a", **structs.asdict(operation))
        case ClearSlot():
            return SlotOperation(id="x", change=operation)
        case SetTables():
            return SetOperation(id="x", keys={})
        case _:
            return operation


class HandSweeper(Sweeper):
    """Sweeps when it is told to, not when a thread comes to it."""

    made: list["HandSweeper"] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.sweeps: deque[Any] = deque()
        HandSweeper.made.append(self)

    def sweep(self, table: Any) -> None:
        self.sweeps.append(table.deletions.sweep())

    def go(self, pieces: int) -> None:
        while pieces and self.sweeps:
            pieces -= 1
            if next(self.sweeps[0], self) is self:
                self.sweeps.popleft()


class Exporter:
    """The exporter's function in this process, with the fates of a `Pass`."""

    def __init__(self, world: "World") -> None:
        self._world, self._answers, self.fate = world, deque[ExportAnswer](), "complete"
        self._late = False

    def submit(self, request: ExportRequest) -> None:
        self._late = self.fate == "late"
        self._answers.append(self._made(ExportRequest.model_validate_json(request.model_dump_json())))

    def poll(self) -> ExportAnswer | None:
        return self._answers.popleft() if self._answers and not self._late else None

    def next_pass(self, fate: str) -> None:
        self.fate, self._late = fate, False

    def close(self) -> None:
        """Nothing is left."""

    def _made(self, request: ExportRequest) -> ExportAnswer:
        scratch = self._world.store / "live" / f"export-{request.stream}"
        if self.fate in ("fails", "killed") or self._world.dies_at == "exporting":
            with patch("headrace.trainer.exports.exporter.failpoint", self._stop), suppress(KeyboardInterrupt):
                return export(request, scratch)  # and where it is killed, begun anew
        answer = export(request, scratch)
        self._world.made(request, answer)
        self._world.reach("exported")
        return answer

    def _stop(self, point: Failpoint) -> None:
        if point is Failpoint.EXPORT_MANIFEST:
            self._world.reach("exporting")
            if self.fate == "fails":
                raise Unwritable(Path("out"), OSError(5, "the disk is broken"))
            raise KeyboardInterrupt


class Committer:
    """Makes real commits, at once or while the next pass trains; see trainer.checkpoint.committer.Committer."""

    def __init__(self, world: "World") -> None:
        self._world, self.version = world, world.version
        self._wanted: list[tuple[str | None, Any]] = []
        self._flying: dict[str, Any] | None = None

    def exactly(self, version: int, who: str | None, told: Any) -> None:
        self._wanted.append((who, told))

    def tick(self, fate: str, *, full: bool) -> None:
        self.land()
        wanted, self._wanted = self._wanted, []
        if self._world.version == self.version:
            for _, tell in wanted:
                tell(None, "it was gone past")
        elif fate or wanted or full:
            self._take_off()
            if fate != "late" or wanted:
                self.land(wanted, fails=fate == "fails")
            if full and fate == "fails":
                self._take_off()
                self.land()

    def _take_off(self) -> None:
        world = self._world
        world.shards.call(TakeSnapshot(world.version, world.exporting.changes_since()), w.soon())
        self._flying = {"version": world.version, "state": world.state()}

    def land(self, wanted: Sequence[tuple[str | None, Any]] = (), *, fails: bool = False) -> None:
        """The commit in flight is made."""
        if self._flying is None:
            return
        flying, self._flying = self._flying, None
        world, commits = self._world, Commits(self._world.store)
        folder = commits.folder / name_of("t1", flying["version"], world.generation)
        folder.mkdir(parents=True)
        with patch.object(RocksRowStore, "checkpoint", _broken) if fails else nullcontext():
            try:
                parts = world.shards.call(WriteSnapshot(folder), w.soon())
            except StoreFailed as error:
                folder.rmdir()
                world.shards.call(SettleSnapshot(False), w.soon())
                for _, tell in wanted:
                    tell(None, f"its commit failed: {error}")
                return
        world.reach("written")
        for who, _ in wanted:
            if who is not None:
                commits.hold(folder.name, who)
        self._write(folder, flying, parts)
        world.reach("committed")
        world.shards.call(SettleSnapshot(True), w.soon())
        self.version = flying["version"]
        commits.prune(2, nullcontext())
        for _, tell in wanted:
            tell(read_commit(folder), "")

    def _write(self, folder: Path, flying: Mapping[str, Any], parts: Sequence[Any]) -> None:
        save_file({"model.w": np.full(2, flying["version"], np.float32)}, folder / "dense.safetensors")
        files = {path: stored for part in parts for path, stored in part.files.items()}
        files["dense.safetensors"] = hash_of(folder / "dense.safetensors")
        facts = {"generation": self._world.generation, "log_from": 0, "state": flying["state"]}
        write_manifest(folder, manifest_of(folder.name, job="small", files=files, shards=parts, **facts))


def _broken(*_: Any) -> Any:
    raise StoreFailed("the disk is full")


def fleet(stack: ExitStack, kind: int, tables: Mapping[str, TableSection], live: Path) -> Any:
    """Shards that can commit, `kind` of them; 0: the embedded one."""
    if kind == 0:
        shards: Any = EmbeddedShards(ShardProcess.alone(tables, w.SEED, live=live, groups=GROUPS))
    else:
        more = [{"live": str(live / f"shard-{s}"), "groups": GROUPS} for s in range(kind)]
        servers = [stack.enter_context(ShardServer(w.process(s, kind, 1, tables, **more[s]))) for s in range(kind)]
        shards = w.client(servers, 0, 1, tables)
    stack.callback(shards.close)
    return shards


class World:
    """A context; `law` hears of every version that closes, and of every export."""

    def __init__(
        self, store: Path, streams: Sequence[str], shards: int, memory: bool, max_increments: int, law: Any
    ) -> None:
        self.store, self.law = store, law
        self.sections = {name: STREAMS[name].model_copy(update=FOREVER) for name in streams}
        bound = {"memory": 8 << 20} if memory else {}
        self.first_tables = {name: table.model_copy(update=bound) for name, table in TABLES.items()}
        self.log: list[Closed] = []
        self.noted: list[ExportedOperation] = []
        """Logged since the last close, to act at the next one."""
        self.generation, self.dies_at, self._num_wishes = 0, "", 0
        self._patches, self._lives = ExitStack(), ExitStack()
        self._patch(max_increments)
        self._begin(shards)

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *_: object) -> None:
        self._lives.close()
        self._patches.close()

    def _patch(self, max_increments: int) -> None:
        HandSweeper.made = []
        bound = CacheBound(MAX_RESIDENT, 1000)
        for target, name, value in (
            (CacheBound, "of", lambda memory_bytes, width: bound),
            (deletions, "PIECE_ROWS", 4),
        ):
            self._patches.enter_context(patch.object(target, name, value))
        self._patches.enter_context(patch("headrace.pserver.server.shard.Sweeper", HandSweeper))
        self._patches.enter_context(patch("headrace.pserver.commit.change_files.MAX_INCREMENTS", max_increments))

    # -- a rank 0's life

    def _begin(self, shards: int) -> None:
        """Go on from the newest commit, and do again what the log says after it."""
        self.generation += 1
        commits = Commits(self.store).whole()
        commit = commits[-1] if commits else None
        self.version, self.day, self.tables = 0, 0, dict(self.first_tables)
        live = self.store / "live" / f"g{self.generation}"
        self.shards = fleet(self._lives, shards, self.first_tables, live)
        self.exporter = Exporter(self)
        self.exporting = ExportCoordinator(self._setting(), self.exporter, self.noted.append)
        self._restore(commit)
        self.committer = Committer(self)
        after = [closed for closed in self.log if closed.version > self.version]
        still = [body for closed in after for body in closed.operations]
        self.exporting.begin(self.committer, [*still, *self.noted], self.version)
        for closed in after:
            self._run(closed.ran, closed)

    def _restore(self, commit: Commit | None) -> None:
        if commit is None:
            self.shards.call(RestoreCommit(self.store, [], 0), w.soon())
            return
        self.version, state = commit.version, commit.state
        self.shards.call(RestoreCommit(commit.folder, commit.shards, commit.version), w.soon())
        self.day = state["day"]
        self._set({name: TableSection.model_validate(each) for name, each in state["tables"].items()})
        self.exporting.load_state(state["exporting"])

    def _set(self, tables: Mapping[str, TableSection]) -> None:
        """What was set by then."""
        others = {name: table for name, table in tables.items() if table != self.tables[name]}
        self.tables |= others
        if others:
            told = {name: table.model_dump(mode="json") for name, table in others.items()}
            self.shards.call(Operate(self.version, [SetTables(tables=told)]), w.soon())

    def state(self) -> dict[str, Any]:
        """Rank 0's part of a commit."""
        tables = {name: table.model_dump(mode="json") for name, table in self.tables.items()}
        return {"day": self.day, "tables": tables, "exporting": self.exporting.state()}

    def _setting(self) -> ExportSettings:
        slots = [SparseSlot(name=slot, kind="sparse", table=table) for table, slots in SLOTS.items() for slot in slots]
        return ExportSettings(
            job="small", store=self.store, folder=self.store, timeline="t1", fingerprint={}, timed=False,
            streams=self.sections, schema=Schema.of(slots), tables=lambda: self.tables, forks=lambda: 0,
            stage=lambda request, folder: None,
        )  # fmt: skip

    def reach(self, place: str) -> None:
        """Die here if that is to be; a rank 0 that trains again what is logged does not."""
        if self.dies_at == place:
            raise Crash

    def _die(self, death: Death) -> None:
        """Everything goes but the log and the store."""
        self.dies_at = ""
        self._lives.close()
        self._lives = ExitStack()
        HandSweeper.made = []
        names = Commits(self.store).names()
        if death.older and len(names) > 1:
            (self.store / "commits" / names[-1] / "manifest.json").unlink()
        self._begin(death.shards)

    # -- passes

    def run(self, one: Pass) -> None:
        """A pass with all that happens around it."""
        for newest in sorted((self.store / "exports" / one.loses / "small" / "t1").glob("*/_DONE"))[-1:] * bool(
            one.loses
        ):
            newest.unlink()
        self.dies_at = "" if one.death is None else one.death.at
        logged = len(self.log)
        try:
            self._run(one, None)
            if one.death is not None:
                raise Crash
        except Crash:
            assert one.death is not None
            self._die(one.death)
            if len(self.log) == logged:
                self._run(one, None)

    def _run(self, one: Pass, again: Closed | None) -> None:
        """1. Train. 2. Close: what is due is logged, or was. 3. Tables and deciders act. 4. Commits. 5. Exports."""
        if again is None:
            self.exporter.next_pass(one.export)
            self._wish(one.wishes)
        self.version += 1
        self._train(one)  # 1
        self.reach("trained")
        ticked = self.day + one.days
        self.shards.close_pass(ticked, w.soon())
        self.day = ticked
        closed = again or self._close(one)  # 2
        self._act(closed, replaying=again is not None)  # 3
        stats = self.shards.call(CountRows(), w.soon()).tables
        full = any(each.max_dirty_rows is not None and each.dirty_rows > MAX_WAITING for each in stats.values())
        self.committer.tick(one.commit if again is None else "", full=full)  # 4
        for _ in range(len(self.sections) + 1):
            self.exporting.tick()  # 5

    def _wish(self, wishes: Sequence[tuple[str, str]]) -> None:
        for stream, kind in wishes:
            self._num_wishes += 1
            if stream in self.sections:
                with suppress(NotYet):
                    self.exporting.asked({"op": "export", "stream": stream, "kind": kind, "id": str(self._num_wishes)})

    def _train(self, one: Pass) -> None:
        """Two batches of the same signs, the second without the first of them; pieces are swept in between."""
        self.shards.open_pass(self.version, w.soon())
        signs = [chosen for chosen in (one.learns, one.learns[1:]) if chosen]
        batches = [{table: _keys(table, chosen) for table in SLOTS} for chosen in signs]
        prepared = [self.shards.prepare(batch, learn=True) for batch in batches]
        if prepared:
            self.shards.pull(prepared[0], w.soon())
        self.committer.land()
        for step, (batch, ready) in enumerate(zip(batches, prepared, strict=True)):
            self._sweep(one.sweeps - one.sweeps // 2 if step == 0 else one.sweeps // 2)
            pushes = {table: self._push(table, keys, one.clicks, step) for table, keys in batch.items()}
            following = prepared[step + 1] if step + 1 < len(prepared) else None
            self.shards.exchange(step, ready, pushes, following, StepScale(64), w.soon())
        if not prepared:
            self._sweep(one.sweeps)

    def _push(self, table: str, keys: Keys, clicks: int, step: int) -> Gradients:
        section, count = self.tables[table], len(keys.keys_U)
        draw = np.random.default_rng([self.version, step, section.dim])
        show_U = draw.integers(1, 4, count).astype(np.float32)
        click_U = np.minimum(show_U, np.float32(clicks))
        return Gradients(draw.normal(size=(count, 1 + section.dim)).astype(np.float32), show_U, click_U)

    def _sweep(self, pieces: int) -> None:
        for sweeper in HandSweeper.made:
            sweeper.go(pieces)

    def _close(self, one: Pass) -> Closed:
        closing = self._closing(one)
        self.exporting.saw(closing)
        ordered = [*self.noted, *(self._operation(*each) for each in one.operations)]
        self.noted.clear()
        ordered += self.exporting.due(closing, tuple(map(as_logged, ordered)))
        closed = Closed(self.version, self.day, replace(one, wishes=(), death=None), ordered)
        self.log.append(closed)
        self.reach("logged")
        return closed

    def _closing(self, one: Pass) -> ClosingPass:
        return ClosingPass(
            version=self.version, day=self.day, event_time_s=None, pass_times_s=None, wall_s=0.5,
            stats=self.shards.call(CountRows(), w.soon()).tables, positions={}, metrics={},
            num_samples=len(one.learns), ended=False,
        )  # fmt: skip

    def _act(self, closed: Closed, *, replaying: bool) -> None:
        if replaying:
            self.exporting.saw(self._closing(closed.ran))
        before = self.law.look(self.shards)
        acting = []
        for operation in closed.operations:
            match operation:
                case ExportOperation():
                    acting += [cut_of(operation)] if operation.clears else []
                case ExportedOperation():
                    pass
                case _:
                    acting.append(operation)
        for each in acting:
            match each:
                case SetTables(tables=tables):
                    self.tables |= {name: TableSection.model_validate(table) for name, table in tables.items()}
                case AdvanceDay(to=day):
                    self.day = max(self.day, day)
        if acting:
            self.shards.call(Operate(self.version, acting), w.soon())
        for operation in closed.operations:
            self.exporting.acted(self.version, as_logged(operation), replaying)
        digest = self.shards.call(DigestRows(), w.soon())
        assert closed.digest in (None, digest), f"version {self.version} came out otherwise when it was trained again"
        closed.digest = digest
        self.law.closed(self.version, before, self.law.look(self.shards) if acting else before)
        self.reach("acted")

    def _operation(self, kind: str, *words: Any) -> Any:
        match kind, words:
            case "shrink", (table, below, after, at_once):
                return ShrinkRows(table=table, delete_below=below, delete_after_days=after, at_once=at_once)
            case "forget", (table, sign):
                key, group = KEYS[table][sign]
                return ForgetRow(table=table, group=group, key=key)
            case "clear", (table, sign):
                slot = SLOTS[table][sign % 2]
                return ClearSlot(slot=slot, table=table, group=KEYS[table][sign][1])
            case "tick", (days,):
                return AdvanceDay(to=self.day + days)
            case "set", (table, decay, lr):
                section = self.tables[table]
                optimizer = section.optimizer.model_copy(update={"lr": lr})
                section = section.model_copy(update={"decay": decay, "optimizer": optimizer})
                return SetTables(tables={table: section.model_dump(mode="json")})
            case _:
                raise AssertionError((kind, words))

    def made(self, request: ExportRequest, answer: ExportAnswer) -> None:
        """An export was made, or was there; only a parent that somebody removed meanwhile is a reason for none."""
        if answer.outcome == "complete":
            self.law.exported(self, request, answer)
            return
        assert answer.final and request.parent is not None, answer
        parent = Path(request.address) / request.job / request.parent.timeline / request.parent.name
        assert not (parent / "_DONE").exists(), answer


def _keys(table: str, signs: Sequence[int]) -> Keys:
    chosen = [KEYS[table][sign] for sign in signs]
    keys_U = np.array([key for key, _ in chosen], np.uint64)
    return Keys(keys_U, np.array([group for _, group in chosen], np.uint16))
