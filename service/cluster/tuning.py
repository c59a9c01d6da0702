"""Lets a new job choose crosses and settings on the first events of its stream, before its first pass.

One process on this machine chooses the crosses (service.planning.cross_choice), another one then tries the settings
(trainer.train.tuning), each in a folder of the job's store. A job is a
function of its settings and its log, so the new job need not take over what the best one has learnt. The process can be
killed at any time: it is started again, and chooses the same.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from headrace import documents
from headrace.codec import plain
from headrace.dataset.sources.kinds import open_sources
from headrace.dataset.spec.config import Opening
from headrace.deadline import Deadline
from headrace.durable import REAL, write_whole, writing
from headrace.errors import HeadraceError, SpecError
from headrace.extras import require
from headrace.lifecycle import ExitCode
from headrace.service.cluster.child import Spawner, Starter
from headrace.service.cluster.generation_plans import GenerationPlans
from headrace.service.cluster.job_runner import JobRunner, StopRequestedWithin
from headrace.service.cluster.local import ProcessLauncher
from headrace.service.cluster.runtime import LAUNCHER, Launcher, OnLine
from headrace.service.cluster.side_process import run_beside
from headrace.service.cluster.store import CROSSED, TUNED, TUNING
from headrace.service.cluster.store_defaults import newest_spec
from headrace.service.cluster.supervision import RunOutcome
from headrace.service.monitor.lines import crosses_text
from headrace.service.spec.chosen_crosses import chooses, under_crosses
from headrace.service.spec.job import LoadedJob, job_of
from headrace.service.spec.side_config import RESULT, config_beside
from headrace.service.spec.side_groups import beside, with_own_groups
from headrace.service.spec.tuned_settings import AS_IT_IS, Keys, settings_to_try, under_choice, with_keys
from headrace.trainer.job_status import read
from headrace.trainer.tuning_config import TriedSetting, TuningChoice
from headrace.trainer.tuning_status import PROGRESS, ChosenCrossesStatus, TriedStatus, TuningStatus

SUFFIX = "-tuning"
"""Of the Kafka groups of the trials."""
SAMPLES = "samples"
MAX_KEPT_BYTES = 8 << 30
"""Most bytes of samples that the trials of a job with a join keep in files; others keep theirs in memory."""
LEFT_OUT = ("exports", "predict", "evaluator", "guards", "cluster", "tuning")
"""Sections of the job that trials lack."""
OPEN_S = 60.0
LOOK_S = 0.1
"""Time between two looks at the process."""
LEAST_SHARE, LEAST_EVENTS = 4, 5_000
"""Crosses are chosen if the stream has `crosses.events` divided by this, or so many."""


class TuningStopped(HeadraceError):
    """The job was asked to stop before it had chosen its settings."""

    def __init__(self) -> None:
        super().__init__("stopped while it tried settings; the next start tries them again")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Settings to try, and the events to try them on."""

    job: LoadedJob
    settings: Mapping[str, Keys]
    """Values by the path of their key, by name; the first is the job as it is."""
    events: int
    newest: bool = False
    """The last events of the stream, in place of the first."""

    @classmethod
    def of(cls, job: LoadedJob, *, newest: bool = False) -> "Tuning":
        """As the section `tuning` of a job says."""
        settings = dict(list(settings_to_try(job).items())[: job.spec.tuning.settings])
        return cls(job=job, settings=settings, events=job.spec.tuning.events, newest=newest)

    def tried(
        self,
        folder: Path,
        private: Path,
        starter: Starter,
        stop_requested_within: StopRequestedWithin,
        show: Callable[[TuningStatus], None],
    ) -> list[TriedStatus]:
        """The settings, the chosen one first. `folder`: for files, new; `private`: for the configuration, which
        has the secrets. Raises SpecError where none can be run, TuningStopped, CannotStart.
        """

        def look() -> None:
            show(_progress(folder))
            if stop_requested_within(LOOK_S):
                raise TuningStopped

        run_beside("headrace.trainer.train.tuning", self.config, folder, private, self.job, starter, look)
        return _progress(folder).tried

    def config(self, folder: Path) -> dict[str, Any]:
        """A TrialsConfig."""
        job = self._quiet(folder)
        where = {"folder": str(job.folder), "store": str(folder)}
        worker = {"job": job.raw, "secrets": job.secrets, **where, "rank": 0, "world": 1, "cores": os.cpu_count() or 1}
        settings = {name: dict(keys) for name, keys in self.settings.items()}
        return {"trainer": worker, "settings": settings, "events": self.events, "newest": self.newest}

    def _quiet(self, folder: Path) -> LoadedJob:
        """The job as trials have it. Raises SpecError."""
        job = self.job
        raw = {key: value for key, value in job.whole().items() if key not in LEFT_OUT}
        raw |= {"store": {"path": str(folder)}, "cluster": {"trainers": 1, "shards": 0}}
        own: dict[str, Any] = {
            "train.tune": "off",
            "train.matmul": "mkl",  # the measured ones depend on a clock
            "metrics.halves": False,
            "metrics.slices": [],
        }
        if job.spec.join is not None:
            own |= {"passes.keep_in": str(folder / SAMPLES), "passes.keep": f"{MAX_KEPT_BYTES >> 20}MiB"}
        return job_of(with_keys(with_own_groups(raw, job.spec, SUFFIX), own), job.folder)


