"""Checks whether a job can run in pods: what it names must be reachable from there, and nothing secret is shown."""

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from headrace.address import is_wildcard, parse_address
from headrace.errors import SpecError
from headrace.secrets import references_of
from headrace.service.kubernetes.config import ManifestSettings
from headrace.service.kubernetes.workloads import HEAD_PORTS
from headrace.service.spec.config import WorkerResources
from headrace.service.spec.job import LoadedJob
from headrace.service.spec.launchers import EXTERNAL
from headrace.trainer.spec.class_rules import has_divided_classes

NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
"""Names of objects that leave room for what is appended to the job's."""
NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,511}")


def check_renderable(job: LoadedJob, settings: ManifestSettings) -> None:
    """Raise SpecError at the first key that does not work in pods, with what to do."""
    named = [("name", job.spec.name), ("--namespace", settings.namespace)]
    named += [("--identity-secret", settings.identity_secret), ("--environment-secret", settings.environment_secret)]
    named += [("--queue", settings.queue or "")]
    for key, name in named:
        if name and not NAME.fullmatch(name):
            raise SpecError(
                f"{name!r} cannot be in names of Kubernetes: small letters, digits and '-', 40 at most", key
            )
    if (namespace := settings.metrics_from) is not None and not NAMESPACE.fullmatch(namespace):
        raise SpecError(f"{namespace!r} is not the name of a namespace", "--metrics-from")
    if not IMAGE.fullmatch(settings.image):
        raise SpecError(
            f"{settings.image!r:.100} is not an image, such as registry:5000/headrace@sha256:...", "--image"
        )
    _check_cluster(job)
    _check_store(job)
    _check_secrets(job)
    if settings.replicas:
        _check_feed(job)
    for key, why in _local_places(job):
        raise SpecError(why, key)
    for role, needs in needed(job).items():
        if needs.memory == 0:
            raise SpecError(
                f"is not set: a container has a limit of memory; set it, such as {role}={{cores=2,memory='4GiB'}}",
                f"cluster.resources.{role}.memory",
            )


def needed(job: LoadedJob) -> dict[str, WorkerResources]:
    """The resources of each role that has processes."""
    given, cluster = job.spec.cluster.resources, job.cluster
    return {"trainer": given.trainer, **({"shard": given.shard} if cluster.num_shards else {})}


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


def _check_store(job: LoadedJob) -> None:
    store, path = job.spec.store, PurePosixPath(job.spec.store.path)
    if store.parts != "object":
        raise SpecError(f'is {store.parts!r}: disks of pods go with them; set "object", and a mirror', "store.parts")
    if not path.is_absolute() or len(path.parts) < 3 or ".." in path.parts:
        raise SpecError(
            f"is {store.path!r}: set an absolute path whose folder becomes a volume, such as /srv/headrace/store",
            "store.path",
        )


def _check_feed(job: LoadedJob) -> None:
    """Replicas in pods follow the live feed, which rank 0 alone publishes."""
    if has_divided_classes(job.spec):
        mode = job.spec.model.settings["mode"]
        raise SpecError(
            f"is {mode!r}: items are divided over trainers, so the job has no live feed, and replicas in pods follow "
            'that alone. Leave out --replicas and let `headrace replica` follow the job\'s exports, or set "full"',
            "model.settings.mode",
        )


def _check_secrets(job: LoadedJob) -> None:
    for key in job.secrets:
        raise SpecError('is written in the job file, which a ConfigMap shows to many; use { env = "NAME" }', key)
    for key, kind in references_of(job.raw):
        if kind != "env":
            raise SpecError('names a file, which a pod does not have; use { env = "NAME" }', key)


def _local_places(job: LoadedJob) -> Iterator[tuple[str, str]]:
    """Keys that name something on one machine's disk, and what to do."""
    for name, source in job.spec.sources.items():
        for key, words in source.not_in_pods():
            yield f"sources.{name}.{key}", words
    for name, export in job.spec.exports.items():
        if export.path is None or not export.path.startswith("s3://"):
            yield f"exports.{name}.path", "is a folder of a pod, which goes with it; export to an object store"
    if job.spec.predict is not None:
        yield "predict", "does not run in pods; run `headrace predict` from the object store"
