"""The file of pods: volumes, placement and the rest, by Kubernetes' own schemas; predictions in pods; refusals."""

import json
import tomllib
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
from headrace.service.kubernetes.manifests import render_job, render_prediction
from headrace.service.kubernetes.pod_settings import PodSettings, load_pods
from headrace.service.kubernetes.prediction_pod import PredictionRun

JOB = Path(__file__).parents[1] / "golden" / "kubernetes" / "job.toml"
VERSIONS = "1.29", "1.37"
ON_VOLUMES = (
    'store={path="/srv/headrace/store",parts="shared"}',
    'sources.lines={kind="files",paths=["/srv/events/*.txt"]}',
)
PODS = """
image_pull_secrets: [registry]
image_pull_policy: IfNotPresent
service_account: trainer
ttl_after_finished: 24h
gpu_resource: amd.com/gpu
labels: {team: ads}
annotations: {example.com/owner: ads team}
node_selector: {pool: training}
priority_class: batch
tolerations:
- {key: dedicated, value: training, effect: NoSchedule}
- {key: node.kubernetes.io/unreachable, operator: Exists, effect: NoExecute, tolerationSeconds: 30}
volumes:
  store: {create: {size: 100GiB, storage_class: nfs-client}}
  events: {nfs: {server: nfs.example, path: /exports/events}, at: /srv/events, read_only: true}
  ca: {secret: kafka-ca, at: /etc/kafka}
  tools: {config_map: tools, at: /opt/tools}
  old: {claim: old-exports, at: /srv/old}
  shm: {source: {emptyDir: {medium: Memory, sizeLimit: 2Gi}}, at: /dev/shm}
trainer:
  runtime_class: nvidia
  node_selector: {pool: gpus}
  affinity:
    nodeAffinity:
      requiredDuringSchedulingIgnoredDuringExecution:
        nodeSelectorTerms:
        - matchExpressions: [{key: gpu.model, operator: In, values: [h200]}]
      preferredDuringSchedulingIgnoredDuringExecution:
      - {weight: 10, preference: {matchExpressions: [{key: zone, operator: In, values: [a]}]}}
    podAntiAffinity:
      requiredDuringSchedulingIgnoredDuringExecution:
      - {topologyKey: kubernetes.io/hostname, labelSelector: {matchLabels: {app.kubernetes.io/component: trainer}}}
shard:
  topology_spread:
  - {maxSkew: 1, topologyKey: kubernetes.io/hostname, whenUnsatisfiable: ScheduleAnyway, nodeTaintsPolicy: Honor}
  affinity:
    podAffinity:
      preferredDuringSchedulingIgnoredDuringExecution:
      - {weight: 5, podAffinityTerm: {topologyKey: zone, labelSelector: {matchLabels: {team: ads}}}}
replica: {tolerations: []}
"""
OWN = validate(PodSettings, yaml.safe_load(PODS))
SETTINGS = ManifestSettings(namespace="training", replicas=1, queue="learn", pods=OWN)
DAY_8 = PredictionRun(
    name="day-8",
    words=["--input", "/srv/events/8/*", "--output", "/srv/old/8", "--trainers", "2"],
    output="/srv/old/8",
    inputs=["/srv/events/8/*"],
    version="live",
    trainers=2,
    shards=1,
)


def objects_of(*overrides, pods=OWN, **more):
    texts = render_job(JOB, (*ON_VOLUMES, *overrides), replace(SETTINGS, pods=pods, **more))
    return [yaml.safe_load(text) for text in texts.values()]


def prediction_of(run=DAY_8, pods=OWN):
    return [
        yaml.safe_load(text) for text in render_prediction(JOB, ON_VOLUMES, replace(SETTINGS, pods=pods), run).values()
    ]


OBJECTS = objects_of("cluster.resources.trainer.gpus=2")
ALL = [*OBJECTS, *prediction_of()]
SPECS = {
    each["metadata"]["labels"]["app.kubernetes.io/component"]: each["spec"]
    for each in (one["spec"]["template"] for one in ALL if one["kind"] in ("Job", "Deployment"))
}


def containers_of(spec):
    return [*spec.get("initContainers", ()), *spec["containers"]]


