"""Exports of a running job, on rank 0: cuts exports, has commits made for them, logs how they end.

A decider (trainer.rank0.operations). trainer.exports.stream_state holds the state of a stream and decides what is due;
the exporter process makes the exports (trainer.exports.exporter_process). Training waits only for the commit of the
version that is exported. Imports no torch.
"""

import logging
import math
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Protocol

import msgspec
from msgspec import structs

from headrace.codec import plain, typed, written
from headrace.deadline import Deadline
from headrace.durable import REAL, writing
from headrace.errors import HeadraceError, NotYet, SpecError
from headrace.failpoints import Failpoint, failpoint
from headrace.trainer.checkpoint.commits import Commit, Commits
from headrace.trainer.exports.destination import HOLDER
from headrace.trainer.exports.export_messages import (
    ExportAnswer,
    ExportRequest,
    ExportSettings,
    due_export,
    export_operation,
    exported_operation,
    facts_of,
    request_of,
    rollback_operation,
    rollback_request,
)
from headrace.trainer.exports.exporter_process import LONGEST_PAUSE_S, ExportAttempts, Exporter, log_export_end
from headrace.trainer.exports.pointers import held_commit, release_other_commits, remove_stages
from headrace.trainer.exports.rollback import RollbackState
from headrace.trainer.exports.stream_state import (
    ExportStreamState,
    RunningStream,
    default_kind,
    status_of,
)
from headrace.trainer.job_status import ExportStatus
from headrace.trainer.journal.log import LogFull, Superseded
from headrace.trainer.journal.records import (
    ActingOperation,
    DayTickOperation,
    ExportedOperation,
    ExportOperation,
    ForgetOperation,
    Operation,
    RollbackOperation,
    ShrinkOperation,
    SlotOperation,
)
from headrace.trainer.rank0.operations import ClosingPass, Decider
from headrace.trainer.rank0.requests import Request
from headrace.validation import nearest

STOP_S = 120.0
"""Longest wait for an export when the job is asked to stop. The next run makes it from the same commit."""
TURN_LOOK_S = 0.01
"""Interval of checks while training waits for an export."""
SWEEP_LOOK_S = 0.5
"""Interval of empty passes that check whether a table is swept, while no events come."""
MAX_GRANTED = 100
"""Requests that are remembered after they were granted."""

log = logging.getLogger(__name__)


class ExactCommits(Protocol):
    """Leads commits: see trainer.checkpoint.committer.Committer."""

    version: int
    """Last version committed."""

    def finish(self, version: int) -> bool:
        """Note that a commit ended. Does not begin one for a version that is committed."""
        ...

    def exactly(self, version: int, who: str | None, told: Callable[[Commit | None, str], None]) -> None:
        """Have a commit made of the version that is being closed, held by `who`; then call `told`."""
        ...


