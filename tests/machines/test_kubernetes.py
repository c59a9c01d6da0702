"""The commands of rendered manifests, run as pods would: a machine each, the head by the name of its Service."""

import os
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from service.kubernetes.config import ManifestSettings
from service.kubernetes.manifests import render_job
from tests import s3_server
from tests.integration.stream_job import SPEC, millrace, write_job
from tests.machines.external_job import object_store
from tests.machines.network import CommandFailed
from tests.machines.pods import PodMachine, templates
from tests.machines.test_external import compared

pytestmark = pytest.mark.long
PATH = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **s3_server.ENVIRONMENT}
EVERY_3 = 'commit={every="600s", every_passes=3, keep=2}'
TWO_BY_ONE = "cluster.trainers=2", "cluster.shards=1"
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
path = "/srv/millrace/store"
parts = "object"
log_mirror = "sync"
mirror = """
PUT = """
import sys
from pathlib import Path
import httpx
for path in sorted(Path("/tmp/events").iterdir()):
    httpx.put(f"{sys.argv[1]}/bucket/events/{path.name}", content=path.read_bytes()).raise_for_status()
"""
ASK = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=5).status)"


@pytest.fixture
def stored(machines):
    """Three machines for pods, and the place of a job and of its events in an object store on a fourth one."""
    *for_pods, disk = machines(4)
    with object_store(disk) as address:
        (disk.tmp / "events").mkdir()
        write_job(disk.tmp / "events").unlink()
        events = address("events")
        port = events.partition("%3A")[2].partition("&")[0]
        disk.call(sys.executable, "-c", PUT, f"http://{disk.address}:{port}")
        yield for_pods, events, address("of-the-job")


def test_the_pods_of_a_job_end_with_the_digest_of_loopback(stored, tmp_path):
    machines, events, mirror = stored
    head = machines[0]
    write_job(tmp_path)
    expected = millrace(tmp_path / "job.toml", EVERY_3, *TWO_BY_ONE).report

    # 1. The manifests, and the Secrets that they name, made as the documentation says.
    (tmp_path / "pods").mkdir()
    job = tmp_path / "pods" / "job.toml"
    spec = SPEC.replace(SOURCE, f'{SOURCE}root = "{events}"\n').partition("[store]")[0]
    job.write_text(f"{EVERY_3}\n{spec}{CLUSTER}{STORE}{mirror!r}\n")
    token = millrace(job, store=str(tmp_path / "identity"), command="join-token")
    assert token.code == 0, token.output
    objects = [yaml.safe_load(text) for text in render_job(job, (), ManifestSettings()).values()]
    files = {each.name: each.read_text() for each in (tmp_path / "identity" / "identity").iterdir()}
    secrets = {"small-identity": files, "small-environment": s3_server.ENVIRONMENT}
    texts = {each["metadata"]["name"]: each["data"] for each in objects if each["kind"] == "ConfigMap"}

    # 2. The head alone: alive, not ready, and it says whom it waits for.
    hosts = {"small-head": head.address}
    pods = [
        PodMachine(machine, template, texts, secrets, hosts, PATH)
        for machine, template in zip(machines, templates(objects), strict=True)
    ]
    with ExitStack() as held:
        rank0, launcher = started(held, pods[0])
        launcher.until("waits for 2 of 3 workers: trainer-1, shard-0")
        assert probed(head, 8081, "/live") == "200" and "503" in probed(head, 8081, "/ready")
        assert probed(head, 8082, "/live") == "200" and "503" in probed(head, 8082, "/ready")

        # 3. The others: the job ends, and so do all of its containers.
        others = [output for pod in pods[1:] for output in started(held, pod)]
        assert launcher.end() == 0, launcher.said
        assert [output.end() for output in (rank0, *others)] == [0] * 3
    report = head.call("cat", "/srv/millrace/store/report.json")
    assert compared(yaml.safe_load(report)) == compared(expected)


def started(held, pod):
    outputs = pod.start()
    for output in outputs:
        held.callback(output.kill)
    return outputs


def probed(machine, port, path):
    """The status of an answer, or the error."""
    try:
        return machine.call(sys.executable, "-c", ASK, f"http://{machine.address}:{port}{path}").strip()
    except CommandFailed as error:
        return str(error)