@pytest.mark.parametrize("version", VERSIONS)
def test_two_versions_of_kubernetes_know_every_key(version):
    for each in ALL:
        if each["kind"] != "PodGroup":
            kubernetes_validate.validate(each, version, strict=True)


def test_a_role_has_its_own_placement_or_else_that_of_all_pods():
    assert set(SPECS) == {"head", "trainer", "shard", "replica", "prediction"}
    assert {role: spec["nodeSelector"]["pool"] for role, spec in SPECS.items()} == {
        **dict.fromkeys(SPECS, "training"),
        "trainer": "gpus",
    }
    assert {role for role, spec in SPECS.items() if "affinity" in spec} == {"trainer", "shard"}
    assert "topologySpreadConstraints" in SPECS["shard"] and SPECS["trainer"]["runtimeClassName"] == "nvidia"
    assert "tolerations" not in SPECS["replica"], "an empty list replaces that of all pods"
    written = yaml.safe_load(PODS)
    assert SPECS["trainer"]["affinity"] == written["trainer"]["affinity"]
    assert SPECS["shard"]["topologySpreadConstraints"] == written["shard"]["topology_spread"]
    assert SPECS["head"]["tolerations"] == written["tolerations"]
    for spec in SPECS.values():
        assert spec["priorityClassName"] == "batch" and spec["serviceAccountName"] == "trainer"
        assert spec["imagePullSecrets"] == [{"name": "registry"}] and spec["automountServiceAccountToken"] is False
        assert {each["imagePullPolicy"] for each in containers_of(spec)} == {"IfNotPresent"}


def test_every_mount_has_a_volume_and_the_job_is_on_those_of_the_file():
    for role, spec in SPECS.items():
        mounts = {m["name"]: m for each in containers_of(spec) for m in each["volumeMounts"]}
        assert set(mounts) == {volume["name"] for volume in spec["volumes"]}
        if role != "replica":
            assert mounts["store"] == {"name": "store", "mountPath": "/srv/headrace"}
            assert mounts["events"] == {"name": "events", "mountPath": "/srv/events", "readOnly": True}
            (store,) = [each for each in spec["volumes"] if each["name"] == "store"]
            assert store["persistentVolumeClaim"] == {"claimName": "clicks-store"}
    (claim,) = [each for each in OBJECTS if each["kind"] == "PersistentVolumeClaim"]
    assert claim["metadata"]["name"] == "clicks-store"
    assert claim["spec"]["resources"]["requests"] == {"storage": "100Gi"}


def test_jobs_are_removed_in_time_and_own_labels_select_nothing():
    jobs = [each for each in ALL if each["kind"] == "Job"]
    assert {job["spec"]["ttlSecondsAfterFinished"] for job in jobs} == {86400}
    template = jobs[0]["spec"]["template"]["metadata"]
    assert template["labels"]["team"] == "ads" and template["annotations"]["example.com/owner"] == "ads team"
    assert "team" not in json.dumps([each for each in ALL if each["kind"] in ("NetworkPolicy", "Service")])


def test_gpus_are_of_the_resource_that_the_file_names():
    (trainer,) = SPECS["trainer"]["containers"]
    assert trainer["resources"]["limits"]["amd.com/gpu"] == trainer["resources"]["requests"]["amd.com/gpu"] == "2"
    assert "nvidia.com/gpu" not in json.dumps(ALL)


