"""The commands of rendered manifests, run as pods would: a machine each, the head by the name of its Service."""

import json
import os
import re
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from headrace.config import validate
from headrace.deadline import Deadline
from headrace.service.kubernetes.config import ManifestSettings
from headrace.service.kubernetes.manifests import render_job, render_prediction
from headrace.service.kubernetes.pod_settings import PodSettings
from headrace.service.kubernetes.prediction_pod import PredictionRun
from tests import s3_server
from tests.integration.stream_job import SPEC, headrace, write_job
from tests.machines.external_job import object_store
from tests.machines.network import CommandFailed
from tests.machines.pods import PodMachine, templates
from tests.machines.test_external import compared

pytestmark = pytest.mark.long
PATH = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **s3_server.ENVIRONMENT}
EVERY_3 = 'commit={every="600s", every_passes=3, keep=2}'
TWO_BY_ONE = "cluster.trainers=2", "cluster.shards=1"
SLOW_PIPE = 'pipe.command=["sh", "-c", "sleep 0.5; exec cat"]'
SOURCE = 'kind = "files"\n'
CLUSTER = """
[cluster]
trainers = 2
shards = 1
launcher = "external"
listen = "0.0.0.0:7070"
interface = "eth0"
trust_interface = true
resources.trainer = { cores = 1, memory = "2GiB" }
resources.shard = { cores = 1, memory = "2GiB" }
"""
STORE = """
[store]
path = "/srv/headrace/store"
parts = "object"
log_mirror = "sync"
mirror = """
PUT = """
import sys
from pathlib import Path
import httpx
for path in sorted(Path("/tmp/events").iterdir()):
    httpx.put(f"{sys.argv[1]}/bucket/events/{path.name}", content=path.read_bytes(), timeout=60).raise_for_status()
"""
ASK = """
import sys, urllib.request
url, *token = sys.argv[1:]
asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {each}" for each in token})
answer = urllib.request.urlopen(asked, timeout=5)
print(answer.status, answer.read().decode())
"""
NUM_LINES = 1500
AWHILE_S, ASK_AGAIN_S = 200.0, 0.5
"""Each start of a generation takes some 15 seconds of a core, which others may use, too; so does each question."""
ASKER_TOKEN = "of-those-who-ask-a-replica"


@pytest.fixture
def stored(machines):
    """Four machines for pods, and the place of a job and of its events in an object store on a fifth one."""
    *for_pods, disk = machines(5)
    with object_store(disk) as address:
        (disk.tmp / "events").mkdir()
        write_job(disk.tmp / "events", num_lines=NUM_LINES).unlink()
        events = address("events")
        port = events.partition("%3A")[2].partition("&")[0]
        disk.call(sys.executable, "-c", PUT, f"http://{disk.address}:{port}")
        yield for_pods, events, address("of-the-job")


@contextmanager
def pods_of(stored, tmp_path, *settings):
    """A pod on each machine: head, trainer, shard, replica. The Secrets are made as the documentation says."""
    machines, events, mirror = stored
    (tmp_path / "pods").mkdir()
    job = tmp_path / "pods" / "job.toml"
    spec = SPEC.replace(SOURCE, f'{SOURCE}root = "{events}"\n').partition("[store]")[0]
    job.write_text(f"{EVERY_3}\n{spec}{CLUSTER}{STORE}{mirror!r}\n")
    token = headrace(job, store=str(tmp_path / "identity"), command="join-token")
    assert token.code == 0, token.output
    manifests = render_job(job, settings, ManifestSettings(metrics_from="monitoring", replicas=1))
    objects = [yaml.safe_load(text) for text in manifests.values()]
    files = {each.name: each.read_text() for each in (tmp_path / "identity" / "identity").iterdir()}
    secrets = {
        "small-identity": files,
        "small-environment": s3_server.ENVIRONMENT,
        "small-replica": {"token": ASKER_TOKEN},
    }
    texts = {each["metadata"]["name"]: each["data"] for each in objects if each["kind"] == "ConfigMap"}
    hosts = {"small-head": machines[0].address}
    pods = [
        PodMachine(machine, template, texts, secrets, hosts, PATH)
        for machine, template in zip(machines, templates(objects), strict=True)
    ]
    try:
        yield pods
    finally:
        for pod in pods:
            pod.die()


