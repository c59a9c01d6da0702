"""Runs a job: one generation of workers after another, until the job ends.

One generation is run by service.cluster.generation; service.cluster.supervision decides whether another one follows.
"""

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from msgspec.structs import replace

from headrace.blob.blob_errors import BlobUnavailable
from headrace.deadline import Deadline
from headrace.errors import HeadraceError
from headrace.lifecycle import ExitCode, cause_in, on_stop_signal
from headrace.retry import Backoff
from headrace.rpc import refusals
from headrace.rpc.run_files import RANK0
from headrace.service.cluster.elastic import Elasticity
from headrace.service.cluster.generation import TICK_S, Events, Faults, Generation
from headrace.service.cluster.rank0_connection import RankZeroConnection
from headrace.service.cluster.resizing import StandbyPlans, StandbyWorkers, Successor
from headrace.service.cluster.run_folder import write_private
from headrace.service.cluster.runtime import LAUNCHER, Launcher, OnLine, SpareLauncher
from headrace.service.cluster.supervision import (
    Death,
    End,
    EndingLimits,
    RestartLimits,
    RunOutcome,
    StopRequested,
    Tick,
    decide,
)
from headrace.service.cluster.worker_plan import JobPlan
from headrace.trainer.job_status import StallStatus, Status
from headrace.trainer.rank0.resize_messages import STANDBY
from headrace.trainer.tuning_status import TuningStatus

NextPlan = Callable[[int], JobPlan]
"""Plans the next generation. Its number is above the given one and above every one in the log."""

StopRequestedWithin = Callable[[float], bool]
"""Waits so many seconds; returns at once, and true, where the job is asked to stop."""
NOT_READY = ("starting", "tuning", "restarting", STANDBY)
"""States of a job whose workers do not run yet."""
STORE_PAUSES = Backoff.doubling(1.0, 10.0)
"""Between two tries to plan a generation while the object store cannot be reached; there is no last try."""