def test_a_job_with_an_object_store_has_a_disk_of_its_own_in_each_pod():
    claim = {"spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "50Gi"}}}}
    own = {"volumes": {"store": {"source": {"ephemeral": {"volumeClaimTemplate": claim}}}}}
    settings = replace(SETTINGS, pods=validate(PodSettings, own))
    for each in map(yaml.safe_load, render_job(JOB, (), settings).values()):
        if each["kind"] == "Job":
            kubernetes_validate.validate(each, VERSIONS[0], strict=True)
            assert {"name": "store", **own["volumes"]["store"]["source"]} in each["spec"]["template"]["spec"]["volumes"]


def test_other_numbers_of_workers_change_no_template(tmp_path):
    """Kubernetes takes other numbers of pods of a Job that runs, and no other template."""
    before, after = [], []
    for found, trainers in ((before, 2), (after, 4)):
        path = tmp_path / "job.toml"
        path.write_text(JOB.read_text().replace("trainers = 2", f"trainers = {trainers}"))
        found += [yaml.safe_load(text) for text in render_job(path, ON_VOLUMES, SETTINGS).values()]
    changed = [(one, other) for one, other in zip(before, after, strict=True) if one != other]
    kinds = [(one["kind"], one["metadata"]["name"]) for one, _ in changed]
    assert [*kinds] == [
        ("ConfigMap", "clicks-job"),
        ("PodDisruptionBudget", "clicks"),
        ("PodGroup", "clicks"),
        ("Job", "clicks-trainers"),
    ]
    job, grown = changed[-1]
    assert grown["spec"] == {**job["spec"], "completions": 3, "parallelism": 3}


def test_a_prediction_is_one_job_that_nobody_reaches():
    objects = prediction_of()
    assert [each["kind"] for each in objects] == ["ConfigMap", "NetworkPolicy", "Job"]
    _, policy, job = objects
    assert policy["spec"]["ingress"] == []
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"][:2] == ["headrace", "predict"] and container["command"][-6:] == list(DAY_8.words)
    assert container["resources"]["limits"] == {"cpu": "5", "memory": "24Gi"}, (
        "two trainers and the one shard, and the rows of the job's two shards"
    )


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"output": "/tmp/8"}, "--output: /tmp/8 goes with the pod"),
        ({"output": "/srv/events/8"}, "--output: /srv/events/8 goes with the pod"),
        ({"output": "/dev/shm/8"}, "--output: /dev/shm/8 goes with the pod"),
        ({"inputs": ["/data/8"]}, "--input: /data/8 is not in the pod"),
        ({"on": "cluster"}, "--on: is 'cluster', and no agent joins this pod"),
        ({"name": "Day_8"}, "--name: 'Day_8' cannot be in names of Kubernetes"),
    ],
)
def test_a_prediction_without_its_files_is_refused(changed, why):
    with pytest.raises(SpecError) as refused:
        prediction_of(replace(DAY_8, **changed))
    assert why in str(refused.value)


def test_a_job_of_a_prediction_has_a_name_that_kubernetes_takes():
    """Of the Job's name and the pod's index Kubernetes makes a host's name, at most 63 characters."""
    job, longest = "c" * 40, "d" * 20

    def rendered(name):
        return render_prediction(JOB, (*ON_VOLUMES, f"name={job}"), SETTINGS, replace(DAY_8, name=name))

    *_, made = rendered(longest).values()
    assert len(f"{yaml.safe_load(made)['metadata']['name']}-0") == 63
    with pytest.raises(SpecError, match="^--name: 'd{21}' makes with the job's name a Job's name of 62 characters"):
        rendered(longest + "d")


def test_a_prediction_has_the_store_or_an_export():
    alone = OWN.model_copy(update={"volumes": {each: OWN.volumes[each] for each in ("events", "old")}})
    with pytest.raises(SpecError, match="--version: 'live' is read in the store, which is not in the pod"):
        prediction_of(pods=alone)
    assert prediction_of(replace(DAY_8, version="s3://bucket/exports/serving"), pods=alone)


def prediction_by_command(folder, *words):
    (folder / "pods.yaml").write_text(PODS)
    kafka = 'sources.clicks={kind="kafka",topics=["t"],options={bootstrap_servers="b:9092",ssl_cafile="/etc/kafka/ca"}}'
    given = [str(JOB), "--pods", str(folder / "pods.yaml")]
    given += [word for each in (*ON_VOLUMES, kafka) for word in ("--set", each)]
    done = CliRunner().invoke(cli, ["render", "kubernetes-prediction", *given, "--", *words])
    if done.exception is not None:
        raise done.exception
    (container,) = list(yaml.safe_load_all(done.output))[-1]["spec"]["template"]["spec"]["containers"]
    assert container["command"][-len(words) :] == list(words)
    return container["resources"]["limits"]["cpu"]


INPUT, OUTPUT = ["--input", "/srv/events/8/*"], ["--output", "/srv/old/8"]


