"""The file of the pods of a job: volumes, nodes, and what else is not in its job file.

Keys of the file are those of Headrace. Values that Kubernetes defines (tolerations, affinity, volume sources) are
written as in a pod and passed through: here their shape is checked, and the API server checks the rest.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, StringConstraints, model_validator

from headrace.config import Count, Duration, PositiveCount, PositiveSize, Section, load_toml, validate
from headrace.errors import SpecError

MAX_FILE_BYTES = 1 << 20
"""Longest file of pods."""
STORE_VOLUME = "store"
"""The volume at the folder of `store.path`."""
SERVICE_VOLUMES = "service-file", "service-tls", "service-tls-secret"
"""Names of the volumes that only the pod of a service has."""
TAKEN = "tmp", "kernels", "job", "identity", "secret", "requests", *SERVICE_VOLUMES
"""Names of volumes that every pod has, or may have."""
TAKEN_FOLDERS = "/tmp", "/var/cache/headrace", "/srv/job", "/srv/identity", "/srv/secret", "/srv/replica"
"""Their folders."""

ObjectName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")]
VolumeName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?$")]
LabelKey = Annotated[
    str, StringConstraints(pattern=r"^([a-z0-9][-a-z0-9.]{0,252}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$")
]
LabelValue = Annotated[str, StringConstraints(pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$")]
Passed = dict[str, Any]
"""Passed through as it is."""


class Toleration(Section):
    """A taint that a pod tolerates, as Kubernetes writes it."""

    key: str | None = None
    """Key of the taint; unset with `operator = "Exists"`: every taint."""
    operator: Literal["Exists", "Equal"] | None = None
    """Unset: "Equal"."""
    value: str | None = None
    """Value of the taint."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Unset: all effects."""
    tolerationSeconds: Count | None = None
    """With "NoExecute": how long the pod stays."""

    @model_validator(mode="after")
    def _matches(self) -> Self:
        if self.key is None and self.operator != "Exists":
            raise ValueError('without key, operator must be "Exists", which tolerates every taint')
        if self.operator == "Exists" and self.value is not None:
            raise ValueError('operator "Exists" takes no value')
        return self


class NodeTerms(Section):
    """Terms of nodes, one of which must match."""

    nodeSelectorTerms: tuple[Passed, ...] = Field(min_length=1)
    """Terms with matchExpressions or matchFields."""


class PreferredNodes(Section):
    """Nodes that are preferred."""

    weight: int = Field(ge=1, le=100)
    """Weight beside the others."""
    preference: Passed
    """A term with matchExpressions or matchFields."""


class PodTerm(Section):
    """Pods beside which a pod may run, or may not. Further keys are passed through."""

    model_config = ConfigDict(extra="allow")
    topologyKey: str = Field(min_length=1)
    """Label of nodes: "beside" means nodes with one value of it, such as "kubernetes.io/hostname"."""
    labelSelector: Passed | None = None
    """Labels of those pods."""


class PreferredPods(Section):
    """Pods beside which a pod preferably runs, or does not."""

    weight: int = Field(ge=1, le=100)
    """Weight beside the others."""
    podAffinityTerm: PodTerm
    """Those pods."""


class NodeAffinity(Section):
    """Nodes of a pod."""

    requiredDuringSchedulingIgnoredDuringExecution: NodeTerms | None = None
    """Nodes that it must have."""
    preferredDuringSchedulingIgnoredDuringExecution: tuple[PreferredNodes, ...] = ()
    """Nodes that it prefers."""


class PodAffinity(Section):
    """Pods beside which a pod runs, or does not."""

    requiredDuringSchedulingIgnoredDuringExecution: tuple[PodTerm, ...] = ()
    """It must."""
    preferredDuringSchedulingIgnoredDuringExecution: tuple[PreferredPods, ...] = ()
    """It preferably does."""


class Affinity(Section):
    """Affinity of a pod, as Kubernetes writes it."""

    nodeAffinity: NodeAffinity | None = None
    """Nodes that it must have, or prefers."""
    podAffinity: PodAffinity | None = None
    """Pods beside which it runs."""
    podAntiAffinity: PodAffinity | None = None
    """Pods beside which it does not run."""


class SpreadConstraint(Section):
    """How pods are spread over nodes, as Kubernetes writes it. Further keys are passed through."""

    model_config = ConfigDict(extra="allow")
    maxSkew: PositiveCount
    """Largest difference of the numbers of pods."""
    topologyKey: str = Field(min_length=1)
    """Label of nodes over whose values pods are spread."""
    whenUnsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"]
    """Whether a pod waits for a fitting node."""
    labelSelector: Passed | None = None
    """Labels of the pods that are counted."""