def of_loopback(tmp_path, *settings):
    """What the job reports on one machine."""
    write_job(tmp_path, num_lines=NUM_LINES)
    ended = headrace(tmp_path / "job.toml", EVERY_3, *TWO_BY_ONE, *settings, timeout_s=AWHILE_S)
    assert ended.code == 0, ended.output
    return compared(ended.report)


def report_of(head):
    return compared(yaml.safe_load(head.machine.call("cat", "/srv/headrace/store/report.json")))


@pytest.mark.timeout(600)
def test_the_pods_of_a_job_end_with_the_digest_of_loopback(stored, tmp_path):
    expected = of_loopback(tmp_path)
    with pods_of(stored, tmp_path) as pods:
        # 1. The head alone: alive, not ready, and it says whom it waits for. Its figures are there for others.
        head, *others, _ = pods
        _, launcher = head.start()
        launcher.until("waits for 2 of 3 workers: trainer-1, shard-0")
        assert "200" in probed(head, 8081, "/live") and "503" in probed(head, 8081, "/ready")
        assert "200" in probed(head, 8082, "/live") and "503" in probed(head, 8082, "/ready")
        figures = probed(head, 8083, "/metrics", others[0])
        assert 'headrace_restarts_total{job="small"} 0.0' in figures
        assert "404" in probed(head, 8083, "/v1/jobs")

        # 2. The others: the job ends, and so do all of its containers.
        for pod in others:
            pod.start()
        assert launcher.end(AWHILE_S) == 0, launcher.said
        assert [output.end() for pod in (head, *others) for output in pod.outputs] == [0] * 4
        assert report_of(head) == expected


@pytest.mark.timeout(1200)
def test_pods_that_die_are_made_again_and_the_job_learns_the_same(stored, tmp_path):
    """First the shard's pod dies, then the head's; whatever ends because of it is made again by its Job, too.

    A hundred passes of half a second at least, so that the job does not end before. A new head has the address of the
    old one here. A replica follows the job, whatever dies, and outlives it.
    """
    passes = "passes.max_events=40"
    expected = of_loopback(tmp_path, passes)
    with pods_of(stored, tmp_path, passes, SLOW_PIPE) as pods:
        *workers, replica = pods
        head, _, shard = workers
        for pod in pods:
            pod.start()
        until_trains(head, workers, generation=1)
        first = until_serves(replica, 1)
        shard.die()
        until_trains(head, workers, generation=2)
        second = until_serves(replica, first + 1)
        head.die()
        deadline = Deadline.after(2 * AWHILE_S)
        while any(pod.outputs[-1].process.poll() != 0 for pod in workers):
            made_again(workers)
            deadline.check("; ".join(pod.outputs[-1].said for pod in workers))
        found = report_of(head)
        kept = found.keys() - {"halves"}  # predictions were on the disk of the first head
        assert {key: found[key] for key in kept} == {key: expected[key] for key in kept}
        until_serves(replica, second)
        assert "HTTP Error 401" in probed(replica, 8090, "/metrics", head), "without its token"


SHARED = """
[store]
path = "/srv/headrace/store"
"""


@pytest.fixture
def folders():
    """Folders of persistent volumes, with the events and a store, which are no part of any machine's /tmp."""
    with tempfile.TemporaryDirectory(prefix="headrace-", dir="/var/tmp") as path:
        for each in ("events", "store"):
            (Path(path) / each).mkdir()
        write_job(Path(path) / "events", num_lines=NUM_LINES).unlink()
        yield {f"small-{each}": f"{path}/{each}" for each in ("events", "store")}