@pytest.mark.parametrize(
    ("words", "cores"),
    [
        ([*INPUT, *OUTPUT], "2"),
        (["--topic", "clicks", *OUTPUT], "2"),
        ([*INPUT, *OUTPUT, "--trainers", "3"], "7"),
        ([*INPUT, *OUTPUT, "--trainers", "3", "--shards", "2"], "8"),
        (["--root", "s3://bucket/events", "--input", "8/*.gz", "--output", "s3://bucket/8"], "2"),
    ],
)
def test_a_pod_predicts_what_the_command_does_with_its_numbers_of_workers(words, cores, tmp_path):
    assert prediction_by_command(tmp_path, *words) == cores


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([*INPUT, *OUTPUT, "--on", "cluster"], "--on: is 'cluster'"),
        ([*INPUT, *OUTPUT, "--trainers", "2", "--shards", "0"], "shards = 0 keeps the rows inside the one trainer"),
        (["--root", "s3://bucket/events", "--input", "8/*", "--output", "o"], "--output: o goes with the pod"),
        ([*INPUT, "--output", "s3://"], "--output: names no bucket"),
    ],
)
def test_a_pod_is_not_made_for_what_would_fail_in_it(words, why, tmp_path):
    with pytest.raises(SpecError) as refused:
        prediction_by_command(tmp_path, *words)
    assert why in str(refused.value)


REFUSED = {
    "node_selectr: {}": "node_selectr: unknown key; did you mean 'node_selector'?",
    "node_selector: {pool: [a]}": "node_selector.pool: ",
    "tolerations: [{value: x}]": 'tolerations.0: without key, operator must be "Exists"',
    "tolerations: [{key: a, operator: Exist}]": "tolerations.0.operator: ",
    "shard: {tolerations: [{key: a, effects: NoSchedule}]}": "shard.tolerations.0.effects: unknown key",
    "affinity: {nodeAfinity: {}}": "affinity.nodeAfinity: unknown key; did you mean 'nodeAffinity'?",
    "affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: []}}": (
        "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution: "
    ),
    "affinity: {podAffinity: {requiredDuringSchedulingIgnoredDuringExecution: [{labelSelector: {}}]}}": (
        "affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution.0.topologyKey: "
    ),
    "priority_class: A_B": "priority_class: ",
    "ttl_after_finished: 3": "ttl_after_finished: ",
    "image_pull_secrets: registry": "image_pull_secrets: ",
    "labels: {app.kubernetes.io/name: mine}": "labels: app.kubernetes.io/name is set by Headrace",
    "volumes: {job: {claim: a, at: /a}}": "volumes.job: every pod has a volume of this name",
    "volumes: {a: {claim: a}}": "volumes.a: needs at, the folder of the containers",
    "volumes: {a: {at: /a}}": "volumes.a: needs exactly one of claim, create, nfs, secret, config_map, source; it has",
    "volumes: {a: {at: /a, claim: b, secret: c}}": "volumes.a: needs exactly one of ",
    "volumes: {a: {at: /a, source: {hostPath: {path: /}}}}": "volumes.a: source is one volume source",
    "volumes: {a: {at: a, claim: b}}": "volumes.a.at: ",
    "volumes: {a: {at: /srv/job, claim: b}}": "/srv/job is the folder of another volume",
    "volumes: {a: {at: /a, claim: b}, c: {at: /a/, claim: b}}": "/a is the folder of another volume",
    "volumes: {a: {at: /a, create: {size: 5}}}": "",
    "volumes: {a: {at: /a, create: {size: 5Gi}}}": "volumes.a.create.size: ",
    "volumes: {a: {at: /a, nfs: {server: b, path: c}}}": "volumes.a.nfs.path: ",
    "[1]": "is no map of keys",
    "a: [": "is not YAML",
    "a: 2026-11-29": "is not YAML of texts, numbers, lists and maps",
}


@pytest.mark.parametrize("text", [text for text, why in REFUSED.items() if why])
def test_a_wrong_key_is_named_with_its_path(text, tmp_path):
    (tmp_path / "pods.yaml").write_text(text)
    with pytest.raises(SpecError) as refused:
        load_pods(tmp_path / "pods.yaml")
    assert REFUSED[text] in str(refused.value)


def test_the_file_may_be_toml(tmp_path):
    text = 'ttl_after_finished = "1h"\n[volumes.events]\nclaim = "events"\nat = "/srv/events"\n'
    (tmp_path / "pods.toml").write_text(text)
    assert load_pods(tmp_path / "pods.toml") == validate(PodSettings, tomllib.loads(text))
    assert load_pods(None) == PodSettings()