class ExportsState(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of all streams, as a commit holds it."""

    low_s: float | None = written(None)
    """Lowest event time of all passes."""
    clock_s: float | None = written(None)
    """Clock of events."""
    streams: Mapping[str, ExportStreamState] = written({})
    rollbacks: Mapping[str, RollbackState] = {}
    """Of streams that may be rolled back."""


class ExportCoordinator(Decider):
    """Methods run on the loop's thread, unless stated otherwise."""

    name: ClassVar[str] = "exporting"

    def __init__(self, setting: ExportSettings, exporter: Exporter, note: Callable[[ExportedOperation], None]) -> None:
        """`note` logs an operation at once: see trainer.rank0.operations.OperationRunner."""
        self._setting, self._note = setting, note
        self._attempts = ExportAttempts(exporter, trouble=setting.trouble)
        self._commits = Commits(setting.store)
        self._streams = {name: RunningStream(each, setting.by_event(name)) for name, each in setting.streams.items()}
        self._committer: ExactCommits | None = None
        self._unlogged: deque[tuple[ExportedOperation, ExportRequest]] = deque()
        """Ends that wait for room in the log."""
        self._requesting = threading.Lock()
        self._granted: deque[str] = deque(maxlen=MAX_GRANTED)
        self._low_s: float | None = None
        """Lowest event time of all passes."""
        self._clock_s: float | None = None
        """Clock of events: the highest time of all passes, without times later than the day of their pass."""
        self._close: ClosingPass | None = None
        self._saw_s = -math.inf
        self._day = 0
        self._waits: list[str] = []
        self._wait_until: Deadline | None = None

    # -- start and end

    def begin(self, committer: ExactCommits, logged: Iterable[Operation], version: int) -> None:
        """Before the first pass, restored at `version`. `logged`: operations that are still to act, also in a replay.

        Exports that were cut before and never ended are made now, from their commits.
        """
        self._committer = committer
        for each in logged:
            if isinstance(each, ExportedOperation) and each.stream in self._streams:
                self._streams[each.stream].noted(each)
        for stream in self._streams.values():
            stream.rollback.trouble = ""  # another try
        with self._setting.exclusive():  # a rank 0 that was replaced has no say in what is another's
            for name, stream in self._streams.items():
                if (flight := stream.flight) is None:
                    continue
                request, commit = request_of(self._setting, stream.chain), held_commit(self._commits, name, flight)
                if why := self._setting.hindrance(request, has_commit=commit is not None):
                    self._over(request, ExportAnswer(name=flight.name, outcome="failed", error=why))
                    continue
                assert commit is not None, "it is there"
                if version == flight.version and not request.stage.exists():
                    _stage(self._setting, request)
                self._commits.hold(commit, HOLDER + name)
                self._attempts.add(request.model_copy(update={"commit": self._commits.folder / commit}))
            release_other_commits(self._commits, [(request.commit.name, request.stream) for request in self._attempts])
            remove_stages(self._setting.store, [request.stage for request in self._attempts])

    def tick(self) -> None:
        """Between passes, and while no events come: log exports that ended, begin those that may begin."""
        going = {request.stream for request in self._attempts if request.point}
        for name, stream in self._streams.items():
            if stream.rollback.to_point and name not in going:
                self._attempts.add(rollback_request(self._setting, name, stream.rollback))
        for request, answer in self._attempts.tick():
            self._over(request, answer)
        self._log_ends()

    def finish(self, *, stopping: bool) -> bool:
        """At an orderly end, once the last version is committed -> whether the job need not wait for exports any more.

        Call it again until it returns True, which it does within the streams' deadlines. `stopping`: the job was asked
        to stop. Otherwise the stream of events has ended; then call `wants_pass` before each call.
        """
        self.tick()
        waits = [f"{request.name} of {request.stream}" for request in self._attempts]
        if not stopping and self._calls(ended=True):
            if not _sweeping(self._close):
                return False
            waits.append("one more, after tables are swept")
        if not waits and not self._unlogged:
            return True
        if self._wait_until is None or waits != self._waits:
            longest_s = max(stream.section.try_s for stream in self._streams.values())
            self._waits, self._wait_until = waits, Deadline.after(min(longest_s, STOP_S) if stopping else longest_s)
            log.info("waiting for exports before the job ends: %s", ", ".join(waits))
        if not self._wait_until.passed():
            return False
        log.warning("the wait for exports is over: %s; the next run makes those that were begun", ", ".join(waits))
        return True

    def close(self) -> None:
        """End the exporter process."""
        self._attempts.close()

    # -- see Decider

    def asked(self, request: Request) -> None:
        """A request is granted at a close; from then on its id is remembered."""
        if request["op"] != ExportOperation.op:
            return
        name, kind, id_ = request.get("stream"), request.get("kind"), request["id"]
        stream = self._streams.get(name) if isinstance(name, str) else None
        if stream is None:
            raise SpecError(f"there is no stream of exports {name!r}; {nearest(str(name), self._streams)}", "exports")
        if kind not in (None, "base", "delta"):
            raise SpecError(f'{kind!r} is no kind of export; write "base" or "delta"')
        if kind == "delta" and stream.section.delta is None:
            raise SpecError("is not set, so commits do not record what changes", f"exports.{name}.delta")
        with self._requesting:
            if id_ not in self._granted:
                stream.requested = stream.requested or (kind or default_kind(stream.section), id_)
                if stream.requested[1] != id_:
                    raise NotYet(f"another export of {name} was requested before and comes first")
        raise NotYet(f"an export of {name} is cut at the next close")

    def saw(self, close: ClosingPass) -> None:
        self._close, self._day, self._saw_s = close, close.day, time.monotonic()
        if close.pass_times_s is not None:
            low_s = close.pass_times_s[0]
            self._low_s = low_s if self._low_s is None else min(self._low_s, low_s)
            time_s = min(close.pass_times_s[1], close.day_end_s or math.inf)
            self._clock_s = time_s if self._clock_s is None else max(self._clock_s, time_s)
        for stream in self._streams.values():
            stream.saw(close, self._clock_s, self._setting.forks())
        for name, stream in self._streams.items():
            if stream.section.on_late == "wait":
                self._wait_turn(name, close)

    def _wait_turn(self, name: str, close: ClosingPass) -> None:
        """Wait until the export that is due now can be cut: until the one before it ended, within its deadlines."""
        stream, time_s = self._streams[name], self._streams[name].time_s(close, self._clock_s)
        section = stream.section
        deadline = Deadline.after(section.tries * (section.try_s + LONGEST_PAUSE_S))
        sweeping = _sweeping(close)
        while due_export(self._setting, name, stream, time_s=time_s, ended=close.ended, sweeping=sweeping, idle=True):
            if stream.flight is None or deadline.passed():
                return
            assert self._committer is not None, "begun"
            self._committer.finish(self._committer.version)
            self.tick()
            time.sleep(TURN_LOOK_S)

    def due(self, close: ClosingPass, ordered: Sequence[ActingOperation]) -> list[ExportOperation | RollbackOperation]:
        found: list[ExportOperation | RollbackOperation] = []
        logged = {each.stream for each in ordered if isinstance(each, RollbackOperation)}
        for name, stream in self._streams.items():
            watched = stream.section.rollback
            decision = None if watched is None or name in logged else stream.rollback.decide(watched)
            if decision is not None:
                log.warning("exports of %s: rollback: %s", name, decision.why)
                found.append(rollback_operation(self._setting, name, close.version, decision))
        exported = {each.stream for each in ordered if isinstance(each, ExportOperation)}
        going = {each.table for each in ordered if isinstance(each, ShrinkOperation) and not each.at_once}
        going = going.union(*(each.swept for each in ordered if isinstance(each, SlotOperation)))
        for name, stream in self._streams.items():
            time_s = stream.time_s(close, self._clock_s)
            due = None
            if name not in exported:
                sweeping = {*_sweeping(close), *going}
                due = due_export(self._setting, name, stream, time_s=time_s, ended=close.ended, sweeping=sweeping)
            if due is not None:
                with self._requesting:
                    requested, stream.requested = stream.requested, None
                    id_ = None if requested is None else requested[1]
                    self._granted.extend(() if id_ is None else (id_,))
                found.append(export_operation(self._setting, name, due, close, time_s, id_))
        return found

    def acted(self, version: int, operation: ActingOperation, replaying: bool) -> None:
        match operation:
            case RollbackOperation(stream=stream):
                if stream in self._streams and operation.timeline == self._setting.timeline:
                    self._streams[stream].rollback.went(version, operation.paths, operation.why)
            case ExportOperation(stream=stream):
                if stream in self._streams:
                    self._cut(operation, self._streams[stream])
            case ExportedOperation(stream=stream):
                if stream in self._streams:
                    self._streams[stream].over(operation, self._setting.timeline)
            case DayTickOperation() | ForgetOperation() | ShrinkOperation() | SlotOperation():
                if isinstance(operation, DayTickOperation):
                    self._day = max(self._day, operation.to)
                for each in self._streams.values():
                    each.chain.touched()

    def wants_pass(self, ended: bool) -> bool:
        """True at the stream's end, or while no events come, where an export is due."""
        if _sweeping(self._close) and time.monotonic() - self._saw_s < SWEEP_LOOK_S:
            return False
        return self._calls(ended=ended)

    def state(self) -> dict[str, Any]:
        for stream in self._streams.values():
            stream.noticed_forks(self._setting.forks())
        streams = {name: each.chain for name, each in self._streams.items()}
        rollbacks = {name: each.rollback for name, each in self._streams.items() if each.section.rollback}
        found: dict[str, Any] = plain(ExportsState(self._low_s, self._clock_s, streams, rollbacks))
        return found

    def load_state(self, state: Mapping[str, Any]) -> None:
        """A new stream starts empty; an export in flight on another timeline is dropped."""
        found = typed(ExportsState, state, "its state of exports")
        self._low_s, self._clock_s = found.low_s, found.clock_s
        for name, chain in found.streams.items():
            if name in self._streams:
                timeline, other_slots = self._setting.timeline, self._setting.other_slots
                self._streams[name].restore(chain, found.rollbacks.get(name), timeline, other_slots=other_slots)

    def status(self) -> dict[str, ExportStatus]:
        failing = self._attempts.failing
        found = {name: status_of(each.view(), failing.get(name), time.time()) for name, each in self._streams.items()}
        for name, each in self._streams.items():
            if (section := each.section.rollback) is not None:
                found[name] = structs.replace(found[name], rollback=each.rollback.status(section))
        return found

    # -- commits

    def changes_since(self) -> int | None:
        """The version since which the next commit must record what changed; None: no export needs it."""
        needs = (stream.chain.needs_since(self._setting.timeline) for stream in self._streams.values())
        return min((version for version in needs if version is not None), default=None)

    def _cut(self, operation: ExportOperation, stream: RunningStream) -> None:
        """Cut the export of the version that is being closed: have a commit made for it, unless its end is logged.

        Where deltas may build on the export, its version gets a commit in any case: changes are recorded from commit to
        commit.
        """
        name, version, committer = operation.stream, operation.version, self._committer
        assert self._close is not None and self._close.version == version, "it acts at its close"
        assert committer is not None, "begun"
        facts = facts_of(self._setting, operation, stream, self._close, self._day, self._low_s)
        tracks = stream.section.delta is not None
        stream.chain.ordered(operation, facts, tracks=tracks)
        if operation.timeline != self._setting.timeline:
            stream.chain.drop()
        elif stream.flight is not None:
            request = request_of(self._setting, stream.chain)
            _stage(self._setting, request)
            committer.exactly(version, HOLDER + name, partial(self._committed, request))
        elif tracks:
            committer.exactly(version, None, lambda commit, why: None)

    def _committed(self, request: ExportRequest, commit: Commit | None, why: str) -> None:
        """Make an export, now that its commit exists; or end it, where there will be no commit."""
        if commit is not None:
            request = request.model_copy(update={"commit": commit.folder})
            why = self._setting.elsewhere(request)
        if commit is None or why:
            self._over(request, ExportAnswer(name=request.name, outcome="failed", error=why))
            return
        failpoint(Failpoint.EXPORT_CUT)
        self._attempts.add(request)

    # -- ends of exports

    def _over(self, request: ExportRequest, answer: ExportAnswer) -> None:
        """Log that an export ended for good, then release what was held for it."""
        stream = self._streams[request.stream]
        if request.point:  # where it failed, the next start of the job tries again
            if stream.rollback.was_pointed(request.version, answer.path, answer.error or ""):
                what = f"it cannot go back: {answer.error}" if answer.error else f"it is {answer.path} again"
                log.warning("current.json of %s: %s", request.stream, what)
            return
        cut = stream.chain.operation
        assert cut.name == request.name, "one at a time, until its end has acted"
        log_export_end(request, answer)
        self._unlogged.append((exported_operation(cut, answer, time.time()), request))
        self._log_ends()

    def _log_ends(self) -> None:
        while self._unlogged:
            end, request = self._unlogged[0]
            try:
                self._note(end)
            except LogFull as error:
                log.warning("the end of export %s is not in the log yet: %s", request.name, error)
                return
            self._unlogged.popleft()
            self._streams[request.stream].noted(end)
            self._commits.release(request.commit.name, HOLDER + request.stream)
            shutil.rmtree(request.stage, ignore_errors=True)

    # -- deciding

    def _calls(self, *, ended: bool) -> bool:
        """Whether an export is due, even while a table is swept."""
        for name, stream in self._streams.items():
            time_s = stream.time_s(self._close, self._clock_s) if stream.by_event else time.time()
            if due_export(self._setting, name, stream, time_s=time_s, ended=ended, sweeping=()) is not None:
                return True
        return False


def _sweeping(close: ClosingPass | None) -> list[str]:
    """The tables of which a shrink has yet to remove rows."""
    return [] if close is None else [name for name, each in close.stats.items() if each.sweeping]


def _stage(setting: ExportSettings, request: ExportRequest) -> None:
    """Write what only rank 0 knows of this version, whole or not at all. An export can do without it."""
    path, unfinished = request.stage, request.stage.with_suffix(f".{os.getpid()}.unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        with writing(unfinished):
            unfinished.mkdir(parents=True)
        setting.stage(request, unfinished)
        with setting.exclusive(), writing(path):
            REAL.sync_folder(unfinished)
            shutil.rmtree(path, ignore_errors=True)
            unfinished.rename(path)
    except Superseded:
        raise
    except HeadraceError as error:
        log.warning("export %s of %s is made without what rank 0 adds: %s", request.name, request.stream, error)