def _progress(folder: Path) -> TuningStatus:
    try:
        return read(TuningStatus, documents.read_object(folder / PROGRESS))
    except FileNotFoundError:
        return TuningStatus(name="starts")


def tune_first(
    job: LoadedJob, plans: GenerationPlans, runner: JobRunner, launcher: Launcher, private: Path, on_line: OnLine
) -> None:
    """Before the first pass of `runner`, let the job choose crosses and settings if it is new and may choose any.

    The choice is shown from then on. The store is held. `private`: the run folder.
    """
    shutil.rmtree(job.store / TUNING, ignore_errors=True)  # a killed run has left it
    runner.tuning = _shown(job)
    if not _is_new(job) or not (_chooses_crosses(job) or _tunes(job)):
        return
    starter = launcher.starter if isinstance(launcher, ProcessLauncher) else Spawner()

    def first(stop_requested_within: StopRequestedWithin) -> RunOutcome | None:
        tuned = job

        def show(status: TuningStatus) -> None:
            runner.tuning = replace(status, crosses=_shown_crosses(tuned))

        chooser = _Chooser(private, starter, stop_requested_within, show, on_line)
        try:
            tuned = chooser.crossed(job)
            tuned = chooser.tuned(tuned)
        except TuningStopped as error:
            return RunOutcome(ExitCode.DRAINED, str(error))
        finally:
            runner.tuning = None
            shutil.rmtree(job.store / TUNING, ignore_errors=True)
        runner.tuning = _shown(tuned)
        plans.begin_with(tuned)
        return None

    runner.first = first


def _shown(job: LoadedJob) -> TuningStatus | None:
    """The choices of a job, for its status."""
    chosen, crosses = job.spec.tuning.chosen, _shown_crosses(job)
    if chosen is None and crosses is None:
        return None
    tried = () if chosen is None else chosen.tried
    return TuningStatus(tried=[read(TriedStatus, each.model_dump()) for each in tried], crosses=crosses)


def _shown_crosses(job: LoadedJob) -> ChosenCrossesStatus | None:
    choice = job.spec.crosses.chosen
    if choice is None or job.spec.crosses.choose == "off":
        return None
    return read(ChosenCrossesStatus, choice.model_dump(mode="json"))