def volumes(**given):
    return validate(PodSettings, {"volumes": given})


EVENTS = {"claim": "events", "at": "/srv/events"}
OWN_DISKS = 'store={path="/srv/headrace/store",parts="object",mirror="s3://bucket/clicks"}'


@pytest.mark.parametrize(
    ("given", "overrides", "why"),
    [
        ({"events": EVENTS}, (), "store.parts: is 'shared': disks of pods go with them"),
        ({"store": {"claim": "a"}}, (), "sources.lines.paths: are not in a pod"),
        ({"store": {"claim": "a", "read_only": True}, "events": EVENTS}, (), "store.parts: is 'shared'"),
        ({"store": {"claim": "a", "at": "/data"}, "events": EVENTS}, (), "volumes.store.at: store.path is"),
        (
            {"store": {"create": {"size": "1GiB", "access": "ReadWriteOnce"}}, "events": EVENTS},
            (),
            'volumes.store.create.access: is "ReadWriteOnce"',
        ),
        (
            {"store": {"claim": "a"}, "events": EVENTS},
            (OWN_DISKS,),
            "volumes.store: would be one store of several pods",
        ),
        (
            {"data": {"claim": "a", "at": "/srv", "read_only": True}},
            (OWN_DISKS,),
            "volumes.data: cannot be written, and store.path is '/srv/headrace/store', on it",
        ),
        ({"store": {"secret": "a"}, "events": EVENTS}, (OWN_DISKS,), "volumes.store: cannot be written"),
        (
            {"store": {"claim": "a"}, "events": EVENTS},
            ('exports.serving={base="1h",path="/srv/exports"}',),
            "exports.serving.path: is a folder of a pod",
        ),
    ],
)
def test_a_job_whose_files_are_on_no_volume_is_refused(given, overrides, why):
    with pytest.raises(SpecError) as refused:
        objects_of(*overrides, pods=volumes(**given))
    assert why in str(refused.value)


@pytest.mark.parametrize("read_only", [True, False])
def test_the_innermost_volume_is_the_one_of_the_store(read_only):
    given = {
        "data": {"claim": "a", "at": "/srv", "read_only": read_only},
        "store": {"source": {"emptyDir": {}}},
    }
    assert objects_of(OWN_DISKS, pods=volumes(**given))


def test_exports_and_files_of_kafka_may_be_on_volumes():
    kafka = 'sources.lines={kind="kafka",topics=["t"],options={bootstrap_servers="b:9092",ssl_cafile="%s/ca.pem"}}'
    objects_of(kafka % "/etc/kafka", 'exports.serving={base="1h"}')
    with pytest.raises(SpecError, match="sources.lines.options.ssl_cafile: names a file, which a pod does not have"):
        objects_of(kafka % "/etc/other")


def test_the_commands_write_a_kustomization_of_all_of_their_files(tmp_path):
    (tmp_path / "pods.yaml").write_text(PODS)
    given = [str(JOB), "--pods", str(tmp_path / "pods.yaml"), "--namespace", "training", "--kustomize"]
    given += [word for each in ON_VOLUMES for word in ("--set", each)]
    predict = ["kubernetes-prediction", *given, "--name", "day-8"]
    for number, words in enumerate((["kubernetes", *given], predict)):
        out = tmp_path / str(number)
        options = ["--", *DAY_8.words] if words is predict else []
        done = CliRunner().invoke(cli, ["render", *words, "--out", str(out), *options])
        assert done.exit_code == 0, (done.output, done.exception)
        listed = yaml.safe_load((out / "kustomization.yaml").read_text())["resources"]
        assert sorted([*listed, "kustomization.yaml"]) == sorted(path.name for path in out.iterdir())
    written = [yaml.safe_load((tmp_path / "1" / name).read_text()) for name in listed]
    assert written == prediction_of(), "the options of `headrace predict` are parsed as it does"
    wrong = CliRunner().invoke(cli, ["render", *predict, "--out", str(tmp_path / "2"), "--", "--inputs", "x"])
    assert wrong.exit_code == 2 and "No such option" in wrong.output
    alone = CliRunner().invoke(cli, ["render", "kubernetes", *given])
    assert isinstance(alone.exception, SpecError) and "--out" in str(alone.exception)
