"""Checks whether a job can run in pods: what it names must be reachable from there, and nothing secret is shown."""

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from pathlib import PurePosixPath

from headrace.address import is_wildcard, parse_address
from headrace.blob.store_address import is_object_store
from headrace.errors import SpecError
from headrace.secrets import references_of
from headrace.service.kubernetes.config import ManifestSettings
from headrace.service.kubernetes.pod_settings import STORE_VOLUME, PodSettings
from headrace.service.kubernetes.workloads import HEAD_PORTS
from headrace.service.spec.config import WorkerResources
from headrace.service.spec.job import LoadedJob
from headrace.service.spec.launchers import EXTERNAL

NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
"""Names of objects that leave room for what is appended to the job's."""
MAX_NAME = 63
"""Longest name of a Service."""
MAX_JOB = 61
"""Longest name of a Job of one pod, whose host is called so with "-0": at most 63."""
NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,511}")


def check_renderable(job: LoadedJob, settings: ManifestSettings) -> None:
    """Raise SpecError at the first key that does not work in pods, with what to do."""
    check_names(job.spec.name, settings)
    _check_cluster(job)
    _check_store(job, settings.pods)
    for key, why in _local_places(job, settings.pods):
        raise SpecError(why, key)
    check_containers(job)


def check_names(
    own_name: str, settings: ManifestSettings, more: Sequence[tuple[str, str]] = (), *, key: str = "name"
) -> None:
    """Raise SpecError for a name that Kubernetes does not take. `key`: that of `own_name`, of the job or service."""
    for at, name in ((key, own_name), ("--namespace", settings.namespace), *more):
        if name and not NAME.fullmatch(name):
            raise SpecError(f"{name!r} cannot be in names of Kubernetes: small letters, digits and '-', 40 at most", at)
    own = [("--identity-secret", settings.identity_secret), ("--environment-secret", settings.environment_secret)]
    for at, name in (*own, ("--queue", settings.queue or "")):
        if name and not NAMESPACE.fullmatch(name):
            raise SpecError(f"{name!r} is no name of Kubernetes: small letters, digits and '-', 63 at most", at)
    if (namespace := settings.metrics_from) is not None and not NAMESPACE.fullmatch(namespace):
        raise SpecError(f"{namespace!r} is not the name of a namespace", "--metrics-from")
    if not IMAGE.fullmatch(settings.image):
        raise SpecError(
            f"{settings.image!r:.100} is not an image, such as registry:5000/headrace@sha256:...", "--image"
        )


def check_containers(job: LoadedJob) -> None:
    """Raise SpecError for a secret that a ConfigMap would show, and for a container without a limit of memory."""
    _check_secrets(job)
    for role, needs in needed(job).items():
        if needs.memory == 0:
            raise SpecError(
                f"is not set: a container has a limit of memory; set it, such as {role}={{cores=2,memory='4GiB'}}",
                f"cluster.resources.{role}.memory",
            )


def needed(job: LoadedJob) -> dict[str, WorkerResources]:
    """The resources of each role that has processes."""
    given, cluster = job.spec.cluster.resources, job.cluster
    counts = {"trainer": cluster.trainers, "shard": cluster.num_shards, "reader": cluster.readers}
    return {role: getattr(given, role) for role, number in counts.items() if number}


def _check_cluster(job: LoadedJob) -> None:
    cluster = job.spec.cluster
    if cluster.launcher != EXTERNAL:
        raise SpecError(f'is {cluster.launcher!r}: pods join the launcher; set "external"', "cluster.launcher")
    host, port = parse_address(cluster.listen)
    if not is_wildcard(host) or port == 0:
        raise SpecError(
            f'is {cluster.listen!r}: nobody knows the address of a pod before; set "0.0.0.0:7070"', "cluster.listen"
        )
    if port in HEAD_PORTS:
        raise SpecError(f"is {cluster.listen!r}, and the head uses that port itself; set another one", "cluster.listen")


def _check_store(job: LoadedJob, pods: PodSettings) -> None:
    store, path = job.spec.store, PurePosixPath(job.spec.store.path)
    if not path.is_absolute() or len(path.parts) < 3 or ".." in path.parts:
        raise SpecError(
            f"is {store.path!r}: set an absolute path whose folder becomes a volume, such as /srv/headrace/store",
            "store.path",
        )
    if STORE_VOLUME in pods.volumes and not pods.on_volume(store.path, path):
        raise SpecError(f"store.path is {store.path!r}, which is not below it; leave out at", "volumes.store.at")
    if store.parts != "object" and not pods.on_volume(store.path, path, writes=True):
        raise SpecError(
            f'is {store.parts!r}: disks of pods go with them; set "object", and a mirror, or give the volume '
            f'"{STORE_VOLUME}" in the file of --pods',
            "store.parts",
        )
    alone = job.cluster.num_workers == 1
    if (found := pods.volume_of(path, path)) is not None:
        name, volume = found
        if not volume.writable:
            raise SpecError(
                f"cannot be written, and store.path is {store.path!r}, on it: name another store.path, or give the "
                f'volume "{STORE_VOLUME}", which each pod can write',
                f"volumes.{name}",
            )
        if store.parts == "object" and volume.stays and not alone:
            raise SpecError(
                'would be one store of several pods, and with store.parts = "object" each has its own; set "shared", '
                "or remove the volume",
                f"volumes.{name}",
            )
    for name, volume, _ in pods.mounts(path):
        if volume.create is not None and volume.create.access == "ReadWriteOnce" and not alone:
            raise SpecError(
                'is "ReadWriteOnce", which pods of one node alone can mount; set "ReadWriteMany"',
                f"volumes.{name}.create.access",
            )


def _check_secrets(job: LoadedJob) -> None:
    for key in job.secrets:
        raise SpecError('is written in the job file, which a ConfigMap shows to many; use { env = "NAME" }', key)
    for key, kind in references_of(job.raw):
        if kind != "env":
            raise SpecError('names a file, which a pod does not have; use { env = "NAME" }', key)


def source_places(job: LoadedJob, pods: PodSettings, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Keys of the named sources that name files on no volume, and what to do."""
    store = PurePosixPath(job.spec.store.path)
    for name in names:
        source = job.spec.sources[name]
        for key, words in source.not_in_pods():
            named = reduce(lambda found, part: found[part], key.split("."), source.model_dump(mode="json"))
            if not all(pods.on_volume(str(each), store) for each in ([named] if isinstance(named, str) else named)):
                yield f"sources.{name}.{key}", words


def _local_places(job: LoadedJob, pods: PodSettings) -> Iterator[tuple[str, str]]:
    """Keys that name something on one machine's disk and on no volume, and what to do."""
    store = PurePosixPath(job.spec.store.path)
    yield from source_places(job, pods, job.spec.sources)
    for name, export in job.spec.exports.items():
        at = str(store) if export.path is None else export.path
        if not is_object_store(at) and not pods.on_volume(at, store, writes=True):
            yield (
                f"exports.{name}.path",
                "is a folder of a pod, which goes with it; export to an object store, or to a volume of --pods",
            )
    if (predict := job.spec.predict) is not None:
        if predict.on != "cluster":
            yield "predict.on", 'is "here": the pod of the head has no room to predict; set "cluster"'
        if not is_object_store(predict.output):
            yield "predict.output", "is a folder of a pod, which goes with it; predict to an object store"
        if predict.input.paths is not None and predict.input.root is None:
            yield "predict.input.paths", "are files that pods do not have; set predict.input.root, or read Kafka"
    if job.spec.evaluator is not None:
        yield "evaluator", "does not run in pods; run `headrace evaluate` from the object store"
