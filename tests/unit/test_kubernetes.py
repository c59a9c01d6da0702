"""Rendered manifests: text, schemas of two versions of Kubernetes, the policy that every pod keeps, and refusals."""

import re
from dataclasses import replace
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from headrace.errors import SpecError
from headrace.service.cli.main import cli
from headrace.service.kubernetes.config import ManifestSettings
from headrace.service.kubernetes.job_files import MAX_BYTES
from headrace.service.kubernetes.manifests import render_job, yaml_text
from headrace.service.kubernetes.workloads import HEAD_GRACE_S, LIMITS

GOLDEN = Path(__file__).parents[1] / "golden" / "kubernetes"
JOB = GOLDEN / "job.toml"
ALL = ManifestSettings(namespace="training", replicas=2, queue="learn")
VERSIONS = "1.29", "1.37"
"""The oldest one with sidecars, and the newest one whose schemas are there."""
NOT_OF_KUBERNETES = {"PodGroup"}
EMBEDDED = "cluster.trainers=1", "cluster.shards=0"


def objects_of(*overrides, settings=ALL, job=JOB):
    return [yaml.safe_load(text) for text in render_job(job, overrides, settings).values()]


def pods_of(objects):
    """The template of each pod, by the name of its owner."""
    return {
        each["metadata"]["name"]: each["spec"]["template"] for each in objects if each["kind"] in ("Job", "Deployment")
    }


def all_containers(pod):
    return [*pod["spec"]["initContainers"], *pod["spec"]["containers"]]


OBJECTS = objects_of()
PODS = pods_of(OBJECTS)
every_pod = pytest.mark.parametrize("pod", PODS.values(), ids=PODS)


def test_the_text_is_the_one_we_promised():
    """Written by: headrace render kubernetes job.toml --namespace training --replicas 2 --queue learn."""
    assert "---\n".join(render_job(JOB, (), ALL).values()) == (GOLDEN / "manifests.yaml").read_text()


@pytest.mark.parametrize("image", ["a\nb: c", "a b", "", "-a", "a" * 513, "a\u2028", "a\x1b"])
def test_what_is_no_image_is_refused(image):
    with pytest.raises(SpecError, match="--image: .* is not an image"):
        objects_of(settings=replace(ALL, image=image))


@pytest.mark.parametrize("version", VERSIONS)
def test_two_versions_of_kubernetes_know_every_key(version):
    alone = objects_of(*EMBEDDED, settings=ManifestSettings())
    for each in (*OBJECTS, *alone):
        if each["kind"] not in NOT_OF_KUBERNETES:
            kubernetes_validate.validate(each, version, strict=True)


def test_a_wrong_key_would_be_found():
    job = next(each for each in OBJECTS if each["kind"] == "Job")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**job, "spec": {**job["spec"], "replicas": 1}}, VERSIONS[0], strict=True)


@every_pod
def test_a_pod_has_no_rights(pod):
    spec = pod["spec"]
    assert spec["automountServiceAccountToken"] is False and spec["enableServiceLinks"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"} & set(spec)
    assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] >= 10_000
    assert {kind for volume in spec["volumes"] for kind in volume} == {"name", "emptyDir", "configMap", "secret"} - (
        set() if "job" in {volume["name"] for volume in spec["volumes"]} else {"configMap"}
    )
    for each in all_containers(pod):
        context = each["securityContext"]
        assert context["runAsNonRoot"] and context["readOnlyRootFilesystem"]
        assert context["allowPrivilegeEscalation"] is False and context["privileged"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}


