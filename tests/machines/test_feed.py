"""The live feed of a hosted job to other machines: over TLS, and exact after a link was cut."""

import json
import sys
import time
import tomllib
from contextlib import ExitStack

import pytest

from headrace.deadline import Deadline
from tests.integration.followed_job import FollowedJob, closes
from tests.integration.test_feed import committed
from tests.machines.feed_follower import digest_of
from tests.machines.lines import start
from tests.unit.test_access_exposure import write_pair

pytestmark = pytest.mark.long

CONFIG = """
root = "root"
listen = "{address}:8443"
[tls]
cert = "{cert}"
key = "{key}"
[allow]
pipe_commands = [["cat"]]
roots = ["data"]
interfaces = ["eth0"]
"""
ASK = """
import json, sys, httpx
url, token, method, path, body = sys.argv[1:]
headers = {"Authorization": f"Bearer {token}"}
answer = httpx.request(method, url + path, json=json.loads(body), headers=headers, verify="/tmp/home.crt", timeout=30)
print(answer.text)
answer.raise_for_status()
"""


class Service:
    """`headrace serve` on a machine, for other machines: with TLS and a token."""

    def __init__(self, held, machine):
        self.machine, self.url = machine, f"https://{machine.address}:8443/v1"
        (machine.tmp / "data").mkdir()
        write_pair(machine.tmp, "home", address=machine.address)
        config = CONFIG.format(address=machine.address, cert="/tmp/home.crt", key="/tmp/home.key")
        (machine.tmp / "service.toml").write_text(config)
        words = (sys.executable, "-m", "headrace.service", "token", "create", "test", "--role", "admin")
        self.token = machine.call(*words, "--config", "/tmp/service.toml").split()[-1]
        start(held, machine, "-m", "headrace.service", "serve", "--config", "/tmp/service.toml").until_said("serving ")

    def ask(self, method, path, body=None):
        words = (sys.executable, "-c", ASK, self.url, self.token, method, path, json.dumps(body))
        return json.loads(self.machine.call(*words))

    def follow(self, held, machine):
        """Follow the feed of the job from another machine."""
        (machine.tmp / "home.crt").write_bytes((self.machine.tmp / "home.crt").read_bytes())
        words = ("-m", "tests.machines.feed_follower", f"{self.url}/jobs/small", self.token)
        return start(held, machine, *words, environment={"SSL_CERT_FILE": "/tmp/home.crt"})


@pytest.fixture
def held():
    with ExitStack() as stack:
        yield stack


def version_told(version):
    return lambda line: line.startswith("{") and json.loads(line).get("version") == version


@pytest.mark.parametrize("shards", [pytest.param(0, marks=pytest.mark.slow), 2], ids=["embedded", "2-shards"])
def test_a_replica_of_another_machine_catches_up_exactly_after_its_link_was_cut(held, machines, shards, tmp_path):
    home, other = machines(2)
    service = Service(held, home)
    followed = FollowedJob(home.tmp / "data", 6)
    followed.follow()
    spec = tomllib.loads(followed.spec.read_text())
    del spec["store"]
    spec["cluster"] = {"shards": shards, "interface": "eth0", "trust_interface": True}
    service.ask("POST", "/jobs", {"name": "small", "spec": spec, "base": "/tmp/data"})
    store = home.tmp / "root" / "jobs" / "small" / "store"
    follower = service.follow(held, other)
    followed.arrive(2)
    follower.until(version_told(2))
    other.cut()
    followed.arrive(4)
    follower.until_said("trouble")  # a silent link is noticed
    other.heal()
    found = json.loads(follower.until(version_told(4)))
    assert not found["whole"], "what changed since, not all of it"
    followed.arrive(6)
    last = json.loads(follower.until(version_told(6)))
    service.ask("POST", "/jobs/small/drain")
    until = Deadline.after(60)
    while not (store / "report.json").exists():  # after its last commit
        until.check("the end of the job")
        time.sleep(0.05)
    version, rows, tensors = committed(store, tmp_path / "live")
    tensors = {name: value.tobytes() for name, value in tensors.items()}
    assert (last["version"], last["digest"]) == (version, digest_of(rows, tensors))
    assert max(closes(store)) == 6
