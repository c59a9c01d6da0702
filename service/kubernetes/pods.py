"""Pods of a job: containers without rights, their volumes, probes and resources. Pure: each function makes a part.

service.kubernetes.workloads makes the objects that own pods.
"""

from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from headrace.service.kubernetes.config import ManifestSettings
from headrace.service.kubernetes.pod_settings import STORE_VOLUME
from headrace.service.spec.config import WorkerResources

Part = dict[str, Any]

USER = 10001
"""User and group of the image."""
JOB_FOLDER = "/srv/job"
IDENTITY_FOLDER = "/srv/identity"
SECRET_FOLDER = "/srv/secret"
TOKEN_FILE = f"{IDENTITY_FOLDER}/join_token"
EPHEMERAL_PORTS = 32768, 60999
"""Ports that workers listen at: a system takes them of this range, and the pods of a job fix it."""
ENDED_FOR_GOOD = [1, 2, 3, 70]
"""Exit codes after which another try would end the same way; see headrace.lifecycle.ExitCode."""
_UNITS = {30: "Gi", 20: "Mi", 10: "Ki"}
SMALL = WorkerResources(cores=0.1, memory=64 << 20)
"""Resources of a container that copies files."""


def pod_template(
    labels: Part,
    settings: ManifestSettings,
    *,
    group: str,
    containers: Sequence[Part],
    inits: Sequence[Part],
    volumes: Sequence[Part],
    grace_s: int,
    restart: str = "Never",
    annotations: Part | None = None,
) -> Part:
    """A template of pods without any right that they do not need. `group`: the PodGroup, where there is a queue."""
    own = settings.pods
    gang = {} if settings.queue is None else {"scheduling.k8s.io/group-name": group}
    noted = {**own.annotations, **(annotations or {}), **gang}
    metadata: Part = {"labels": {**own.labels, **labels}, **({"annotations": noted} if noted else {})}
    spec: Part = {
        "restartPolicy": restart,
        **({"serviceAccountName": own.service_account} if own.service_account else {}),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_s,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            **({"fsGroupChangePolicy": "OnRootMismatch"} if own.volumes else {}),
            "seccompProfile": {"type": "RuntimeDefault"},
            "sysctls": [{"name": "net.ipv4.ip_local_port_range", "value": "{} {}".format(*EPHEMERAL_PORTS)}],
        },
        **({"imagePullSecrets": [{"name": name} for name in own.image_pull_secrets]} if own.image_pull_secrets else {}),
        **own.placement(labels["app.kubernetes.io/component"]),
        **({"initContainers": [*inits]} if inits else {}),
        "containers": [*containers],
        "volumes": [*volumes],
    }
    if settings.queue is not None:
        spec = {"schedulerName": "volcano", **spec}
    return {"metadata": metadata, "spec": spec}


def container(
    name: str, settings: ManifestSettings, command: Sequence[str], needs: WorkerResources, mounts: Sequence[Part]
) -> Part:
    """A container without rights. Its requests are its limits: a job is as fast as the slowest of its workers."""
    return {
        "name": name,
        "image": settings.image,
        **({"imagePullPolicy": settings.pods.image_pull_policy} if settings.pods.image_pull_policy else {}),
        "command": [*command],
        "resources": {each: resources(needs, settings.pods.gpu_resource) for each in ("requests", "limits")},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "privileged": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": [*mounts],
    }


def scraped_at(port: int) -> Part:
    """Annotations by which a Prometheus that looks for pods finds one; an operator's PodMonitor does not need them.

    The figures have a label "job" of their own, so its configuration needs `honor_labels`.
    """
    return {"prometheus.io/scrape": "true", "prometheus.io/port": str(port), "prometheus.io/path": "/metrics"}