class JobRunner:
    """Runs a job on a launcher: starts its workers, restarts them after a death, ends them together.

    The job has phases, each with its own plans; the next phase begins when one has drained.
    """

    def __init__(
        self,
        job: str,
        phases: Iterable[NextPlan],
        on_line: OnLine,
        *,
        launcher: Launcher,
        limits: EndingLimits | None = None,
        restarts: RestartLimits | None = None,
        faults: Faults = lambda generation, worker: (),
        status_interval_s: float = 0.5,
        standbys: StandbyPlans | None = None,
        elastic: Elasticity | None = None,
        stop_code: ExitCode = ExitCode.DRAINED,
    ) -> None:
        """`standbys` plans the workers that stand by when the job is resized, if the launcher has room for them.

        `stop_code`: the exit code for agents where the job was stopped, instead of DRAINED.
        """
        self._launcher = launcher
        self._phases, self._on_line, self._faults, self._standbys = phases, on_line, faults, standbys
        self._elastic = elastic
        self._limits, self._restarts = limits or EndingLimits(), restarts or RestartLimits()
        self._status_interval_s, self._stop_code = status_interval_s, stop_code
        self._events: Events = queue.SimpleQueue()
        self._deaths: list[Death] = []
        self._last_error = ""  # of the worker whose end was the newest death
        self._before = Status(job=job)  # shown until a rank 0 answers
        self._rank0: RankZeroConnection | None = None
        self._generation: Generation | None = None
        self._drain_asked = threading.Lock()  # acquired once, at the first request
        self._last_number = 0
        self.stopped = False
        """True if a stop was requested, also of what follows the stream; set by `run` and by what follows."""
        self._refused_before = Counter(refusals.PROCESS.counts())
        self._version = 0  # the newest that a rank 0 has reported
        self.tuning: TuningStatus | None = None
        """Shown in the status; set by `first`, and before `run` for a job that has tuned. Any thread."""
        self.first: Callable[[StopRequestedWithin], RunOutcome | None] = lambda stop_requested_within: None
        """Work before the workers start; its outcome if they are not to start. Set before `run`."""
        self.then: Callable[[RunOutcome, Launcher, int], RunOutcome] | None = None
        """Work on the launcher once the stream is drained, before its agents end: it takes the outcome so far and the
        number of the next generation. Set before `run`."""

    def status(self) -> Status:
        """Rank 0's last status, with the launcher's figures; the state is "restarting" between generations.

        Any thread.
        """
        status = self._before if self._rank0 is None else self._rank0.status
        if status.state == STANDBY:
            status = self._before
        refused = Counter(refusals.PROCESS.counts()) - self._refused_before + Counter(status.refused)
        last_death = self._deaths[-1].reason if self._deaths else None
        told = replace(
            status,
            restarts=len(self._deaths),
            last_death=last_death,
            last_error=self._last_error,
            step=self._step(status),
            refused=dict(refused),
        )
        if self._elastic is not None:
            told = replace(told, elastic=self._elastic.status())
        if (tuning := self.tuning) is not None:
            told = replace(told, tuning=tuning, state="tuning" if tuning.name else told.state)
        if self._generation is None:
            return told
        if late := self._generation.unrenewed:
            told = replace(told, unrenewed=late)
        if lost := self._generation.lost:
            told = replace(told, lost=lost)
        waits = self._generation.waits
        if waits is not None and told.elastic is not None and told.elastic.waits:
            waits = f"{waits}; {told.elastic.waits}"
        return told if waits is None else replace(told, stalled=StallStatus(waits_for="workers", text=waits))

    def _step(self, status: Status) -> str:
        """The step of the start; empty once rank 0 trains, or replays its log."""
        if status.state not in ("starting", "restarting"):
            return ""
        if (tuning := self.tuning) is not None and tuning.name:
            return f"The first pass waits for the tuning: {tuning.step}."
        if self._generation is None:
            return "The launcher reads the newest commit and plans the workers."
        if status.state == "restarting" and self._rank0 is None:
            return "The workers have ended, and are started again in a moment."
        return self._generation.start_step

    def lacks(self) -> str:
        """The things that the job lacks to be ready, in words; "" while its workers run. Any thread."""
        status = self.status()
        if status.stalled is not None and status.stalled.waits_for in ("workers", "store"):
            return status.stalled.text
        return f"the job is {status.state}" if status.state in NOT_READY else ""

    def last_lines(self, worker: str) -> list[str]:
        """The last lines of output of a worker of the last generation. Any thread."""
        return self._generation.last_lines(worker) if self._generation is not None else []

    def drain(self) -> None:
        """Stop the job after the pass in training, as a first signal does. May be repeated. Any thread."""
        if self._drain_asked.acquire(blocking=False):
            self._events.put((0, StopRequested()))

    def run(self) -> RunOutcome:
        """Run the job to its end. Main thread only. No worker is left when this returns or raises.

        A first SIGINT or SIGTERM ends the job after the pass in training, a second one at once.
        """
        outcome = RunOutcome(ExitCode.BUG, "the launcher failed")
        try:
            with on_stop_signal(lambda: self._events.put((0, StopRequested()))):
                outcome = self._run_phases()
        except HeadraceError as error:
            outcome = RunOutcome(error.exit_code, str(error))
            raise
        finally:
            drained = self.stopped and outcome.code == ExitCode.DRAINED
            self._launcher.end(self._stop_code if drained else outcome.code, outcome.reason)
        return outcome

    def _run_phases(self) -> RunOutcome:
        outcome = RunOutcome(ExitCode.DRAINED, "there was nothing to do")
        if (instead := self.first(self._stop_requested_within)) is not None:
            self.stopped = instead.code == ExitCode.DRAINED
            return instead
        for plan in self._phases:
            if self._generation is not None:
                self._show_restarting()
            outcome, self.stopped = self._run_phase(plan)
            if self.stopped or outcome.code != ExitCode.DRAINED:
                return outcome
        if self.then is None:
            return outcome
        self.stopped = self._stop_requested_within(0)
        return outcome if self.stopped else self.then(outcome, self._launcher, self._last_number + 1)

    def _run_phase(self, next_plan: NextPlan) -> tuple[RunOutcome, bool]:
        """Run generations until one ends the phase; its outcome, and whether a stop was requested."""
        successor: Successor | None = None
        while True:
            planned = successor or self._planned(next_plan)
            if planned is None:
                return RunOutcome(ExitCode.DRAINED, "stopped while its workers were restarted"), True
            outcome, stopped, successor = self._run_generation(planned)
            if successor is not None:
                continue
            now_s = time.monotonic()
            progress = self._closed_more()
            decision = decide(outcome, self._deaths, now_s, self._restarts, progress=progress, stop_asked=stopped)
            if isinstance(decision, End):
                return decision.outcome, stopped
            self._show_restarting()
            self._last_error = "" if outcome.first_dead is None else cause_in(self.last_lines(outcome.first_dead))
            self._deaths.append(Death(now_s, outcome.reason, progress))
            self._on_line(LAUNCHER, decision.reason)
            if self._stop_requested_within(decision.after_s):
                return RunOutcome(ExitCode.DRAINED, "stopped while its workers were restarted"), True

    def _planned(self, next_plan: NextPlan) -> Successor | None:
        """The next generation, in a context that is open; None if a stop was requested before it was planned."""
        plan = self._plan_once_possible(next_plan)
        if plan is None:
            return None
        rank0 = self._connection(plan, partial(_rank0_address, self._launcher, plan), self._before)
        return self._begun(plan, self._launcher, rank0, ExitStack())

    def _plan_once_possible(self, next_plan: NextPlan) -> JobPlan | None:
        """The next plan, as soon as the object store can be reached; None if a stop was requested before."""
        failures = 0
        while True:
            try:
                plan = next_plan(self._last_number)
            except BlobUnavailable as error:
                failures += 1
                waits = f"the workers start once the object store can be reached: {error}"
                if failures == 1:
                    self._on_line(LAUNCHER, waits)
                self._before = replace(self._before, stalled=StallStatus(waits_for="store", text=waits))
                if self._stop_requested_within(STORE_PAUSES.pause_s(failures)):
                    return None
            else:
                if failures:
                    self._on_line(LAUNCHER, "the object store is reached again")
                    self._before = replace(self._before, stalled=None)
                return plan

    def _standing_by(self, plan: JobPlan) -> Successor:
        """A generation beside the one that trains, in a context that is open. Its address is not told to commands."""
        assert isinstance(self._launcher, SpareLauncher)
        with ExitStack() as held:
            launcher = held.enter_context(self._launcher.beside())
            address = partial(launcher.rendezvous.address, plan.rank0)
            rank0 = self._connection(plan, address, Status(state=STANDBY))
            return self._begun(plan, launcher, rank0, held.pop_all())

    def _connection(self, plan: JobPlan, address: Callable[[], str | None], before: Status) -> RankZeroConnection:
        return RankZeroConnection(
            before,
            address,
            plan.secret,
            self._status_interval_s,
            worker=plan.rank0.name,
            tls=plan.to_rank0,
            max_silent_s=plan.max_silent_s,
        )

    def _begun(self, plan: JobPlan, launcher: Launcher, rank0: RankZeroConnection, held: ExitStack) -> Successor:
        self._last_number = plan.generation
        with held:
            made = Generation(plan, self._events, rank0, self._on_line, self._limits, self._faults, launcher)
            generation = held.enter_context(made)
            return Successor(generation, launcher, held.pop_all())

    def _show_restarting(self) -> None:
        """Until the next rank 0 answers, the status has the last figures of the one before, but no resize of its."""
        self._before = replace(
            self.status(), state="restarting", stalled=None, refused={}, resizing=None, unrenewed={}, lost={}
        )
        self._rank0 = None

    def _run_generation(self, running: Successor) -> tuple[RunOutcome, bool, Successor | None]:
        """Run a generation to its end; its outcome, whether a stop was requested, and its successor if there is one.

        A generation ends, too, when its successor has claimed the job.
        """
        generation = running.generation
        self._generation, self._rank0 = generation, generation.rank0
        with running.held, self._standby_for(generation) as standby:
            generation.step(Tick())
            while (outcome := generation.outcome) is None:
                self._take_event(generation, standby)
                if self._elastic is not None and generation.outcome is None and self._elastic.step(generation):
                    outcome = RunOutcome(ExitCode.DRAINED, "another number of trainers goes on")
                    break
                if standby is not None and standby.has_claimed:
                    outcome = RunOutcome(ExitCode.DRAINED, "its successor has claimed the job")
                    break
            successor = None if standby is None else standby.successor_of(outcome, stop_asked=generation.stop_asked)
            if successor is not None:
                self._show_restarting()
                self._generation, self._rank0 = successor.generation, successor.generation.rank0
        if successor is not None:
            self._take_over(successor, stop_asked=generation.stop_asked)
        return outcome, generation.stop_asked, successor

    @contextmanager
    def _standby_for(self, generation: Generation) -> Iterator[StandbyWorkers | None]:
        """The workers that stand by beside a generation; None where there can be none."""
        if self._standbys is None or not isinstance(self._launcher, SpareLauncher):
            yield None
            return
        with StandbyWorkers(generation, self._standbys, self._standing_by, self._on_line) as standby:
            yield standby

    def _take_over(self, successor: Successor, *, stop_asked: bool) -> None:
        """The generation before is gone: the successor trains, and is found by commands."""
        assert self._standbys is not None
        self._standbys.adopt(successor.generation.plan)
        _rank0_address(successor.launcher, successor.generation.plan)
        if stop_asked:
            self._events.put((0, StopRequested()))

    def _take_event(self, generation: Generation, standby: StandbyWorkers | None) -> None:
        try:
            number, event = self._events.get(timeout=TICK_S)
        except queue.Empty:
            number, event = 0, Tick()
        if number in (0, generation.plan.generation):
            generation.step(event)
        if standby is not None:
            standby.step(event if number == standby.number else Tick(), self._last_number)

    def _closed_more(self) -> bool:
        """True if rank 0 reported a newer version than any before. Closes after its last status are not known."""
        version = self.status().version or 0
        before, self._version = self._version, max(self._version, version)
        return version > before

    def _stop_requested_within(self, pause_s: float) -> bool:
        deadline = Deadline.after(pause_s)
        while True:
            try:
                if isinstance(self._events.get(timeout=max(0.0, deadline.left_s()))[1], StopRequested):
                    return True
            except queue.Empty:
                return False


def _rank0_address(launcher: Launcher, plan: JobPlan) -> str | None:
    """The address of rank 0 once it serves. Commands then find it in the run folder, too. Raises Unwritable."""
    address = launcher.rendezvous.address(plan.rank0)
    if address is not None:
        tls = plan.to_rank0
        name = {} if tls is None else {"name": tls.name.dns}
        write_private(plan.run_folder / RANK0, {"address": address, "secret": plan.secret, **name})
    return address