@dataclass(frozen=True, slots=True)
class _Chooser:
    """Lets a new job choose, and writes each choice: until it is written, the next run begins anew.

    Both methods raise TuningStopped."""

    private: Path
    starter: Starter
    stop_requested_within: StopRequestedWithin
    show: Callable[[TuningStatus], None]
    on_line: OnLine

    def crossed(self, job: LoadedJob) -> LoadedJob:
        """The job with the crosses that it chooses, or without."""
        least = min(LEAST_EVENTS, job.spec.crosses.events // LEAST_SHARE)
        if not _chooses_crosses(job) or not _has_backlog(job, least, self.on_line, "no crosses are chosen"):
            return job

        def config(folder: Path) -> Mapping[str, Any]:
            return config_beside(beside(job, SUFFIX), folder)

        def look() -> None:
            self.show(TuningStatus(name="the job chooses crosses of its slots"))
            if self.stop_requested_within(LOOK_S):
                raise TuningStopped

        begin_s, folder = time.monotonic(), job.store / TUNING
        try:
            run_beside("headrace.service.planning.cross_choice", config, folder, self.private, job, self.starter, look)
        except SpecError as error:
            self.on_line(LAUNCHER, f"no crosses are chosen: {error}")
            return job
        choice = documents.read_object(folder / RESULT)
        _write_choice(job.store / CROSSED, choice)
        words = crosses_text(read(ChosenCrossesStatus, choice))
        self.on_line(LAUNCHER, f"crosses: {words} in {time.monotonic() - begin_s:.1f} s")
        return under_crosses(job, choice)

    def tuned(self, job: LoadedJob) -> LoadedJob:
        """The job under the settings that it chooses."""
        if not _tunes(job):
            return job
        tuning = Tuning.of(job)
        if len(tuning.settings) < 2 or not _has_backlog(job, tuning.events, self.on_line):
            return job
        events = f"the first {tuning.events:,} events each in turn"
        self.on_line(LAUNCHER, f"tuning: {len(tuning.settings)} settings learn {events}")
        begin_s, folder = time.monotonic(), job.store / TUNING
        try:
            tried = tuning.tried(folder, self.private, self.starter, self.stop_requested_within, self.show)
        except SpecError as error:
            self.on_line(LAUNCHER, f"not tuned: {error}")
            return job
        choice = choice_of(tried).model_dump(mode="json")
        _write_choice(job.store / TUNED, choice)
        self.on_line(LAUNCHER, f"tuned in {time.monotonic() - begin_s:.1f} s: {words_of(tried)}")
        return under_choice(job, choice)


def _write_choice(path: Path, choice: Mapping[str, Any]) -> None:
    with writing(path):
        write_whole(REAL, path, json.dumps(choice).encode())


def choice_of(tried: Sequence[TriedStatus]) -> TuningChoice:
    """The choice as a fact of the job."""
    return TuningChoice(tried=tuple(TriedSetting(**plain(each)) for each in tried))


def _is_new(job: LoadedJob) -> bool:
    return job.spec.train.learn and job.ends_after is None and newest_spec(job.store) is None


def _chooses_crosses(job: LoadedJob) -> bool:
    return job.spec.crosses.chosen is None and chooses(job)


def _tunes(job: LoadedJob) -> bool:
    return job.spec.train.tune == "auto" and job.spec.tuning.chosen is None


def _has_backlog(job: LoadedJob, events: int, on_line: OnLine, otherwise: str = "not tuned") -> bool:
    """Whether the stream has so many events now, and this machine can learn them. `otherwise`: told if not."""
    spec = job.spec
    try:
        require("torch", "training")
        deadline = Deadline.after(OPEN_S)
        opening = Opening(folder=job.folder, job=spec.name + SUFFIX, seed=spec.seed, deadline=deadline)
        source = open_sources(beside(job, SUFFIX).spec.sources, opening)
        try:
            waiting = sum(each.end - max(each.begin, each.start) for each in source.partitions(deadline))
        finally:
            source.close()
    except (HeadraceError, OSError) as error:
        on_line(LAUNCHER, f"{otherwise}, for the stream cannot be learnt on this machine: {error}")
        return False
    if waiting < events and not source.bounded:
        on_line(
            LAUNCHER,
            f"{otherwise}: the stream has {waiting:,} of {events:,} events yet; `headrace tune` and `headrace suggest` "
            "compare later",
        )
    return waiting >= events


def words_of(tried: Sequence[TriedStatus]) -> str:
    """The choice in one line."""
    best = tried[0]
    if not best.keys:
        return f"the job stays {AS_IT_IS}: none of {len(tried)} settings is clearly better"
    keys = ", ".join(f"{key} = {value}" for key, value in best.keys.items())
    return f"{best.name!r} is chosen of {len(tried)} settings: {keys}"
