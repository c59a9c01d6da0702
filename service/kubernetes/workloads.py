"""The objects that own the pods of a job: Jobs of head, other trainers, shards and readers, a Deployment of replicas.

The head has the launcher and rank 0, which keeps the log. Every other pod is an agent, `headrace worker`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from headrace.address import parse_address
from headrace.service.cluster.external import END_S
from headrace.service.cluster.supervision import EndingLimits
from headrace.service.kubernetes import pods
from headrace.service.kubernetes.job_files import JOB_FILE, keys_of
from headrace.service.kubernetes.naming import Named
from headrace.service.kubernetes.pods import Part
from headrace.service.spec.config import WorkerResources
from headrace.service.spec.job import LoadedJob

LAUNCHER = WorkerResources(cores=1.0, memory=1 << 30)
"""Resources of the launcher, which serves the API of its job, too."""
LAUNCHER_PORT, WORKER_PORT = 8081, 8082
"""Where the processes of a pod answer probes."""
METRICS_PORT = 8083
"""Where the launcher answers Prometheus."""
API, REPLICA_PORT = "127.0.0.1:8080", 8090
HEAD_PORTS = parse_address(API)[1], LAUNCHER_PORT, WORKER_PORT, METRICS_PORT
MARGIN_S = 30
MAX_INT32 = (1 << 31) - 1
WORKER_GRACE_S = 30
LIMITS = EndingLimits()
HEAD_GRACE_S = round(LIMITS.drain_s + LIMITS.finish_s + LIMITS.end_s + END_S) + MARGIN_S
"""A head that is asked to end finishes its pass, commits and tells the workers."""
IDENTITY_FILES = "authority.pem", "join_token"
AUTHORITY, AUTHORITY_FOLDER = "ca.crt", "/srv/authority"
"""The certificate by which replicas verify a service."""


@dataclass(frozen=True, slots=True)
class JobManifests(Named):
    """Makes the workloads of one job."""

    job: LoadedJob
    files: Mapping[str, str]
    overrides: tuple[str, ...] = ()
    """Settings of `--set`, which the launcher gets, too."""

    @property
    def head(self) -> str:
        """Name of the head and of its Service."""
        return f"{self.name}-head"

    @property
    def port(self) -> int:
        """The port at which workers and replicas join."""
        return parse_address(self.job.spec.cluster.listen)[1]

    @property
    def least_pods(self) -> int:
        """Pods that train, without those that an elastic job can do without."""
        elastic = self.job.spec.cluster.elastic
        return self.job.cluster.num_workers - (elastic.max - elastic.min if elastic is not None else 0)

    @property
    def workers(self) -> list[str]:
        """Components of the agents."""
        return ["trainer", "shard", *(["reader"] if self.job.cluster.readers else [])]

    def workloads(self) -> list[Part]:
        """All that own pods, the head first."""
        cluster, needs = self.job.cluster, self.job.spec.cluster.resources
        found = [self._head(needs.trainer)]
        if cluster.num_trainers > 1:
            found.append(self._workers("trainer", cluster.num_trainers - 1, needs.trainer))
        if cluster.num_shards:
            found.append(self._workers("shard", cluster.num_shards, needs.shard))
        if cluster.readers:
            found.append(self._workers("reader", cluster.readers, needs.reader))
        if self.settings.replicas:
            found.append(self._replicas())
        return found

    def _head(self, needs: WorkerResources) -> Part:
        identity = f"{self.job.store}/identity"
        volumes, of_job = pods.job_volumes(self.settings, self.name, self.job.store)
        mounts = [*pods.scratch_mounts(), *of_job, *self.job_mounts()]
        run = [
            "headrace",
            "run",
            f"{pods.JOB_FOLDER}/{JOB_FILE}",
            *self.set_words(),
        ]
        run += [f"--listen={API}", f"--health=0.0.0.0:{LAUNCHER_PORT}", "--retry-stopped"]
        scraped = self.settings.metrics_from is not None
        run += [f"--metrics=0.0.0.0:{METRICS_PORT}"] if scraped else []
        ports: Part = {"ports": [{"name": "metrics", "containerPort": METRICS_PORT}]} if scraped else {}
        rank0 = self._worker("rank-0", "trainer", f"{identity}/join_token", needs, mounts)
        launcher = pods.container("launcher", self.settings, run, LAUNCHER, mounts)
        template = pods.pod_template(
            self.labels("head"),
            self.settings,
            group=self.name,
            inits=[
                pods.copy_of(IDENTITY_FILES, identity, self.settings, of_job),
                {**rank0, "restartPolicy": "Always"},  # a sidecar: it is ended once the launcher has ended
            ],
            containers=[
                {**launcher, **ports, **pods.worker_environment(self.settings), **pods.probes(LAUNCHER_PORT)},
            ],
            volumes=[
                *pods.scratch_volumes(),
                *volumes,
                self.job_volume(f"{self.name}-job"),
                pods.secret_volume(self.settings.identity_secret, IDENTITY_FILES),
            ],
            grace_s=HEAD_GRACE_S,
            annotations=pods.scraped_at(METRICS_PORT) if scraped else None,
        )
        return self.job_of(self.head, 1, template, "launcher")

    def _workers(self, role: str, number: int, needs: WorkerResources) -> Part:
        volumes, of_job = pods.job_volumes(self.settings, self.name, self.job.store)
        mounts = [
            *pods.scratch_mounts(),
            *of_job,
            *self.job_mounts(),
            pods.mount("identity", pods.IDENTITY_FOLDER, True),
        ]
        template = pods.pod_template(
            self.labels(role),
            self.settings,
            group=self.name,
            inits=[pods.token_copy(IDENTITY_FILES[1], self.settings)],
            containers=[self._worker("worker", role, pods.TOKEN_FILE, needs, mounts)],
            volumes=[
                *pods.scratch_volumes(),
                *volumes,
                self.job_volume(f"{self.name}-job"),
                pods.scratch("identity", "Memory"),
                pods.secret_volume(self.settings.identity_secret, IDENTITY_FILES[1:]),
            ],
            grace_s=WORKER_GRACE_S,
        )
        return self.job_of(f"{self.name}-{role}s", number, template, "worker")

    def _worker(self, name: str, role: str, token: str, needs: WorkerResources, mounts: list[Part]) -> Part:
        join = ["headrace", "worker", f"--join={self.head}:{self.port}", f"--token-file={token}", f"--role={role}"]
        command = [*join, f"--health=0.0.0.0:{WORKER_PORT}"]
        made = pods.container(name, self.settings, command, needs, mounts)
        return {**made, **pods.worker_environment(self.settings), **pods.probes(WORKER_PORT)}

    def _replicas(self) -> Part:
        needs = self.job.spec.cluster.resources
        rows = needs.shard.memory * self.job.cluster.num_shards or needs.trainer.memory  # it has those of all shards
        return replicas(
            self,
            f"{self.name}-replica",
            self.settings.replicas,
            [f"--join={self.head}:{self.port}", f"--feed-token-file={pods.TOKEN_FILE}"],
            WorkerResources(cores=needs.trainer.cores, memory=rows),
            pods.secret_volume(self.settings.identity_secret, IDENTITY_FILES[1:]),
        )

    def set_words(self) -> list[str]:
        """The overrides, as words of a command."""
        return [word for each in self.overrides for word in ("--set", each)]

    def files_map(self, name: str) -> Part:
        """The ConfigMap of the job's files."""
        texts = {key: self.files[path] for path, key in keys_of(self.files).items()}
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": self.metadata(name), "data": texts}

    def job_volume(self, name: str) -> Part:
        """The volume of `files_map`."""
        items = [{"key": key, "path": path} for path, key in keys_of(self.files).items()]
        return {"name": "job", "configMap": {"name": name, "items": items}}

    def job_mounts(self) -> list[Part]:
        """The mounts of `job_volume`."""
        return [pods.file_mount("job", path, pods.JOB_FOLDER) for path in self.files]

    def job_of(self, name: str, number: int, template: Part, container: str, backoff: int = MAX_INT32) -> Part:
        """A Job whose pods are made again until they end by themselves, or as often as `backoff` says."""
        ended = {"containerName": container, "operator": "In", "values": pods.ENDED_FOR_GOOD}
        disrupted = [{"type": "DisruptionTarget", "status": "True"}]
        spec: Part = {
            "completions": number,
            "parallelism": number,
            "completionMode": "Indexed",
            "backoffLimit": backoff,  # the launcher counts: cluster.max_restarts
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {
                "rules": [
                    {"action": "FailJob", "onExitCodes": ended},
                    {"action": "Ignore", "onPodConditions": disrupted},
                ]
            },
            "template": template,
        }
        if (ttl_s := self.settings.pods.ttl_after_finished) is not None:
            spec = {"ttlSecondsAfterFinished": round(ttl_s), **spec}
        return {"apiVersion": "batch/v1", "kind": "Job", "metadata": self.metadata(name), "spec": spec}


