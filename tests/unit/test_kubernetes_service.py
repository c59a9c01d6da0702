"""The manifests of a service: schemas of two versions of Kubernetes, what a pod gets, who reaches it; refusals."""

from dataclasses import replace
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from headrace.config import validate
from headrace.errors import SpecError
from headrace.service.cli.main import cli
from headrace.service.kubernetes.config import ManifestSettings
from headrace.service.kubernetes.manifests import render_service
from headrace.service.kubernetes.pod_settings import PodSettings
from headrace.service.kubernetes.service_pod import ServiceRun
from headrace.service.spec.config import WorkerResources
from tests.unit.test_kubernetes import VERSIONS, selects

FILE = Path(__file__).parents[1] / "golden" / "kubernetes" / "service.toml"
VOLUMES = {
    "store": {"create": {"size": "100GiB", "access": "ReadWriteOnce"}},
    "generators": {"config_map": "generators", "at": "/srv/generators"},
    # names that files of --pods may have had before there were services
    **{name: {"config_map": name, "at": f"/srv/own/{name}"} for name in ("config", "tls", "authority")},
}
SETTINGS = ManifestSettings(
    namespace="training", metrics_from="monitoring", pods=validate(PodSettings, {"volumes": VOLUMES})
)
NEEDS = WorkerResources(cores=8, memory=32 << 30)


def run_of(text=None, tmp_path=None, **replicas):
    path = FILE
    if text is not None:
        path = tmp_path / "service.toml"
        path.write_text(text)
    return ServiceRun.of(path, NEEDS, replicas, WorkerResources(cores=1, memory=2 << 30))


def objects_of(settings=SETTINGS, name="headrace", **kwargs):
    return [yaml.safe_load(text) for text in render_service(name, settings, run_of(**kwargs)).values()]


OBJECTS = objects_of(clicks=2, news=1)
PODS = {each["metadata"]["name"]: each["spec"]["template"] for each in OBJECTS if "template" in each.get("spec", {})}


@pytest.mark.parametrize("version", VERSIONS)
def test_two_versions_of_kubernetes_know_every_key(version):
    for each in OBJECTS:
        kubernetes_validate.validate(each, version, strict=True)
    assert [*PODS] == ["headrace", "headrace-clicks-replica", "headrace-news-replica"]


@pytest.mark.parametrize("pod", PODS.values(), ids=PODS)
def test_a_pod_has_no_rights_limits_and_a_volume_for_each_mount(pod):
    spec = pod["spec"]
    assert spec["automountServiceAccountToken"] is False and not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
    containers = [*spec["initContainers"], *spec["containers"]]
    for each in containers:
        context = each["securityContext"]
        assert context["runAsNonRoot"] and context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"]
        assert context["capabilities"] == {"drop": ["ALL"]} and "memory" in each["resources"]["limits"]
    mounts = [mount for each in containers for mount in each["volumeMounts"]]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert {mount["name"] for mount in mounts} == {*volumes}
    for each in containers:
        places = [mount["mountPath"] for mount in each["volumeMounts"]]
        assert len(places) == len({*places})
    assert all("items" in v["secret"] or v["name"] == "requests" for v in volumes.values() if "secret" in v)


def test_the_service_gets_its_file_certificate_and_tokens():
    (state,) = (each for each in OBJECTS if each["kind"] == "StatefulSet")
    spec = state["spec"]["template"]["spec"]
    assert state["spec"]["replicas"] == 1 and spec["shareProcessNamespace"] is True
    assert OBJECTS[0]["data"] == {"service.toml": FILE.read_text()}
    tls, *tokens = spec["initContainers"]
    assert tls["command"][-3:] == [
        "--target-directory=/etc/headrace-tls",
        "/srv/secret/server.pem",
        "/srv/secret/server.key",
    ]
    roles = {each["command"][3]: each["command"][4] for each in tokens}
    assert roles == {"admin": "--role=admin", "replicas": "--role=operator", "prometheus": "--role=viewer"}
    (served,) = spec["containers"]
    assert all(each["envFrom"] == served["envFrom"] for each in tokens), "by which a database is reached"
    assert served["resources"]["limits"] == {"cpu": "8", "memory": "32Gi"}
    kinds = {volume["name"]: volume for volume in spec["volumes"]}
    assert kinds["store"]["persistentVolumeClaim"] == {"claimName": "headrace-store"}
    items = [{"key": key, "path": path} for key, path in (("tls.crt", "server.pem"), ("tls.key", "server.key"))]
    assert kinds["service-tls-secret"]["secret"]["items"] == items
    few = objects_of(replace(SETTINGS, metrics_from=None))
    (alone,) = (each["spec"]["template"]["spec"] for each in few if each["kind"] == "StatefulSet")
    assert [each["name"] for each in alone["initContainers"]] == ["tls", "token-admin"]


def test_another_file_makes_another_pod(tmp_path):
    def noted(**kwargs):
        (found,) = (each for each in objects_of(**kwargs) if each["kind"] == "StatefulSet")
        return found["spec"]["template"]["metadata"]["annotations"]["headrace/service-file"]

    changed = FILE.read_text() + "\n[limits]\nmax_jobs = 8\n"
    assert noted() == noted() != noted(text=changed, tmp_path=tmp_path)


