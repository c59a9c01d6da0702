"""Plans the generations of a job: under which spec, with how many workers, and whether another one follows.

Everything is read anew from store and log before each generation, so a generation after a death sees what the log
decided. service.cluster.worker_plan plans the processes of one generation, service.cluster.job_runner runs them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.identity.authority import open_authority
from headrace.service.cluster.fetched_commits import check_head
from headrace.service.cluster.job_runner import NextPlan
from headrace.service.cluster.store import IDENTITY, clear_caches, clear_live
from headrace.service.cluster.store_defaults import with_slot_numbers
from headrace.service.cluster.worker_plan import GenerationRole, JobPlan, cache_names, plan_job
from headrace.service.spec.job import LoadedJob
from headrace.shared_folder import SharedFolder
from headrace.timeline import TraceWindow
from headrace.trainer.checkpoint.commits import Commits
from headrace.trainer.checkpoint.handover import acted_in, handed_over
from headrace.trainer.journal.log_file import newest_generation
from headrace.trainer.rank0.logged_specs import replay_first, resized
from headrace.trainer.spec.changes import MOST_TRAINERS, SHARDS, TRAINERS

KEPT = ("wire", "trainers", "shards")
"""Keys of a logged section `cluster` under which passes are replayed."""


class GenerationPlans:
    """No generation runs during a call."""

    def __init__(
        self,
        job: LoadedJob,
        folder: Path,
        newest: int = 0,
        *,
        spare: bool = False,
        sees: SharedFolder | None = None,
        trace: TraceWindow | None = None,
    ) -> None:
        """Private files go below `folder`. Numbers of generations are above `newest`.

        `spare`: whether workers stand by when the job is resized (service.cluster.resizing).
        `sees`, `trace`: see plan_job.
        """
        self._job, self._folder, self._newest, self._spare = job, folder, newest, spare
        self._sees, self._trace = sees, trace
        self._planned: LoadedJob | None = None
        self._beside: LoadedJob | None = None
        self._resize = ""
        self._aim: int | None = None
        self._aimed_by = 0  # the first generation with so many trainers, which logs the number
        self._until: str | None = None
        self.most = job.spec.cluster.num_trainers

    def begin_with(self, job: LoadedJob) -> None:
        """Before the first plan: the job under the settings that it has chosen."""
        self._job = job

    def phases(self) -> Iterator[NextPlan]:
        """The phases of the job, each a way to plan its generations.

        Another one follows while logged passes were trained under an old spec or by another number of trainers, which
        comes first, and while the numbers of workers have changed.
        """
        while self._planned is None or self._until is not None or self._is_resized(self._planned):
            yield self.next

    def next(self, last: int) -> JobPlan:
        """Plan the generation after every one in the log, the given one, and `newest`.

        Raises HeadReplaced where another head has claimed the job since this one ran.
        """
        check_head(self._job, last)
        self._job = with_slot_numbers(self._job)  # an old spec, whose passes come first, may have added some
        job = self._in_force()
        logged = replay_first(job.store, job.full, job.cluster.num_trainers)
        if logged is not None:
            spec = {**logged.spec, "cluster": _cluster_under(logged.spec, job.full)}
            old = job.under(spec, job.store)
            job = with_workers(old, logged.world, _shards_under(old, logged.world, job.cluster.num_shards))
        self._planned, self._until = job, None if logged is None else "logged"
        clear_live(job.store)
        clear_caches(job.store, cache_names(job))
        plan = self._plan(job, last, GenerationRole(until=self._until, prepared=self._spare and self._until is None))
        if self._until is None:
            self._aimed_by = plan.generation
        return plan

    @property
    def replays(self) -> bool:
        return self._until is not None

    def aim_at(self, trainers: int) -> None:
        self._aim, self._aimed_by = trainers, 0

    def beside(self, last: int, resize: str, trainers: int, shards: int) -> JobPlan:
        """A generation runs during the call."""
        self._beside, self._resize = with_workers(self._job, trainers, shards), resize
        return self._plan(self._beside, last, GenerationRole(stands_by=resize, prepared=True))

    def has_claimed(self, plan: JobPlan) -> bool:
        return newest_generation(self._job.store / "log") >= plan.generation

    def is_handed_over(self) -> bool:
        return handed_over(self._job.store, self._resize) is not None

    def is_decided(self) -> bool:
        """If not, the job goes on with the newest commit."""
        whole = Commits(self._job.store).whole()
        return self.is_handed_over() or (bool(whole) and acted_in(whole[-1], self._resize))

    def adopt(self, plan: JobPlan) -> None:
        self._planned, self._until = self._beside, None
        clear_live(self._job.store, newest=plan.generation)

    def _plan(self, job: LoadedJob, last: int, role: GenerationRole) -> JobPlan:
        generation = max(self._newest, last, newest_generation(job.store / "log")) + 1
        authority = open_authority(job.store / IDENTITY, job.spec.name) if job.cluster.leaves_machine else None
        return plan_job(
            job,
            self._folder / f"g{generation}",
            generation=generation,
            role=role,
            authority=authority,
            sees=self._sees,
            trace=self._trace,
        )

    def _is_resized(self, planned: LoadedJob) -> bool:
        return numbers_of(self._in_force()) != numbers_of(planned)

    def _in_force(self) -> LoadedJob:
        """The job with the number of trainers that was aimed at, until a generation of so many has logged it."""
        job = in_force(self._job)
        self.most = job.resized.get(MOST_TRAINERS, job.spec.cluster.num_trainers)
        if self._aimed_by and newest_generation(job.store / "log") >= self._aimed_by:
            self._aim = None
        return job if self._aim is None else with_workers(job, self._aim, job.cluster.num_shards)


def in_force(job: LoadedJob) -> LoadedJob:
    """The job with the numbers of workers in force: those of the newest resize, or those of its file."""
    return replace(job, resized=resized(job.store, job.full))


def with_workers(job: LoadedJob, trainers: int, shards: int) -> LoadedJob:
    """The job with `trainers` trainers, and `shards` shards where one trainer or `shards` allow it, else one."""
    return replace(job, resized={TRAINERS: trainers, SHARDS: shards})


def numbers_of(job: LoadedJob) -> tuple[int, int]:
    """Its numbers of trainers and of shards."""
    return job.cluster.num_trainers, job.cluster.num_shards


def _shards_under(logged: LoadedJob, trainers: int, present: int) -> int:
    """The number of shards for passes of a logged spec: the `present` one, unless the shards are in its trainers."""
    if logged.spec.train.rows != "device":
        return present
    return trainers if trainers > 1 else 0


def _cluster_under(logged: Mapping[str, Any], present: Mapping[str, Any]) -> dict[str, Any]:
    """The present section `cluster` for passes under a logged spec: machines are those of now. What decides bits, and
    what tells whether the job file has changed since a resize, stays as it is logged."""
    return {**present["cluster"], **{key: value for key, value in logged.get("cluster", {}).items() if key in KEPT}}