@every_pod
def test_a_container_has_limits_and_what_stays_is_probed(pod):
    for each in all_containers(pod):
        assert set(each["resources"]["limits"]) >= {"cpu", "memory"}
        assert each["resources"]["requests"] == each["resources"]["limits"]
        if each in pod["spec"]["containers"] or each.get("restartPolicy") == "Always":
            asked = [each[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")]
            (port,) = {get["port"] for get in asked}
            assert any(word.endswith(f"0.0.0.0:{port}") for word in each["command"])
            assert asked[0] == asked[1] != asked[2]


@every_pod
def test_every_mount_has_a_volume_and_every_volume_a_mount(pod):
    mounts = [mount for each in all_containers(pod) for mount in each["volumeMounts"]]
    assert {mount["name"] for mount in mounts} == {volume["name"] for volume in pod["spec"]["volumes"]}
    read_only = {m["name"] for m in mounts if m.get("readOnly")}
    assert read_only >= {"secret"} and "tmp" not in read_only
    assert "/tmp" in {mount["mountPath"] for mount in mounts}


def selects(selector, labels):
    """Whether a selector is for pods with these labels."""
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        each["operator"] == "In" and labels.get(each["key"]) in each["values"]
        for each in selector.get("matchExpressions", ())
    )


def let_in(labels, source):
    """Ports at which pods of these labels take connections of pods with the labels `source`."""
    policies = [each["spec"] for each in OBJECTS if each["kind"] == "NetworkPolicy"]
    mine = [policy for policy in policies if selects(policy["podSelector"], labels)]
    assert mine and all(policy["policyTypes"] == ["Ingress"] for policy in mine), f"{labels} is open to all"
    return {
        (port["port"], port.get("endPort", port["port"]))
        for policy in mine
        for rule in policy["ingress"]
        for port in rule["ports"]
        if any(selects(peer["podSelector"], source) for peer in rule["from"])
    }


def test_only_what_is_needed_is_let_in():
    labels = {
        pod["metadata"]["labels"]["app.kubernetes.io/component"]: pod["metadata"]["labels"] for pod in PODS.values()
    }
    chosen, join = (32_768, 60_999), (7070, 7070)
    assert set(labels) == {"head", "trainer", "shard", "replica"}
    for source in labels.values():
        assert let_in(labels["head"], source) == {join, chosen}
        assert let_in(labels["trainer"], source) == let_in(labels["shard"], source) == {chosen}
        assert let_in(labels["replica"], source) == set()
    client, stranger = {"headrace/client": "clicks"}, {**labels["shard"], "app.kubernetes.io/instance": "news"}
    assert let_in(labels["replica"], client) == {(8090, 8090)}
    assert all(let_in(each, stranger) == set() for each in labels.values())
    assert all(let_in(labels[name], client) == set() for name in ("head", "trainer", "shard"))


def test_the_figures_of_a_job_are_for_prometheus_of_one_namespace_if_it_is_named():
    objects = objects_of(settings=replace(ALL, metrics_from="monitoring"))
    policy, job = (each for each, closed in zip(objects, OBJECTS, strict=True) if each != closed)
    assert [each["metadata"]["name"] for each in (policy, job)] == ["clicks-head"] * 2
    (rule,) = [each for each in policy["spec"]["ingress"] if each not in OBJECTS[1]["spec"]["ingress"]]
    assert rule == {
        "from": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
        "ports": [{"protocol": "TCP", "port": 8083}],
    }
    template = job["spec"]["template"]
    (launcher,) = template["spec"]["containers"]
    assert "--metrics=0.0.0.0:8083" in launcher["command"]
    assert launcher["ports"] == [{"name": "metrics", "containerPort": 8083}]
    assert template["metadata"]["annotations"]["prometheus.io/port"] == "8083"
    assert template["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == "clicks"
    for version in VERSIONS:
        kubernetes_validate.validate(policy, version, strict=True)
        kubernetes_validate.validate(job, version, strict=True)


def test_an_elastic_job_begins_with_its_least_pods_and_lets_the_others_go():
    objects = objects_of("cluster.trainers={min=2,max=5}", "cluster.shards=2")
    assert sum(each["spec"]["parallelism"] for each in objects if each["kind"] == "Job") == 7
    kinds = {each["kind"]: each["spec"] for each in objects if each["metadata"]["name"] == "clicks"}
    assert kinds["PodGroup"]["minMember"] == 4 and kinds["PodDisruptionBudget"]["minAvailable"] == 3


def test_readers_are_a_job_of_their_own_that_trainers_may_call():
    objects = objects_of("cluster.readers=3", "cluster.resources.reader={cores=4,memory='2GiB'}")
    (readers,) = (each for each in objects if each["metadata"]["name"] == "clicks-readers")
    assert readers["spec"]["completions"] == 3
    (container,) = readers["spec"]["template"]["spec"]["containers"]
    assert "--role=reader" in container["command"] and container["resources"]["limits"]["cpu"] == "4"
    (policy,) = (each for each in objects if each["metadata"]["name"] == "clicks-workers" and "ingress" in each["spec"])
    chosen = {"key": "app.kubernetes.io/component", "operator": "In", "values": ["trainer", "shard", "reader"]}
    assert chosen in policy["spec"]["podSelector"]["matchExpressions"]
    for version in VERSIONS:
        kubernetes_validate.validate(readers, version, strict=True)
    with pytest.raises(SpecError, match="resources.reader.memory"):
        objects_of("cluster.readers=3")


@pytest.mark.parametrize("namespace", ["", "Monitoring", "a" * 64, "-a"])
def test_figures_are_for_a_namespace_that_can_be(namespace):
    with pytest.raises(SpecError, match="--metrics-from: '.*' is not the name of a namespace"):
        objects_of(settings=replace(ALL, metrics_from=namespace))
    assert objects_of(settings=replace(ALL, metrics_from="0" * 63))


@every_pod
def test_a_budget_is_for_every_pod(pod):
    budgets = [each["spec"] for each in OBJECTS if each["kind"] == "PodDisruptionBudget"]
    assert len([each for each in budgets if selects(each["selector"], pod["metadata"]["labels"])]) == 1


def test_the_gang_is_all_that_trains():
    (group,) = [each for each in OBJECTS if each["kind"] == "PodGroup"]
    jobs = [each["spec"] for each in OBJECTS if each["kind"] == "Job"]
    assert group["spec"] == {"minMember": sum(job["parallelism"] for job in jobs), "queue": "learn"}
    gang = {"scheduling.k8s.io/group-name": group["metadata"]["name"]}
    assert all(job["template"]["metadata"]["annotations"] == gang for job in jobs)
    assert {job["template"]["spec"]["schedulerName"] for job in jobs} == {"volcano"}
    without = objects_of(settings=ManifestSettings())
    assert "PodGroup" not in {each["kind"] for each in without} and "volcano" not in yaml_text({"all": without})


def test_the_head_has_time_to_drain():
    head = PODS["clicks-head"]["spec"]
    assert head["terminationGracePeriodSeconds"] == HEAD_GRACE_S > LIMITS.drain_s + LIMITS.finish_s
    assert [each["restartPolicy"] for each in head["initContainers"][1:]] == ["Always"], "rank 0 is ended last"


def test_a_small_job_has_its_workers_at_the_head():
    small = objects_of(*EMBEDDED, settings=ManifestSettings())
    assert [*pods_of(small)] == ["clicks-head"]
    assert "--set" in pods_of(small)["clicks-head"]["spec"]["containers"][0]["command"]


def test_small_files_travel_and_a_change_of_the_job_file_is_seen(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "generator.py").write_text("print('hello')\n")
    (tmp_path / "own" / "towers.py").write_text("class Tower: pass\n")
    text = JOB.read_text().replace('["cat"]', '["python", "generator.py"]')
    (tmp_path / "job.toml").write_text(text.replace('name = "lr"', 'class = "own.towers:Tower"'))
    objects = objects_of(job=tmp_path / "job.toml")
    (data,) = [each["data"] for each in objects if each["kind"] == "ConfigMap"]
    assert data["generator.py"] == "print('hello')\n" and data["own__towers.py"] == "class Tower: pass\n"
    volumes = pods_of(objects)["clicks-trainers"]["spec"]["volumes"]
    (items,) = [each["configMap"]["items"] for each in volumes if each["name"] == "job"]
    assert {"key": "own__towers.py", "path": "own/towers.py"} in items
    (worker,) = pods_of(objects)["clicks-trainers"]["spec"]["containers"]
    files = {each["mountPath"]: each["subPath"] for each in worker["volumeMounts"] if each["name"] == "job"}
    names = "job.toml", "generator.py", "own/towers.py"
    assert files == {f"/srv/job/{name}": name for name in names}, "a whole ConfigMap is a folder of links"
    (tmp_path / "generator.py").write_text("#" * MAX_BYTES)
    with pytest.raises(SpecError, match="put large files into the image"):
        objects_of(job=tmp_path / "job.toml")


def test_a_file_of_the_pipe_that_is_not_there_is_named(tmp_path):
    (tmp_path / "job.toml").write_text(JOB.read_text().replace('["cat"]', '["python", "-u", "generator.py", "--x.py"]'))
    with pytest.raises(SpecError, match=r"^pipe.command.2: 'generator.py' is not in .*, so pods would not have it"):
        objects_of(job=tmp_path / "job.toml")
    (tmp_path / "job.toml").write_text(JOB.read_text().replace('["cat"]', '["python", "/opt/generator.py"]'))
    assert objects_of(job=tmp_path / "job.toml"), "the image has it"
    with pytest.raises(SpecError, match="--set: @a.json is a file that pods do not have"):
        objects_of("@a.json", job=tmp_path / "job.toml")
    columns = 'kind = "columns"\nformat = "avro"\nschema_file = "event.avsc"'
    (tmp_path / "job.toml").write_text(JOB.read_text().replace('command = ["cat"]', columns))
    with pytest.raises(SpecError, match=r"^pipe.schema_file: 'event.avsc' is not in "):
        objects_of(job=tmp_path / "job.toml")


KAFKA = 'sources.lines={kind="kafka",topics=["t"],options={bootstrap_servers="b:9092",%s}}'
PREDICT = 'predict={%s,output="%s",input={paths=["a"],root="%s"}}'
REFUSED = {
    "name=Clicks": "name: 'Clicks' cannot be in names of Kubernetes",
    "cluster.launcher=local": "cluster.launcher: is 'local': pods join the launcher; set \"external\"",
    "cluster.listen=10.0.0.1:7070": "cluster.listen: is '10.0.0.1:7070': nobody knows the address of a pod before",
    "cluster.listen=0.0.0.0:0": 'set "0.0.0.0:7070"',
    "cluster.listen=0.0.0.0:8083": "cluster.listen: is '0.0.0.0:8083', and the head uses that port itself",
    "cluster.resources.shard.memory=0": "cluster.resources.shard.memory: is not set",
    'store={path="/srv/store/s",parts="shared"}': "store.parts: is 'shared': disks of pods go with them",
    "store.path=store": "store.path: is 'store': set an absolute path",
    'sources.lines={kind="files",paths=["*.txt"]}': "sources.lines.paths: are not in a pod: set root",
    KAFKA % 'sasl_plain_password="hunter2"': "sasl_plain_password: is written in the job file",
    KAFKA % 'sasl_plain_password={file="secret"}': "sasl_plain_password: names a file",
    KAFKA % 'ssl_cafile="ca.pem"': "ssl_cafile: names a file",
    'exports.serving={base="1h"}': "exports.serving.path: is a folder of a pod",
    PREDICT % ('on="here"', "s3://b/p", "s3://b/e"): 'predict.on: is "here"',
    PREDICT % ('on="cluster"', "out", "s3://b/e"): "predict.output: is a folder of a pod",
    'predict={on="cluster",output="s3://b/p",input={paths=["a"]}}': "predict.input.paths: are files that pods do not",
}


@pytest.mark.parametrize("override", REFUSED)
def test_what_does_not_work_in_pods_is_refused(override):
    with pytest.raises(SpecError) as refused:
        render_job(JOB, (override,), ALL)
    assert REFUSED[override] in str(refused.value) and "hunter2" not in str(refused.value)


CLASSES = (
    'slots=[{names=["user","item"]},{name="next",kind="meta",type="uint64"}]',
    'tasks=[{name="next",label="next",loss="softmax"}]',
)
MODEL = 'model={name="next_item",settings={classes=100,'


@pytest.mark.parametrize("mode", ['mode="full"', 'mode="divided"', 'mode="sampled",samples=9,recall_at=[]'])
def test_replicas_follow_a_job_of_many_items_wherever_these_are(mode):
    given = *CLASSES, MODEL + mode + "}}", 'dense.optimizer={kind="adagrad"}'
    assert any("replica" in name for name in render_job(JOB, given, ALL))


def test_secrets_are_named_and_not_shown():
    objects = objects_of(KAFKA % 'sasl_plain_password={env="KAFKA_PASSWORD"}')
    assert "Secret" not in {each["kind"] for each in objects}
    text = yaml_text({"all": objects})
    assert set(re.findall(r"secretName: (\S+)", text)) == {"clicks-identity", "clicks-replica"}
    assert {"name": "clicks-environment", "optional": True} in [
        each["secretRef"]
        for pod in pods_of(objects).values()
        for c in all_containers(pod)
        for each in c.get("envFrom", ())
    ]


def test_the_command_writes_a_file_each_and_only_into_an_empty_folder(tmp_path):
    words = ["render", "kubernetes", str(JOB), "--namespace", "training", "--replicas", "2", "--queue", "learn"]
    done = CliRunner().invoke(cli, [*words, "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    texts = [path.read_text() for path in sorted((tmp_path / "out").iterdir())]
    assert "---\n".join(texts) == (GOLDEN / "manifests.yaml").read_text()
    assert CliRunner().invoke(cli, words).output == (GOLDEN / "manifests.yaml").read_text()
    (tmp_path / "out" / "mine.yaml").touch()
    refused = CliRunner().invoke(cli, [*words, "--out", str(tmp_path / "out")])
    assert isinstance(refused.exception, SpecError) and "mine.yaml" in str(refused.exception)
