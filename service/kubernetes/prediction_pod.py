"""A prediction of a job in one pod: a Job that runs `headrace predict`, and a policy by which nobody reaches it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from headrace.blob.store_address import is_object_store
from headrace.dataset.sources.kafka import KafkaSource
from headrace.errors import SpecError
from headrace.service.kubernetes import pods
from headrace.service.kubernetes.job_files import JOB_FILE
from headrace.service.kubernetes.network import policy_of
from headrace.service.kubernetes.pods import Part
from headrace.service.kubernetes.requirements import source_places
from headrace.service.kubernetes.workloads import JobManifests
from headrace.service.spec.config import WorkerResources

GRACE_S = 60
"""Longest time to end: finished parts of the output are kept, others are made again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionRun:
    """The prediction of a pod."""

    name: str
    """Name of the prediction, with which the names of its objects end."""
    words: Sequence[str]
    """Options of `headrace predict`."""
    output: str
    inputs: Sequence[str] = ()
    """Files of events; none for a topic of Kafka."""
    root: str | None = None
    """Where they begin, in an object store."""
    version: str
    """A version of the job's store, or the address of an export."""
    trainers: int = 1
    shards: int = 0
    on: str = "here"

    def needs(self, made: JobManifests) -> WorkerResources:
        """The sum over its processes; they hold the rows of all shards."""
        of, cluster = made.job.spec.cluster.resources, made.job.cluster
        return WorkerResources(
            cores=self.trainers * of.trainer.cores + self.shards * of.shard.cores,
            memory=self.trainers * of.trainer.memory + cluster.num_shards * of.shard.memory,
            gpus=self.trainers * of.trainer.gpus,
        )


def check_prediction(made: JobManifests, run: PredictionRun) -> None:
    """Raise SpecError for a prediction whose files a pod would not have, with what to do."""
    store, own = PurePosixPath(made.job.store), made.settings.pods
    if run.on != "here":
        raise SpecError(f"is {run.on!r}, and no agent joins this pod: it predicts alone; leave --on out", "--on")
    if not is_object_store(run.output) and not own.on_volume(run.output, store, writes=True):
        raise SpecError(
            f"{run.output} goes with the pod: name a folder on a volume of --pods, or an object store", "--output"
        )
    for each in run.inputs if run.root is None else ():
        if not own.on_volume(each, store):
            raise SpecError(
                f"{each} is not in the pod: name files on a volume of --pods, an object store as --root, or a --topic",
                "--input",
            )
    if not run.inputs:
        of_kafka = [name for name, source in made.job.spec.sources.items() if isinstance(source, KafkaSource)]
        for key, words in source_places(made.job, own, of_kafka):
            raise SpecError(words, key)
    if not is_object_store(run.version) and not own.on_volume(str(store), store):
        raise SpecError(
            f"{run.version!r} is read in the store, which is not in the pod: give the store's volume in --pods, or "
            "an export in an object store as --export",
            "--version",
        )


def prediction_objects(made: JobManifests, run: PredictionRun) -> Iterator[Part]:
    """All objects, in the order in which they are applied."""
    name, labels = f"{made.name}-{run.name}", {**made.labels("prediction"), "headrace/prediction": run.name}
    yield made.files_map(f"{name}-job")
    yield policy_of(made, name, {"matchLabels": labels}, [])
    volumes, of_job = pods.job_volumes(made.settings, made.name, made.job.store)
    mounts = [*pods.scratch_mounts(), *of_job, *made.job_mounts()]
    command = ["headrace", "predict", f"{pods.JOB_FOLDER}/{JOB_FILE}", *made.set_words(), *run.words]
    container = pods.container("prediction", made.settings, command, run.needs(made), mounts)
    template = pods.pod_template(
        labels,
        replace(made.settings, queue=None),  # not of the gang
        group=name,
        inits=[],
        containers=[{**container, **pods.worker_environment(made.settings)}],
        volumes=[*pods.scratch_volumes(), *volumes, made.job_volume(f"{name}-job")],
        grace_s=GRACE_S,
    )
    yield made.job_of(name, 1, template, "prediction", backoff=6)