def replicas(
    made: Named,
    name: str,
    number: int,
    follow: Sequence[str],
    needs: WorkerResources,
    token: Part,
    authority: str | None = None,
) -> Part:
    """A Deployment of replicas, which has the name of the Secret with the token that requests carry.

    `follow`: options that name the feed. `token`: the volume of the Secret with the one for the feed.
    `authority`: the Secret whose ca.crt verifies the service of the feed; None: those of the image do.
    """
    command = ["headrace", "replica", *follow, f"--listen=0.0.0.0:{REPLICA_PORT}", "--token-file=/srv/replica/token"]
    at = pods.mount("identity", pods.IDENTITY_FOLDER, True), pods.mount("requests", "/srv/replica", True)
    trusted, variables, volumes = [], {}, []
    if authority is not None:
        trusted = [pods.mount("authority", AUTHORITY_FOLDER, True)]
        variables = {"env": [{"name": "SSL_CERT_FILE", "value": f"{AUTHORITY_FOLDER}/{AUTHORITY}"}]}
        volumes = [{**pods.secret_volume(authority, [AUTHORITY]), "name": "authority"}]
    container = pods.container("replica", made.settings, command, needs, [*pods.scratch_mounts(), *at, *trusted])
    labels = {**made.labels("replica"), **({} if name == f"{made.name}-replica" else {"headrace/replica": name})}
    template = pods.pod_template(
        labels,
        replace(made.settings, queue=None),  # not of the gang
        group=made.name,
        inits=[pods.token_copy(token["secret"]["items"][0]["path"], made.settings)],
        containers=[{**container, **variables, **pods.probes(REPLICA_PORT, "/v2/health/live", "/v2/health/ready")}],
        volumes=[
            *pods.scratch_volumes(),
            pods.scratch("identity", "Memory"),
            token,
            {"name": "requests", "secret": {"secretName": name, "defaultMode": 0o440}},
            *volumes,
        ],
        grace_s=WORKER_GRACE_S,
        restart="Always",
    )
    spec = {"replicas": number, "selector": {"matchLabels": labels}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": made.metadata(name), "spec": spec}
