"""Checks of this machine for the start of a job, made by `spec check` and by a run before any worker starts.

Nothing is started, written or connected to. service.spec.references checks the spec itself.
"""

import logging
from dataclasses import dataclass

from headrace.dataset.pipe.command import check_pipe, old_name_hint
from headrace.dataset.spec.config import Opening
from headrace.dataset.spec.schema import Schema
from headrace.deadline import Deadline
from headrace.errors import SpecError
from headrace.service.cluster.store import check_free
from headrace.service.cluster.store_defaults import with_store_defaults
from headrace.service.jobs.spec_difference import check_carried
from headrace.service.spec.job import LoadedJob
from headrace.service.spec.launchers import check_launcher
from headrace.trainer.own_metrics import check_metric
from headrace.trainer.predict.prediction_plan import error_at, open_input
from headrace.trainer.rank0.logged_specs import replay_first
from headrace.trainer.user_classes import check_class

log = logging.getLogger(__name__)

LIST_S = 60.0
"""Longest time to list the files of a source."""


@dataclass(frozen=True, slots=True)
class JobCheck:
    """A job that could start on this machine."""

    job: str
    """Its name."""
    trainers: int
    shards: int
    """0: the shard lives in the one trainer."""
    store: str
    """The folder of its store."""
    missing_data: str | None
    """Which data is missing until a run can begin; None: none is."""


def checked(job: LoadedJob) -> JobCheck:
    """The facts of a job that could start. Raises SpecError as `check_job` does."""
    cluster, missing = job.spec.cluster, check_job(job)
    return JobCheck(job.spec.name, cluster.num_trainers, cluster.num_shards, str(job.store), missing)


def check_job(job: LoadedJob) -> str | None:
    """Raise SpecError where a run would be refused at its start; a note where its data is missing, else None.

    Without torch, a missing GPU and the tensors that [predict] names are not checked. Missing data is no error: it may
    still arrive.
    """
    job, missing = with_store_defaults(job), None
    if _check_start(job, fresh=False):
        replay_first(job.store, job.full, job.cluster.num_trainers)  # raises where the rows do not fit the changed spec
        check_carried(job)
    else:
        try:
            _check_files(job)
        except SpecError as error:
            missing = str(error)
    _check_prediction(job, tensors=False)
    check_launcher(job.spec.cluster)  # last: mistakes in the spec are found where nothing can be trained
    return missing


def check_run(job: LoadedJob, *, fresh: bool = False) -> None:
    """Raise SpecError before a run begins. The run itself checks its data, and most changes since the last run."""
    if _check_start(job, fresh=fresh):
        check_carried(job)
    _check_prediction(job, fresh=fresh)
    _check_evaluator(job)
    check_launcher(job.spec.cluster)


def _check_prediction(job: LoadedJob, *, fresh: bool = False, tensors: bool = True) -> None:
    if job.spec.predict is not None:
        from headrace.service.predict.after_training import check_before  # late: it brings all that predicts

        check_before(job, fresh=fresh, tensors=tensors)


def _check_evaluator(job: LoadedJob) -> None:
    """Raise SpecError where no file of its input is there. Brokers are not asked: an evaluator waits for them."""
    section = job.spec.evaluator
    if section is not None and section.input.paths is not None:
        try:
            open_input(section.input, job.spec, job.folder).close()
        except SpecError as error:
            raise error_at(error, f"evaluator.{error.path}") from None


def _check_start(job: LoadedJob, *, fresh: bool) -> bool:
    """True if the run continues one that the store holds."""
    check_pipe(job.spec.pipe, Schema.of(job.spec.slots), job.folder)
    if (hint := old_name_hint(job.spec.pipe, job.folder)) is not None:
        log.warning("%s", hint)
    if job.spec.model.class_path is not None:
        check_class(job.spec.model.class_path, job.folder)
    for number, path in enumerate(job.spec.metrics.own):
        check_metric(path, job.folder, f"metrics.own.{number}")
    for name, source in job.spec.sources.items():
        source.check(job.folder, f"sources.{name}")
    return check_free(job.store, job.spec.name, fresh=fresh)


def _check_files(job: LoadedJob) -> None:
    """For a new job without a mirror: one that continues knows its files, and they may be deleted by now."""
    spec = job.spec
    for source in spec.sources.values() if spec.store.mirror is None else ():
        source.check_data(Opening(folder=job.folder, job=spec.name, seed=spec.seed, deadline=Deadline.after(LIST_S)))
