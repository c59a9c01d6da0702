"""A service in one pod: a StatefulSet that runs `headrace serve`, and Deployments of replicas of its jobs.

The service and the workers of its jobs are processes of one container: they share its resources, and end with it.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from headrace.address import is_wildcard, parse_address
from headrace.config import load_toml, validate
from headrace.errors import SpecError
from headrace.service.jobs.config import ServiceConfig
from headrace.service.kubernetes import network, pods
from headrace.service.kubernetes.naming import Named
from headrace.service.kubernetes.pod_settings import SERVICE_VOLUMES, TAKEN_FOLDERS
from headrace.service.kubernetes.pods import EPHEMERAL_PORTS, Part
from headrace.service.kubernetes.workloads import REPLICA_PORT, replicas
from headrace.service.spec.config import WorkerResources

CONFIG_FOLDER, CONFIG = "/etc/headrace", "service.toml"
CONFIG_VOLUME, TLS_VOLUME, TLS_FROM = SERVICE_VOLUMES
EXAMPLE_CERT = "/etc/headrace-tls/server.pem"
HEALTH_PORT = 8081
"""Where the service answers probes."""
TLS_SECRET = "tls.crt", "tls.key"
"""Keys of a Secret of the type kubernetes.io/tls."""
GRACE_S = 30
"""Longest time of the service to end. Its jobs are killed then, and go on at their last commits."""
TOKEN_MAKER = WorkerResources(cores=0.5, memory=256 << 20)
"""Resources of a container that stores a token in the records."""
ADMIN, OF_REPLICAS, OF_PROMETHEUS = "admin", "replicas", "prometheus"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceRun:
    """The service of a command, by its options."""

    config: ServiceConfig
    text: str
    """The service file."""
    needs: WorkerResources
    """Of the service and all of its jobs together."""
    replicas: Mapping[str, int] = field(default_factory=dict)
    """By job, pods that serve its predictions."""
    replica_needs: WorkerResources
    """Of one replica."""

    @classmethod
    def of(
        cls, path: Path, needs: WorkerResources, replicas: Mapping[str, int], replica_needs: WorkerResources
    ) -> "ServiceRun":
        """That of a service file. Raises SpecError."""
        config = validate(ServiceConfig, load_toml(path))  # paths are those of the pod
        return cls(
            config=config,
            text=path.read_text(encoding="utf-8"),
            needs=needs,
            replicas=replicas,
            replica_needs=replica_needs,
        )

    @property
    def port(self) -> int:
        """Port of the API."""
        return parse_address(self.config.listen)[1]

    @property
    def root(self) -> PurePosixPath:
        """The folder of records and jobs."""
        return PurePosixPath(self.config.root)


def check_service(made: Named, run: ServiceRun) -> None:
    """Raise SpecError at the first key that does not work in a pod, with what to do."""
    for key, words in (*_of_its_address(made, run.config), *_of_its_folders(made, run)):
        raise SpecError(words, key)


def _of_its_address(made: Named, config: ServiceConfig) -> Iterator[tuple[str, str]]:
    host, port = parse_address(config.listen)
    if not is_wildcard(host) or port in (0, HEALTH_PORT):
        yield "listen", f'is {config.listen!r}: set "0.0.0.0:8080", which others reach'
    cert, key = config.tls.cert, config.tls.key
    if cert is None and not config.access.unprotected:
        yield (
            "tls.cert",
            f"is not set: name files in one folder, such as {EXAMPLE_CERT}, which the pod gets from the Secret "
            f"{made.name}-tls; or set access.unprotected = true behind a proxy that encrypts",
        )
    if cert is not None and key is not None:
        if not cert.is_absolute() or str(cert.parent) in ("/", CONFIG_FOLDER, *TAKEN_FOLDERS) or cert.name == key.name:
            yield "tls.cert", f"is {str(cert)!r}: name a file in a folder of its own, such as {EXAMPLE_CERT}"
        if cert.parent != key.parent:
            yield "tls.key", "is in another folder than tls.cert; both come from one Secret: name one folder"
    if made.name not in config.access.hosts:
        yield "access.hosts", f"lacks {made.name!r}, the name of the Service, by which pods reach it; add it"


def _of_its_folders(made: Named, run: ServiceRun) -> Iterator[tuple[str, str]]:
    config, own, root = run.config, made.settings.pods, run.root
    if not own.on_volume(str(root), root, writes=True) or len(root.parts) < 3:
        yield (
            "root",
            f'is {str(root)!r}: give the volume "store" in the file of --pods, else it goes with the pod, and name an '
            "absolute path whose folder becomes the volume, such as /var/lib/headrace/service",
        )
    for place in config.allow.roots:
        if "://" not in place and not own.on_volume(place, root):
            yield "allow.roots", f"{place} is on no volume of the file of --pods: the pod does not have it"
    if config.database is not None and urlsplit(config.database).password:
        yield "database", "has a password, which a ConfigMap shows to many: name a passfile on a volume"
    for file in config.record_files:
        if not own.on_volume(str(file), root, writes=not config.shares_records):
            yield "database", f"names {file}, which goes with the pod: name a file on a volume of the file of --pods"
    needed = {"volumes": CONFIG_FOLDER}
    if config.tls.cert is not None:
        needed["tls.cert"] = str(config.tls.cert.parent)
    for key, folder in needed.items():
        if own.on_volume(folder, root):
            yield key, f"a volume of the file of --pods is at {folder}, which the pod needs: move one of them"
    if run.replicas and not config.allow.interfaces:
        yield (
            "allow.interfaces",
            'is empty, and replicas in other pods reach jobs by it: set ["eth0"], and in their job files '
            'cluster.interface = "eth0" and cluster.trust_interface = true',
        )


def service_objects(made: Named, run: ServiceRun) -> Iterator[Part]:
    """All objects, in the order in which they are applied."""
    labels = made.labels("service")
    data = {CONFIG: run.text}
    yield {"apiVersion": "v1", "kind": "ConfigMap", "metadata": made.metadata(f"{made.name}-service"), "data": data}
    yield from made.claims()
    yield network.policy_of(made, made.name, {"matchLabels": labels}, list(_let_in(made, run)))
    yield network.service_of(made, made.name, labels, "api", run.port)
    yield _stateful_set(made, run, labels)
    for job, number in run.replicas.items():
        yield from _replicas(made, run, job, number)


def _let_in(made: Named, run: ServiceRun) -> Iterator[Part]:
    yield network.from_clients(made, run.port)
    if (namespace := made.settings.metrics_from) is not None:
        yield network.from_prometheus(namespace, run.port)
    if run.replicas:
        first, last = EPHEMERAL_PORTS
        chosen = {"protocol": "TCP", "port": first, "endPort": last}
        replica = [{"podSelector": {"matchLabels": made.labels("replica")}}]
        yield {"from": replica, "ports": [{"protocol": "TCP", "port": run.port}, chosen]}


def _stateful_set(made: Named, run: ServiceRun, labels: Part) -> Part:
    config_file = f"{CONFIG_FOLDER}/{CONFIG}"
    volumes, of_root = pods.job_volumes(made.settings, made.name, Path(run.root))
    mounts = [*pods.scratch_mounts(), *of_root, pods.file_mount(CONFIG_VOLUME, CONFIG, CONFIG_FOLDER)]
    tokens = [(ADMIN, "admin"), *([(OF_REPLICAS, "operator")] if run.replicas else [])]
    tokens += [(OF_PROMETHEUS, "viewer")] if made.settings.metrics_from is not None else []
    inits, tls_volumes = _tls(made, run, mounts)
    with_secret = [*mounts, pods.mount("secret", pods.SECRET_FOLDER, True)]
    for name, role in tokens:
        words = ["headrace", "token", "create", name, f"--role={role}", f"--config={config_file}"]
        words += [f"--token-file={pods.SECRET_FOLDER}/{name}"]
        maker = pods.container(f"token-{name}", made.settings, words, TOKEN_MAKER, with_secret)
        inits.append({**maker, **pods.worker_environment(made.settings)})  # a database may need its variables
    words = ["headrace", "serve", f"--config={config_file}", f"--health=0.0.0.0:{HEALTH_PORT}"]
    serve = pods.container("service", made.settings, words, run.needs, mounts)
    template = pods.pod_template(
        labels,
        made.settings,
        group=made.name,
        inits=inits,
        containers=[{**serve, **pods.worker_environment(made.settings), **pods.probes(HEALTH_PORT)}],
        volumes=[
            *pods.scratch_volumes(),
            *volumes,
            {"name": CONFIG_VOLUME, "configMap": {"name": f"{made.name}-service"}},
            pods.secret_volume(f"{made.name}-tokens", [name for name, _ in tokens]),
            *tls_volumes,
        ],
        grace_s=GRACE_S,
        restart="Always",
        # Another file makes another pod: the service reads it once.
        annotations={"headrace/service-file": hashlib.sha256(run.text.encode()).hexdigest()[:16]},
    )
    template["spec"]["shareProcessNamespace"] = True  # the first process of the pod then ends orphans of dead launchers
    selector = {"matchLabels": labels}
    spec = {"replicas": 1, "serviceName": made.name, "selector": selector, "template": template}
    return {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": made.metadata(made.name), "spec": spec}


def _tls(made: Named, run: ServiceRun, mounts: list[Part]) -> tuple[list[Part], list[Part]]:
    """The container that copies certificate and key for their owner alone, and its volumes; adds the mount."""
    cert, key = run.config.tls.cert, run.config.tls.key
    if cert is None or key is None:
        return [], []
    secret = {"name": TLS_FROM, "mountPath": pods.SECRET_FOLDER, "readOnly": True}
    at = pods.mount(TLS_VOLUME, str(cert.parent))
    copy = pods.copy_of([cert.name, key.name], str(cert.parent), made.settings, [at])
    copy = {**copy, "name": "tls", "volumeMounts": [secret, at]}
    mounts.append(pods.mount(TLS_VOLUME, str(cert.parent), True))
    items = [{"key": of, "path": path.name} for of, path in zip(TLS_SECRET, (cert, key), strict=True)]
    source = {"secretName": f"{made.name}-tls", "defaultMode": 0o440, "items": items}
    return [copy], [pods.scratch(TLS_VOLUME, "Memory"), {"name": TLS_FROM, "secret": source}]


def _replicas(made: Named, run: ServiceRun, job: str, number: int) -> Iterator[Part]:
    """Replicas of a job that follow its feed through the service, with what they need."""
    name, scheme = f"{made.name}-{job}-replica", "http" if run.config.tls.cert is None else "https"
    feed = f"--feed={scheme}://{made.name}:{run.port}/v1/jobs/{job}"
    token = pods.secret_volume(f"{made.name}-tokens", [OF_REPLICAS])
    deployment = replicas(
        made,
        name,
        number,
        [feed, f"--feed-token-file={pods.IDENTITY_FOLDER}/{OF_REPLICAS}"],
        run.replica_needs,
        token,
        f"{made.name}-tls" if scheme == "https" else None,
    )
    labels = deployment["spec"]["selector"]["matchLabels"]
    rule = network.from_clients(made, REPLICA_PORT)
    yield network.policy_of(made, name, {"matchLabels": labels}, [rule])
    yield network.service_of(made, name, labels, "predict", REPLICA_PORT)
    yield network.budget_of_replicas(made, name, labels)
    yield deployment