@pytest.mark.timeout(600)
def test_pods_with_volumes_learn_the_same_and_another_pod_predicts(machines, folders, tmp_path):
    """Store, events and predictions are on volumes that pods share, so there is no object store."""
    expected = of_loopback(tmp_path)
    (tmp_path / "pods").mkdir()
    job = tmp_path / "pods" / "job.toml"
    spec = SPEC.replace('"part-*.txt"', '"/srv/events/part-*.txt"').partition("[store]")[0]
    job.write_text(f"{EVERY_3}\n{spec}{CLUSTER}{SHARED}")
    token = headrace(job, store=str(tmp_path / "identity"), command="join-token")
    assert token.code == 0, token.output
    own = {"store": {"claim": "small-store"}, "events": {"claim": "small-events", "at": "/srv/events"}}
    settings = ManifestSettings(pods=validate(PodSettings, {"volumes": own}))
    words = ["--input", "/srv/events/part-*.txt", "--output", "/srv/headrace/predictions"]
    run = PredictionRun(name="all", words=words, output=words[-1], inputs=words[1:2], version="live")
    files = {each.name: each.read_text() for each in (tmp_path / "identity" / "identity").iterdir()}
    secrets = {"small-identity": files, "small-environment": {}}
    head, *others = four = machines(4)
    hosts = {"small-head": head.address}

    def started(manifests, places):
        objects = [yaml.safe_load(text) for text in manifests.values()]
        texts = {each["metadata"]["name"]: each["data"] for each in objects if each["kind"] == "ConfigMap"}
        pods = [
            PodMachine(machine, template, texts, secrets, hosts, PATH, folders)
            for machine, template in zip(places, templates(objects), strict=True)
        ]
        return [output for pod in pods for output in pod.start()]

    try:
        outputs = started(render_job(job, (), settings), four[:3])
        _, launcher, *_ = outputs  # its first line is a minute late where kernels are compiled
        assert launcher.end(AWHILE_S) == 0, launcher.said
        assert [output.end() for output in outputs] == [0] * 4, [output.said for output in outputs]
        report = json.loads((Path(folders["small-store"]) / "store" / "report.json").read_text())
        found = compared(report)
        named = {f"/srv/events/{name}": at for name, at in expected.pop("positions").items()}
        assert found.pop("positions") == named and found == expected
        (predicted,) = started(render_prediction(job, (), settings, run), others[2:])
        assert predicted.end(AWHILE_S) == 0, predicted.said
        written = pq.read_table(Path(folders["small-store"]) / "predictions")
        assert written.num_rows == report["samples"]
    finally:
        for machine in four:
            machine.die()


def made_again(pods):
    """A moment of the Jobs' controller."""
    for pod in pods:
        pod.make_again()
    time.sleep(ASK_AGAIN_S)


def until_trains(head, pods, generation):
    """Wait until a generation of the workers, this one or a later one, has trained."""
    deadline = Deadline.after(AWHILE_S)
    while True:
        made_again(pods)
        assert head.outputs[-1].process.poll() != 0, "the job has ended before a pod was killed"
        figures = dict(re.findall(r'(headrace_\w+\{job="small"[^}]*\}) (\S+)', probed(head, 8083, "/metrics")))
        trains = figures.get('headrace_state{job="small",state="training"}') == "1.0"
        if trains and float(figures.get('headrace_generation{job="small"}', 0)) >= generation:
            return
        deadline.check(head.outputs[-1].said)


def until_serves(replica, version):
    """Wait until a replica takes requests, by this version of the job or a later one; its version."""
    deadline = Deadline.after(AWHILE_S)
    while True:
        figures = probed(replica, 8090, "/metrics", token=ASKER_TOKEN)
        found = re.search(r"^headrace_replica_version\{.*\} (\S+)", figures, re.MULTILINE)
        ready = probed(replica, 8090, "/v2/health/ready").startswith("200 ")
        if ready and found and float(found[1]) >= version:
            return float(found[1])
        deadline.check(replica.outputs[-1].said)
        time.sleep(ASK_AGAIN_S)


def probed(pod, port, path, asker=None, token=None):
    """An answer of a pod, or the error. `asker`: the pod that asks; None: itself."""
    url, tokens = f"http://{pod.machine.address}:{port}{path}", [] if token is None else [token]
    try:
        return (asker or pod).machine.call(sys.executable, "-c", ASK, url, *tokens)
    except CommandFailed as error:
        return str(error)
