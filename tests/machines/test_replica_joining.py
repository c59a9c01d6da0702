"""A replica of a plain `headrace run` on another machine: it joins at the launcher, and holds what the job commits."""

import json
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from headrace.service.spec.launchers import EXTERNAL, LOCAL
from tests.integration.followed_job import FollowedJob
from tests.integration.test_feed import committed
from tests.machines.external_job import HEADRACE, PORT, setting
from tests.machines.feed_follower import digest_of
from tests.machines.lines import start
from tests.machines.test_feed import version_told
from tests.machines.test_secure_wire import PLAIN_CALL, SCAN

pytestmark = pytest.mark.long
REPLICA = ("replica", "--feed-token-file", "token", "--listen", "127.0.0.1:0")


@pytest.fixture
def held():
    with ExitStack() as stack:
        yield stack


def options(head, shards, launcher):
    at = f"{head.address}:{PORT}"
    cluster = {"interface": "eth0", "trust_interface": True, "listen": at, "shards": shards, "launcher": launcher}
    return setting([f"cluster.{name}={json.dumps(value)}" for name, value in cluster.items()])


def join_token(head, *words):
    return head.call(sys.executable, *HEADRACE, "join-token", "job.toml", *words)


def give(machine, token):
    path = machine.tmp / "token"
    path.touch(0o600)
    path.write_text(token)


def process_of(machine, worker):
    """The number of a worker's process on a machine."""
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in machine.processes()}
    (found,) = [pid for pid, line in lines.items() if line.rstrip("\0").endswith(f"/{worker}.json")]
    return found


@pytest.mark.parametrize(
    ("launcher", "shards"), [pytest.param(LOCAL, 0, marks=pytest.mark.slow), (LOCAL, 2), (EXTERNAL, 1)]
)
def test_a_replica_joins_at_the_launcher_and_follows_its_generations(held, machines, launcher, shards, tmp_path):
    head, other, strange = machines(3)
    followed = FollowedJob(head.tmp, 6)
    followed.follow()
    words, at = options(head, shards, launcher), f"{head.address}:{PORT}"
    stale = join_token(head, *words)
    token = join_token(head, "--rotate", *words)
    for machine, given in ((strange, stale), (other, token), (head, token)):
        give(machine, given)
    job = start(held, head, *HEADRACE, "run", "job.toml", *words)
    if launcher == LOCAL:
        job.until_said(
            f"answers replicas at {at}; `headrace replica --join {at} --feed-token-file /tmp/store/identity/"
        )
    else:
        job.until_said("waits for 2 of 2 workers")
        for _ in range(2):
            start(held, head, *HEADRACE, "worker", "--join", at, "--token-file", "token")
    follower = start(held, other, "-m", "tests.machines.feed_follower", at, "/tmp/token")
    replica = start(held, other, *HEADRACE, *REPLICA, "--join", at)
    refused = start(held, strange, *HEADRACE, *REPLICA, "--join", at)
    refused.until_said("the join token is not valid: it was rotated, or it is of another job")
    assert strange.call(sys.executable, "-c", SCAN, at) == ""
    assert strange.call(sys.executable, "-c", PLAIN_CALL, at) == "UNAVAILABLE\n"
    followed.arrive(2)
    follower.until(version_told(2))
    replica.until_said("serving version")
    os.kill(process_of(head, "trainer-0"), signal.SIGKILL)
    job.until_said("restarting, 1 of 5")
    followed.arrive(6)
    last = json.loads(follower.until(version_told(6)))
    job.process.send_signal(signal.SIGINT)  # nsenter has become the launcher
    assert job.end()[0] == 0, job.said
    version, rows, tensors = committed(head.tmp / "store", tmp_path / "live")
    tensors = {name: value.tobytes() for name, value in tensors.items()}
    assert (last["version"], last["digest"]) == (version, digest_of(rows, tensors))
    for reason in ("the join token is not valid", "a port scan?", "does not speak TLS"):
        assert f"refused {strange.address}: " in "".join(job.said) and reason in "".join(job.said)
