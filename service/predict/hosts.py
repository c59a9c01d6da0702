"""The machines of a prediction: this one, or those of the job's launcher, on which its workers train, too.

service.cluster.worker_plan plans the processes for them, service.predict.worker_group runs these.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.blob.store_address import parse
from headrace.codec import plain
from headrace.dataset.spec.schema import Schema
from headrace.errors import HeadraceError, SpecError
from headrace.identity.authority import open_authority
from headrace.lifecycle import ExitCode
from headrace.pserver.config import check_holds_rows
from headrace.service.cluster.child import Spawner
from headrace.service.cluster.local import ProcessLauncher
from headrace.service.cluster.runtime import Launcher
from headrace.service.cluster.store import IDENTITY, held_store
from headrace.service.cluster.worker_plan import PredictionHosts
from headrace.service.spec.config import ClusterSection, TrainerRange
from headrace.service.spec.job import LoadedJob
from headrace.service.spec.launchers import check_launcher, launcher_of
from headrace.shared_folder import SharedFolder
from headrace.trainer.checkpoint.commits import read_commit
from headrace.trainer.predict.config import PredictionRequest
from headrace.trainer.predict.output_files import PredictionOutput
from headrace.trainer.predict.output_place import FolderPlace
from headrace.trainer.spec.changes import MOST_TRAINERS


@dataclass(frozen=True, slots=True)
class OpenLauncher:
    """A launcher on which no worker runs."""

    launcher: Launcher
    generation: int = 1
    """The first that it has not run yet."""


def elastic_range(request: PredictionRequest, cluster: ClusterSection) -> TrainerRange | None:
    """The bounds of the number of trainers that predict, where as many do as there are workers for."""
    return cluster.elastic if request.on == "cluster" and "trainers" not in request.model_fields_set else None


def with_numbers_of(request: PredictionRequest, job: LoadedJob) -> PredictionRequest:
    """The request with the numbers of processes of a job, where they are not asked for, on its launcher: of an elastic
    number of trainers, the most.

    Raises SpecError where those that are asked for do not fit them.
    """
    if request.on == "here":
        return request
    cluster, trainers = job.cluster, request.trainers
    if (elastic := elastic_range(request, job.spec.cluster)) is not None:
        trainers = job.resized.get(MOST_TRAINERS, elastic.max)
    elif "trainers" not in request.model_fields_set:
        trainers = cluster.num_trainers
    shards = request.shards if request.shards is not None else cluster.num_shards or int(trainers > 1)
    try:
        check_holds_rows(shards, trainers)
    except ValueError as error:
        raise SpecError(str(error), "shards") from None
    return request.model_copy(update={"trainers": trainers, "shards": shards})


def store_is_shared(request: PredictionRequest, job: LoadedJob) -> bool:
    """Whether every machine of a prediction reads the commits of the store in one folder."""
    return request.on == "here" or launcher_of(job.spec.cluster).same_machine or job.spec.store.parts == "shared"


def check_statistics(request: PredictionRequest, job: LoadedJob) -> None:
    """Raise SpecError for slots with statistics of rows where only shards have the rows."""
    if store_is_shared(request, job):
        return
    if slots := [slot.name for slot in Schema.of(job.spec.slots).statistics]:
        raise SpecError(
            f"slot {slots[0]!r} holds statistics of rows, which each predictor reads from files of the commit: predict "
            'with on = "here", or train with store.parts = "shared"',
            "on",
        )


@contextmanager
def launched(job: LoadedJob, request: PredictionRequest, given: OpenLauncher | None) -> Iterator[OpenLauncher]:
    """The launcher of a prediction: `given`, that of a run; or one of its own, whose workers end with the context.

    Raises SpecError where the job's run holds the store, and Unavailable where its address is taken.
    """
    if given is not None:
        yield given
        return
    if request.on == "here":
        with ProcessLauncher(Spawner()) as local:
            yield OpenLauncher(local)
        return
    check_launcher(job.spec.cluster)
    with held_store(job.store, job.spec.name), launcher_of(job.spec.cluster).of_job(job) as launcher:
        code, reason = int(ExitCode.BUG), "the prediction failed"
        try:
            yield OpenLauncher(launcher)
            code, reason = int(ExitCode.DRAINED), "the prediction is complete"
        except HeadraceError as error:
            code, reason = error.exit_code, str(error)
            raise
        finally:
            launcher.end(code, reason)


@contextmanager
def hosts_of(
    job: LoadedJob, request: PredictionRequest, output: PredictionOutput, commit: Path, generation: int
) -> Iterator[PredictionHosts]:
    """The machines of a prediction that reads `commit`, while the context lasts. Raises Unwritable."""
    cluster = job.spec.cluster
    if request.on == "here" or launcher_of(cluster).same_machine:
        yield PredictionHosts(generation=generation)
        return
    shared = store_is_shared(request, job)
    with ExitStack() as held:
        in_folder = isinstance(output.place, FolderPlace)
        yield PredictionHosts(
            generation=generation,
            same_machine=False,
            authority=open_authority(job.store / IDENTITY, job.spec.name) if cluster.leaves_machine else None,
            sees=held.enter_context(SharedFolder.proved(job.store)) if shared else None,
            sees_output=held.enter_context(SharedFolder.proved(output.work)) if in_folder else None,
            uploaded=None if shared else _uploaded(job, commit),
        )


def _uploaded(job: LoadedJob, folder: Path) -> dict[str, Any]:
    """A commit as other machines are told of it: its files are where the job file says."""
    assert job.spec.store.mirror is not None, 'store.parts = "object" needs it'
    commit = read_commit(folder)
    address = parse(job.spec.store.mirror, job.folder).text
    manifest: dict[str, Any] = plain(commit.manifest)
    return {"commit": commit.name, "manifest": {**manifest, "objects_at": address}}
