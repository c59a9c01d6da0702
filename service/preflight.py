"""What a job's start needs of this machine: looked at by `spec check`, and by a run before any worker starts.

Nothing is started, written or connected to. What the spec says in itself is service.checks' matter.
"""

from dataset.config import FilesSource, KafkaSource
from dataset.pipe.command import prepare_command
from dataset.schema import Schema
from dataset.sources import open_source
from millrace.deadline import Deadline
from millrace.errors import SpecError
from service.begun import as_begun
from service.predicting.after import check_before
from service.spec import LoadedJob
from service.store import check_free
from trainer.models.finding import check_class
from trainer.recovery import replay_first

LIST_S = 60.0
"""How long listing the files of a source may take."""


def check_job(job: LoadedJob) -> str | None:
    """Raise SpecError where a run of the job would be refused at its start, as far as can be told without torch.

    That leaves a GPU that is not there, and tensors of the model that [predict] names. Data may still come: where it
    is missing, that is told, not raised.
    """
    job, missing = as_begun(job), None
    if _check_start(job, fresh=False):
        replay_first(job.store, job.full)  # raises where rows do not survive what has changed
    else:
        try:
            _check_files(job)
        except SpecError as error:
            missing = str(error)
    check_before(job, tensors=False)
    return missing


def check_run(job: LoadedJob, *, fresh: bool = False) -> None:
    """Raise SpecError before a run begins. Its data, and what has changed since the last run, are seen by the run."""
    _check_start(job, fresh=fresh)
    check_before(job, fresh=fresh)


def _check_start(job: LoadedJob, *, fresh: bool) -> bool:
    """Whether the run goes on with what the store holds."""
    prepare_command(job.spec.pipe, Schema.of(job.spec.slots), job.folder)
    if job.spec.model.class_path is not None:
        check_class(job.spec.model.class_path, job.folder)
    ((name, source),) = job.spec.sources.items()
    if isinstance(source, KafkaSource):
        from dataset.kafka_client import consumer_options  # it loads kafka-python

        consumer_options(source.options, job.folder, f"sources.{name}.options")
    return check_free(job.store, job.spec.name, fresh=fresh)


def _check_files(job: LoadedJob) -> None:
    """Of a job that begins, not from a mirror: one that goes on knows its files, and they may be gone."""
    ((_, source),) = job.spec.sources.items()
    if isinstance(source, FilesSource) and not source.follow and job.spec.store.mirror is None:
        spec, deadline = job.spec, Deadline.after(LIST_S)
        open_source(source, folder=job.folder, job=spec.name, seed=spec.seed, deadline=deadline).close()