class NodePlacement(Section):
    """Where pods run."""

    node_selector: dict[LabelKey, LabelValue] | None = None
    """Labels that the node must have."""
    tolerations: tuple[Toleration, ...] | None = None
    """Taints of nodes that are tolerated."""
    affinity: Affinity | None = None
    """Nodes and pods to be near to, or far from."""
    topology_spread: tuple[SpreadConstraint, ...] | None = None
    """How pods are spread over nodes or zones (topologySpreadConstraints)."""
    priority_class: ObjectName | None = None
    """Name of a PriorityClass."""
    runtime_class: ObjectName | None = None
    """Name of a RuntimeClass, such as that of GPUs."""

    def in_pod(self) -> dict[str, Any]:
        """The keys of a pod, for those that are set, if only to nothing."""
        found = {
            "nodeSelector": self.node_selector,
            "tolerations": self.tolerations and [_as_written(each) for each in self.tolerations],
            "affinity": self.affinity and _as_written(self.affinity),
            "topologySpreadConstraints": self.topology_spread and [_as_written(each) for each in self.topology_spread],
            "priorityClassName": self.priority_class,
            "runtimeClassName": self.runtime_class,
        }
        return {key: value for key, value in found.items() if value is not None}


def _as_written(section: Section) -> dict[str, Any]:
    return section.model_dump(mode="json", exclude_unset=True)


class NewClaim(Section):
    """A PersistentVolumeClaim that the manifests make."""

    size: PositiveSize
    """Its size."""
    storage_class: ObjectName | None = None
    """Name of its StorageClass; unset: the cluster's default."""
    access: Literal["ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod", "ReadOnlyMany"] = "ReadWriteMany"
    """Its access mode. More than one pod needs "ReadWriteMany", which few storage classes have."""


class NfsFolder(Section):
    """A folder of an NFS server. Namespaces of the level `restricted` refuse it: use a claim there."""

    server: str = Field(min_length=1, max_length=253)
    """Name or address of the server."""
    path: str = Field(pattern=r"^/")
    """The folder that it exports."""


KINDS = "claim", "create", "nfs", "secret", "config_map", "source"


class Volume(Section):
    """A volume of the pods that train and predict. Exactly one key says what it is."""

    at: str = Field(default="", pattern=r"^(/.+)?$")
    """Folder of the containers. The volume "store" needs none: it is the folder in which `store.path` is."""
    read_only: bool = False
    """Whether containers can only read it."""
    claim: ObjectName | None = None
    """An existing PersistentVolumeClaim."""
    create: NewClaim | None = None
    """A PersistentVolumeClaim that the manifests make, JOB-NAME. `kubectl delete -f` removes it with its data."""
    nfs: NfsFolder | None = None
    """A folder of an NFS server."""
    secret: ObjectName | None = None
    """A Secret, as files."""
    config_map: ObjectName | None = None
    """A ConfigMap, as files."""
    source: Passed | None = None
    """Any other volume source as Kubernetes writes it, such as {csi: {driver: ...}}."""

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            raise ValueError(f"needs exactly one of {', '.join(KINDS)}; it has {', '.join(given) or 'none'}")
        if self.source is not None and (len(self.source) != 1 or "hostPath" in self.source):
            raise ValueError("source is one volume source, such as {csi: {driver: ...}}, and no hostPath")
        if self.at and (".." in PurePosixPath(self.at).parts or "," in self.at or ":" in self.at):
            raise ValueError(f'at is {self.at!r}: an absolute path without "..", ":" and ","')
        return self

    @property
    def stays(self) -> bool:
        """Whether what pods write there outlives them."""
        return self.writable and (self.source is None or not {"emptyDir", "ephemeral"} & set(self.source))

    @property
    def writable(self) -> bool:
        """Whether pods can write there."""
        return not self.read_only and self.secret is None and self.config_map is None

    def in_pod(self, name: str, job: str) -> dict[str, Any]:
        """The volume of a pod."""
        if self.claim is not None or self.create is not None:
            claim = self.claim or f"{job}-{name}"
            return {"name": name, "persistentVolumeClaim": {"claimName": claim}}
        if self.nfs is not None:
            return {"name": name, "nfs": self.nfs.model_dump()}
        if self.secret is not None:
            return {"name": name, "secret": {"secretName": self.secret, "defaultMode": 0o440}}
        return {"name": name, **({"configMap": {"name": self.config_map}} if self.config_map else self.source or {})}