def test_who_reaches_whom():
    policies = {each["metadata"]["name"]: each["spec"] for each in OBJECTS if each["kind"] == "NetworkPolicy"}
    assert {*policies} == {*PODS}
    for name, pod in PODS.items():
        labels = pod["metadata"]["labels"]
        assert [at for at, policy in policies.items() if selects(policy["podSelector"], labels)] == [name]
        services = [each for each in OBJECTS if each["kind"] == "Service" and selects(labels_of(each), labels)]
        assert [each["metadata"]["name"] for each in services] == [name]

    def ports(name, source):
        rules = policies[name]["ingress"]
        return {
            port["port"]
            for rule in rules
            if any("podSelector" in peer and selects(peer["podSelector"], source) for peer in rule["from"])
            for port in rule["ports"]
        }

    replica, client = PODS["headrace-clicks-replica"]["metadata"]["labels"], {"headrace/client": "headrace"}
    assert ports("headrace", replica) == {8080, 32_768} and ports("headrace", client) == {8080}
    assert ports("headrace-clicks-replica", client) == {8090} and not ports("headrace-news-replica", replica)


def labels_of(service):
    return {"matchLabels": service["spec"]["selector"]}


def test_a_replica_follows_its_job_through_the_service_and_verifies_it():
    spec = PODS["headrace-news-replica"]["spec"]
    (container,) = spec["containers"]
    assert "--feed=https://headrace:8080/v1/jobs/news" in container["command"]
    assert container["env"] == [{"name": "SSL_CERT_FILE", "value": "/srv/authority/ca.crt"}]
    secrets = {v["name"]: v["secret"]["secretName"] for v in spec["volumes"] if "secret" in v}
    assert secrets == {"secret": "headrace-tokens", "requests": "headrace-news-replica", "authority": "headrace-tls"}


CHANGES = {
    'listen = "0.0.0.0:8080"': ('listen = "127.0.0.1:8080"', "listen: is '127.0.0.1:8080': set"),
    'cert = "/etc/headrace-tls/server.pem"\nkey = "/etc/headrace-tls/server.key"': ("", "tls.cert: is not set"),
    "/etc/headrace-tls/server.pem": ("server.pem", "tls.cert: is 'server.pem': name a file in a folder of its own"),
    "/etc/headrace-tls/server.key": ("/etc/other/server.key", "tls.key: is in another folder than tls.cert"),
    '["headrace"]': ('["example.org"]', "access.hosts: lacks 'headrace'"),
    'root = "/var/lib/headrace/service"': ('root = "service"', "root: is 'service': give the volume"),
    '"/var/lib/headrace/data"': ('"/srv/data"', "allow.roots: /srv/data is on no volume"),
    'interfaces = ["eth0"]': ("", "allow.interfaces: is empty, and replicas"),
    "/etc/headrace-tls/": ("/var/lib/headrace/", "tls.cert: a volume of the file of --pods is at /var/lib/headrace,"),
    'listen = "0': (
        'database = "sqlite:////data/records.db"\nlisten = "0',
        "database: names /data/records.db, which goes with the pod",
    ),
    'listen = "0.': (
        'database = "postgresql+psycopg://me@db/headrace?passfile=/etc/passfile"\nlisten = "0.',
        "database: names /etc/passfile, which goes with the pod",
    ),
    "listen =": (
        'database = "postgresql+psycopg://me:hunter2@db/headrace"\nlisten =',
        "database: has a password, which a ConfigMap shows",
    ),
}


@pytest.mark.parametrize("old", CHANGES)
def test_what_does_not_work_in_a_pod_is_refused(old, tmp_path):
    new, words = CHANGES[old]
    with pytest.raises(SpecError) as refused:
        objects_of(text=FILE.read_text().replace(old, new), tmp_path=tmp_path, clicks=1)
    assert words in str(refused.value) and "hunter2" not in str(refused.value)


def test_names_and_options_that_cannot_be_are_refused():
    with pytest.raises(SpecError, match="--name: 'Head' cannot be in names of Kubernetes"):
        objects_of(name="Head")
    with pytest.raises(SpecError, match=r"--replicas: '\w+' makes a name of more than 63 characters"):
        objects_of(name="h" * 30, **{"j" * 30: 1})
    mine = {**VOLUMES, "mine": {"config_map": "mine", "at": "/etc/headrace"}}
    with pytest.raises(SpecError, match="volumes: a volume of the file of --pods is at /etc/headrace,"):
        objects_of(replace(SETTINGS, pods=validate(PodSettings, {"volumes": mine})))
    with pytest.raises(SpecError, match="root: .* give the volume"):
        objects_of(replace(SETTINGS, pods=PodSettings()))
    words = ["render", "kubernetes-service", str(FILE), "--cores", "8", "--memory"]
    for more, said in (
        (["0MiB"], "--memory: is 0"),
        (["1GiB", "--replicas", "clicks"], "'clicks' is not of the form JOB=N"),
        (["1GiB", "--replicas", "clicks=1", "--replicas", "clicks=2"], "--replicas: names 'clicks' twice"),
    ):
        refused = CliRunner().invoke(cli, [*words, *more])
        assert isinstance(refused.exception, SpecError) and said in str(refused.exception)


def test_the_command_writes_what_kustomize_takes(tmp_path):
    (tmp_path / "pods.yaml").write_text(yaml.safe_dump({"volumes": VOLUMES}))
    words = ["render", "kubernetes-service", str(FILE), "--cores", "8", "--memory", "32GiB", "--replicas", "clicks=2"]
    words += ["--pods", str(tmp_path / "pods.yaml"), "--out", str(tmp_path / "out"), "--kustomize"]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.output
    listed = yaml.safe_load((tmp_path / "out" / "kustomization.yaml").read_text())["resources"]
    assert listed == sorted(path.name for path in (tmp_path / "out").iterdir() if path.name != "kustomization.yaml")
    assert {"05-statefulset-headrace.yaml", "09-deployment-headrace-clicks-replica.yaml"} <= {*listed}