def worker_environment(settings: ManifestSettings) -> Part:
    """The environment of launcher and workers: the containers of a pod are one machine; secrets by reference."""
    pod = {"name": "HEADRACE_MACHINE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}}
    return {"env": [pod], "envFrom": [{"secretRef": {"name": settings.environment_secret, "optional": True}}]}


def probes(port: int, live: str = "/live", ready: str = "/ready") -> Part:
    """Probes by HTTP. A pod has five minutes to begin: kernels may be compiled and large images loaded meanwhile."""
    return {
        "startupProbe": {**_asked(live, port), "periodSeconds": 2, "failureThreshold": 150},
        "livenessProbe": {**_asked(live, port), "periodSeconds": 10, "failureThreshold": 6},
        "readinessProbe": {**_asked(ready, port), "periodSeconds": 5, "failureThreshold": 3},
    }


def _asked(path: str, port: int) -> Part:
    return {"httpGet": {"path": path, "port": port}, "timeoutSeconds": 5}


def resources(needs: WorkerResources, gpu: str) -> Part:
    """Cores, bytes and GPUs as Kubernetes writes them."""
    cores = f"{needs.cores:g}" if needs.cores == round(needs.cores) else f"{max(1, round(needs.cores * 1000))}m"
    found: Part = {"cpu": cores, "memory": bytes_text(needs.memory)}
    return {**found, gpu: str(needs.gpus)} if needs.gpus else found


def bytes_text(number: int) -> str:
    """Bytes as Kubernetes writes them."""
    fits = (f"{number >> shift}{unit}" for shift, unit in _UNITS.items() if number % (1 << shift) == 0)
    return next(fits, str(number))


def copy_of(secret_files: Sequence[str], folder: str, settings: ManifestSettings, mounts: Sequence[Part]) -> Part:
    """A container that copies files of a Secret before the others start, for their owner only.

    The files of a Secret are the group's, too, where a pod has an fsGroup; without one they are root's alone.
    """
    sources = [f"{SECRET_FOLDER}/{name}" for name in secret_files]
    command = ["install", "-D", "--mode=600", f"--target-directory={folder}", *sources]
    return container("identity", settings, command, SMALL, [mount("secret", SECRET_FOLDER, True), *mounts])


def token_copy(name: str, settings: ManifestSettings) -> Part:
    """`copy_of` one file with a token, to IDENTITY_FOLDER."""
    return copy_of([name], IDENTITY_FOLDER, settings, [mount("identity", IDENTITY_FOLDER)])


def mount(volume: str, at: str, read_only: bool = False) -> Part:
    """A volume at a path of a container."""
    return {"name": volume, "mountPath": at, **({"readOnly": True} if read_only else {})}


def file_mount(volume: str, path: str, folder: str) -> Part:
    """One file of a ConfigMap below a folder.

    Mounted as a folder, its files would be links through a folder whose name differs from pod to pod, and the folder of
    a job file is where all workers run.
    """
    return {**mount(volume, f"{folder}/{path}", True), "subPath": path}


def secret_volume(name: str, files: Sequence[str]) -> Part:
    """The named files of a Secret, and no other ones."""
    items = [{"key": each, "path": each} for each in files]
    return {"name": "secret", "secret": {"secretName": name, "defaultMode": 0o440, "items": items}}


def scratch(name: str, medium: str = "") -> Part:
    """An empty folder, which goes with the pod."""
    return {"name": name, "emptyDir": {"medium": medium} if medium else {}}


def scratch_mounts() -> list[Part]:
    """Folders that every process may write."""
    return [mount("tmp", "/tmp"), mount("kernels", "/var/cache/headrace")]


def scratch_volumes() -> list[Part]:
    """The volumes of `scratch_mounts`."""
    return [scratch("tmp"), scratch("kernels")]


def job_volumes(settings: ManifestSettings, job: str, store: Path) -> tuple[list[Part], list[Part]]:
    """The volumes of the file of pods, and their mounts; an empty folder for the store where no volume is for it."""
    own, at = settings.pods, PurePosixPath(store)
    found = [(name, volume, place) for name, volume, place in own.mounts(at)]
    volumes = [volume.in_pod(name, job) for name, volume, _ in found]
    mounts = [mount(name, str(place), volume.read_only) for name, volume, place in found]
    if own.on_volume(str(store), at):
        return volumes, mounts
    return [scratch(STORE_VOLUME), *volumes], [mount(STORE_VOLUME, str(store.parent)), *mounts]