class PodSettings(NodePlacement):
    """The file of `headrace render kubernetes --pods`. Keys of a role replace those for all pods."""

    head: NodePlacement = NodePlacement()
    """The pod of the launcher and of a trainer."""
    trainer: NodePlacement = NodePlacement()
    """Pods of the other trainers."""
    shard: NodePlacement = NodePlacement()
    """Pods of shards."""
    service: NodePlacement = NodePlacement()
    """The pod of a service."""
    reader: NodePlacement = NodePlacement()
    """Pods of readers."""
    replica: NodePlacement = NodePlacement()
    """Pods of replicas."""
    prediction: NodePlacement = NodePlacement()
    """Pods of predictions."""
    volumes: dict[VolumeName, Volume] = Field(default={}, max_length=32)
    """Volumes of all pods but replicas, by name."""
    image_pull_secrets: tuple[ObjectName, ...] = Field(default=(), max_length=16)
    """Secrets with the credentials of the image's registry."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """When a node pulls the image. Unset: Kubernetes' own choice."""
    service_account: ObjectName | None = None
    """ServiceAccount of the pods, for clouds that give pods credentials by it. Its token is not mounted."""
    labels: dict[LabelKey, LabelValue] = {}
    """Further labels of all pods."""
    annotations: dict[LabelKey, str] = {}
    """Further annotations of all pods."""
    ttl_after_finished: Duration | None = None
    """How long a Job that has ended is kept, in whole seconds (ttlSecondsAfterFinished). Unset: until it is deleted."""
    gpu_resource: str = Field(default="nvidia.com/gpu", pattern=r"^[a-z0-9][-a-z0-9.]*/[A-Za-z0-9][-A-Za-z0-9_.]*$")
    """Resource that `cluster.resources.*.gpus` counts, such as "amd.com/gpu" or "nvidia.com/mig-1g.10gb"."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if taken := sorted({*self.volumes} & {*TAKEN}):
            raise ValueError(f"volumes.{taken[0]}: every pod has a volume of this name; choose another")
        places = [volume.at.rstrip("/") for volume in self.volumes.values() if volume.at]
        if twice := next((place for place in places if [*places, *TAKEN_FOLDERS].count(place) > 1), None):
            raise ValueError(f"volumes: {twice} is the folder of another volume; give each a folder of its own")
        if bare := next((n for n, volume in self.volumes.items() if n != STORE_VOLUME and not volume.at), None):
            raise ValueError(f"volumes.{bare}: needs at, the folder of the containers")
        if reserved := sorted(key for key in self.labels if key.startswith("app.kubernetes.io/")):
            raise ValueError(f"labels: {reserved[0]} is set by Headrace, whose policies and Services select by it")
        return self

    def placement(self, role: str) -> dict[str, Any]:
        """The keys of a pod of `role`: of its own section, or else of all pods."""
        found = {**self.in_pod(), **getattr(self, role).in_pod()}
        return {key: value for key, value in found.items() if value}

    def mounts(self, store: PurePosixPath) -> Iterator[tuple[str, Volume, PurePosixPath]]:
        """Each volume with its folder in containers. `store`: the folder of the job's store."""
        for name, volume in self.volumes.items():
            yield name, volume, PurePosixPath(volume.at) if volume.at else store.parent

    def on_volume(self, path: str, store: PurePosixPath, *, writes: bool = False) -> bool:
        """Whether an absolute path of a container is on a volume; with `writes`, on one that keeps what pods write."""
        found = self.volume_of(PurePosixPath(path), store)
        return found is not None and (not writes or found[1].stays)

    def volume_of(self, place: PurePosixPath, store: PurePosixPath) -> tuple[str, Volume] | None:
        """Name and volume of the innermost volume that an absolute path of a container is on; None: it is on none."""
        if not place.is_absolute() or ".." in place.parts:
            return None
        at = [(len(at.parts), name, each) for name, each, at in self.mounts(store) if place.is_relative_to(at)]
        return max(at, key=lambda one: one[0])[1:] if at else None


def load_pods(path: Path | None) -> PodSettings:
    """The settings in a file, YAML or TOML by its ending. Raises SpecError with the path of the key."""
    if path is None:
        return PodSettings()
    if path.suffix == ".toml":
        return validate(PodSettings, load_toml(path))
    import yaml  # late: a plain file of TOML needs no YAML

    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        raw = yaml.safe_load(text) if len(text) <= MAX_FILE_BYTES else None
        json.dumps(raw)  # as nested as JSON can be, and of its types
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error}", "--pods") from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise SpecError(f"{path}: is not YAML of texts, numbers, lists and maps: {error}", "--pods") from None
    if not isinstance(raw, Mapping):
        raise SpecError(f"{path}: is no map of keys, of at most {MAX_FILE_BYTES:,} bytes", "--pods")
    return validate(PodSettings, raw)
