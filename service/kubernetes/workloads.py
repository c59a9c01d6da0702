"""The objects that own the pods of a job: a Job each for head, other trainers and shards, a Deployment of replicas.

The head has the launcher and rank 0, which keeps the log. Every other pod is an agent, `headrace worker`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.address import parse_address
from headrace.service.cluster.external import END_S
from headrace.service.cluster.supervision import EndingLimits
from headrace.service.kubernetes import pods
from headrace.service.kubernetes.config import ManifestSettings
from headrace.service.kubernetes.job_files import JOB_FILE, keys_of
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


@dataclass(frozen=True, slots=True)
class JobManifests:
    """Makes the workloads of one job."""

    job: LoadedJob
    settings: ManifestSettings
    files: Mapping[str, str]
    overrides: tuple[str, ...] = ()
    """Settings of `--set`, which the launcher gets, too."""

    @property
    def name(self) -> str:
        """Name of the job, with which the names of its objects begin."""
        return self.job.spec.name

    @property
    def head(self) -> str:
        """Name of the head and of its Service."""
        return f"{self.name}-head"

    @property
    def port(self) -> int:
        """The port at which workers and replicas join."""
        return parse_address(self.job.spec.cluster.listen)[1]

    @property
    def num_pods(self) -> int:
        """Pods that train."""
        return self.job.cluster.trainers + self.job.cluster.num_shards

    def labels(self, component: str = "") -> Part:
        """Labels of the job's objects, or of one component's pods."""
        found = {"app.kubernetes.io/name": "headrace", "app.kubernetes.io/instance": self.name}
        return {**found, "app.kubernetes.io/component": component} if component else found

    def metadata(self, name: str) -> Part:
        """Metadata of an object."""
        return {"name": name, "namespace": self.settings.namespace, "labels": self.labels()}

    def workloads(self) -> list[Part]:
        """All that own pods, the head first."""
        cluster, needs = self.job.cluster, self.job.spec.cluster.resources
        found = [self._head(needs.trainer)]
        if cluster.trainers > 1:
            found.append(self._workers("trainer", cluster.trainers - 1, needs.trainer))
        if cluster.num_shards:
            found.append(self._workers("shard", cluster.num_shards, needs.shard))
        if self.settings.replicas:
            found.append(self._replicas())
        return found

    def _head(self, needs: WorkerResources) -> Part:
        store = str(self.job.store)
        at, identity = pods.volume_of_store(store), f"{store}/identity"
        mounts = [*pods.scratch_mounts(), pods.mount("store", at), pods.mount("job", pods.JOB_FOLDER, True)]
        run = [
            "headrace",
            "run",
            f"{pods.JOB_FOLDER}/{JOB_FILE}",
            *(w for each in self.overrides for w in ("--set", each)),
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
                pods.copy_of(IDENTITY_FILES, identity, self.settings, "store", at),
                {**rank0, "restartPolicy": "Always"},  # a sidecar: it is ended once the launcher has ended
            ],
            containers=[
                {**launcher, **ports, **pods.worker_environment(self.settings), **pods.probes(LAUNCHER_PORT)},
            ],
            volumes=[
                *pods.scratch_volumes(),
                pods.scratch("store"),
                self._job_volume(),
                pods.secret_volume(self.settings.identity_secret, IDENTITY_FILES),
            ],
            grace_s=HEAD_GRACE_S,
            annotations=pods.scraped_at(METRICS_PORT) if scraped else None,
        )
        return self._job(self.head, 1, template, "launcher")

    def _workers(self, role: str, number: int, needs: WorkerResources) -> Part:
        at = pods.volume_of_store(str(self.job.store))
        mounts = [
            *pods.scratch_mounts(),
            pods.mount("store", at),
            pods.mount("job", pods.JOB_FOLDER, True),
            pods.mount("identity", pods.IDENTITY_FOLDER, True),
        ]
        template = pods.pod_template(
            self.labels(role),
            self.settings,
            group=self.name,
            inits=[self._token_copy()],
            containers=[self._worker("worker", role, pods.TOKEN_FILE, needs, mounts)],
            volumes=[*pods.scratch_volumes(), pods.scratch("store"), self._job_volume(), *self._token_volumes()],
            grace_s=WORKER_GRACE_S,
        )
        return self._job(f"{self.name}-{role}s", number, template, "worker")

    def _worker(self, name: str, role: str, token: str, needs: WorkerResources, mounts: list[Part]) -> Part:
        join = ["headrace", "worker", f"--join={self.head}:{self.port}", f"--token-file={token}", f"--role={role}"]
        command = [*join, f"--health=0.0.0.0:{WORKER_PORT}"]
        made = pods.container(name, self.settings, command, needs, mounts)
        return {**made, **pods.worker_environment(self.settings), **pods.probes(WORKER_PORT)}

    def _replicas(self) -> Part:
        name = f"{self.name}-replica"
        command = ["headrace", "replica", f"--join={self.head}:{self.port}", f"--feed-token-file={pods.TOKEN_FILE}"]
        command += [f"--listen=0.0.0.0:{REPLICA_PORT}", "--token-file=/srv/replica/token"]
        token = pods.mount("requests", "/srv/replica", True)
        mounts = [*pods.scratch_mounts(), pods.mount("identity", pods.IDENTITY_FOLDER, True), token]
        needs = self.job.spec.cluster.resources
        rows = needs.shard.memory * self.job.cluster.num_shards or needs.trainer.memory  # it has those of all shards
        sized = WorkerResources(cores=needs.trainer.cores, memory=rows)
        made = pods.container("replica", self.settings, command, sized, mounts)
        template = pods.pod_template(
            self.labels("replica"),
            ManifestSettings(image=self.settings.image),  # not of the gang
            group=self.name,
            inits=[self._token_copy()],
            containers=[{**made, **pods.probes(REPLICA_PORT, "/v2/health/live", "/v2/health/ready")}],
            volumes=[
                *pods.scratch_volumes(),
                *self._token_volumes(),
                {"name": "requests", "secret": {"secretName": name, "defaultMode": 0o440}},
            ],
            grace_s=WORKER_GRACE_S,
            restart="Always",
        )
        selector = {"matchLabels": self.labels("replica")}
        spec = {"replicas": self.settings.replicas, "selector": selector, "template": template}
        return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": self.metadata(name), "spec": spec}

    def _token_copy(self) -> Part:
        files = IDENTITY_FILES[1:]
        return pods.copy_of(files, pods.IDENTITY_FOLDER, self.settings, "identity", pods.IDENTITY_FOLDER)

    def _token_volumes(self) -> list[Part]:
        return [
            pods.scratch("identity", "Memory"),
            pods.secret_volume(self.settings.identity_secret, IDENTITY_FILES[1:]),
        ]

    def _job_volume(self) -> Part:
        items = [{"key": key, "path": path} for path, key in keys_of(self.files).items()]
        return {"name": "job", "configMap": {"name": f"{self.name}-job", "items": items}}

    def _job(self, name: str, number: int, template: Part, container: str) -> Part:
        """A Job whose pods are made again until they end by themselves."""
        ended = {"containerName": container, "operator": "In", "values": pods.ENDED_FOR_GOOD}
        disrupted = [{"type": "DisruptionTarget", "status": "True"}]
        spec: Part = {
            "completions": number,
            "parallelism": number,
            "completionMode": "Indexed",
            "backoffLimit": MAX_INT32,  # the launcher counts: cluster.max_restarts
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {
                "rules": [
                    {"action": "FailJob", "onExitCodes": ended},
                    {"action": "Ignore", "onPodConditions": disrupted},
                ]
            },
            "template": template,
        }
        return {"apiVersion": "batch/v1", "kind": "Job", "metadata": self.metadata(name), "spec": spec}
