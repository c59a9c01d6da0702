"""A resize of a running job on the side of the service: the request, and the workers that stand by for it.

`resize` sends the request to rank 0 and waits until the new workers train. Rank 0 decides everything
(trainer.rank0.resizing), and asks the launcher for the new workers: it holds them beside those that train, and carries
their reports to rank 0. They move rows by themselves, and the resize acts when few are left. Then they claim the job.
Until that moment their death changes nothing; from then on the death of those before them does not. A launcher that has
no room for both starts the new ones after the old (service.cluster.generation_plans).
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from headrace.deadline import Deadline
from headrace.errors import HeadraceError
from headrace.lifecycle import ExitCode
from headrace.rpc.job_client import CALL_S, JobClient, NotRunning, Unfinished
from headrace.rpc.role import RoleClient
from headrace.service.cluster.generation import Generation
from headrace.service.cluster.runtime import LAUNCHER, Launcher, OnLine
from headrace.service.cluster.supervision import Event, RunOutcome
from headrace.service.cluster.worker_plan import JobPlan
from headrace.trainer.job_status import Status, read
from headrace.trainer.rank0.resize_messages import PrepareWorkers, WorkersFailed, WorkersMoved
from headrace.trainer.spec.changes import SHARDS, TRAINERS

MOVE_S = 900.0
"""Longest time to wait for the new workers."""
PREPARE_S = 3600.0
"""Longest time to move the rows; then the resize is given up."""


@dataclass(frozen=True, slots=True)
class Resized:
    """The numbers of workers that a job goes on with."""

    version: int
    """The close of this version is the first after the request."""
    shards: int
    """0: the shard lives in the trainer."""
    trainers: int


def resize(store: Path, shards: int | None, trainers: int | None, deadline: Deadline) -> Resized:
    """Have the job that runs in `store` go on with these numbers of workers; None: as many as now.

    Returns once the new workers train. Raises SpecError for numbers that cannot be, NotRunning where the request was
    never sent, and Unfinished where it is not known that the new workers train.
    """
    client = JobClient(store)
    version = client.carry_out({"op": "resize", "shards": shards, "trainers": trainers}, deadline)

    def late(reason: str) -> HeadraceError:
        return Unfinished(f"logged at version {version}, but the new workers do not train yet; {reason}".rstrip("; "))

    try:
        found = client.poll(_new_workers, deadline, late)
    except NotRunning:
        raise Unfinished(
            f"logged at version {version}; the run has ended, and the next one has these numbers"
        ) from None
    return Resized(version, found["shards"], found["trainers"])


def _new_workers(client: RoleClient) -> dict[str, int] | None:
    """The numbers of the running workers, once they are those of the newest resize, restored, and do not replay."""
    status = read(Status, client.status(Deadline.after(CALL_S)))
    workers, wanted = status.workers, status.overrides
    if status.state in ("replaying", "restarting") or not workers:
        return None
    same = wanted.get(SHARDS) in (None, workers["shards"]) and wanted.get(TRAINERS) in (None, workers["trainers"])
    return workers if same else None


@dataclass(frozen=True, slots=True)
class Successor:
    """A generation that has begun."""

    generation: Generation
    launcher: Launcher
    held: ExitStack
    """Its context, which ends the generation."""


class StandbyPlans(Protocol):
    """Plans generations that stand by. See service.cluster.generation_plans."""

    def beside(self, last: int, resize: str, trainers: int, shards: int) -> JobPlan:
        """Plan a generation after `last` that stands by for a resize, with these numbers of workers."""
        ...

    def has_claimed(self, plan: JobPlan) -> bool:
        """Whether the generation has the job."""
        ...

    def is_handed_over(self) -> bool:
        """Whether the state of the job waits in the folder of the handover for the generation of `beside`."""
        ...

    def is_decided(self) -> bool:
        """Whether the resize of `beside` has acted, and the state after it is there: handed over, or committed."""
        ...

    def adopt(self, plan: JobPlan) -> None:
        """The generation trains, and those before it are gone."""
        ...


class StandbyWorkers:
    """A context: what it has not handed over ends with it."""

    def __init__(
        self, present: Generation, plans: StandbyPlans, begin: Callable[[JobPlan], Successor], on_line: OnLine
    ) -> None:
        """`present`: the generation that trains. `begin` begins a generation beside it."""
        self._present, self._plans, self._begin, self._on_line = present, plans, begin, on_line
        self._mine: Successor | None = None
        self._resize = ""
        self._tried: set[str] = set()
        self._reported: WorkersMoved | None = None
        self._until: Deadline | None = None
        self.has_claimed = False
        """Whether they have the job: the workers before them are not needed any more."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._drop()

    @property
    def number(self) -> int | None:
        """Their generation; None while there are none."""
        return None if self._mine is None else self._mine.generation.plan.generation

    def step(self, event: Event, last: int) -> None:
        """Begin them where rank 0 asks for them, act on an event of theirs, and report. `last`: the last generation."""
        if self._mine is None:
            wanted = self._present.rank0.message
            if isinstance(wanted, PrepareWorkers) and wanted.id not in self._tried and not self._present.stop_asked:
                self._start(wanted, last)
            return
        self._mine.generation.step(event)
        self.has_claimed = self._plans.has_claimed(self._mine.generation.plan)
        if self.has_claimed:
            return
        if (outcome := self._mine.generation.outcome) is not None:
            self._fail(outcome.reason)
        elif self._until is not None and self._until.passed():
            self._fail(f"the rows were not moved within {PREPARE_S:g} s")
        else:
            self._report(self._mine.generation.rank0.message)

    def successor_of(self, outcome: RunOutcome, *, stop_asked: bool) -> Successor | None:
        """Hand them over at the end of the generation that trained, if they have the job or will have it at once.

        At a stop they follow, too, if only they can commit the last version.
        """
        if self._mine is None:
            return None
        follows = self._plans.is_handed_over if stop_asked else self._plans.is_decided
        if not self.has_claimed and not (outcome.code == ExitCode.DRAINED and follows()):
            return None
        successor, self._mine = self._mine, None
        self._on_line(LAUNCHER, f"generation {successor.generation.plan.generation} takes over")
        return successor

    def _start(self, wanted: PrepareWorkers, last: int) -> None:
        self._resize = wanted.id
        self._tried.add(self._resize)
        trainers, shards = wanted.trainers, wanted.shards
        try:
            plan = self._plans.beside(last, self._resize, trainers, shards)
            self._mine = self._begin(plan)
        except HeadraceError as error:
            self._fail(str(error))
            return
        self._until = Deadline.after(PREPARE_S)
        self._on_line(
            LAUNCHER,
            f"resize to {trainers} trainers and {shards or 'embedded'} shards: generation {plan.generation} stands by",
        )

    def _report(self, moved: object) -> None:
        if isinstance(moved, WorkersMoved) and moved != self._reported:
            self._reported = moved
            self._present.rank0.send(moved)

    def _fail(self, reason: str) -> None:
        self._on_line(LAUNCHER, f"the resize is given up: {reason}")
        self._present.rank0.send(WorkersFailed(self._resize, reason))
        self._drop()

    def _drop(self) -> None:
        if self._mine is not None:
            dropped, self._mine = self._mine, None
            dropped.held.close()
