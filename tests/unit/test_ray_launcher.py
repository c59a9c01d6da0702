"""The Ray launcher: which attempt to place the workers an event of the connection concerns."""

import pytest

from headrace.identity.authority import open_authority
from headrace.identity.join_token import FILE, open_token
from headrace.service.cluster import ray_launcher
from headrace.service.cluster.external import JoinPoint
from headrace.service.cluster.ray_launcher import RayLauncher
from headrace.service.cluster.runtime import WorkerRole
from tests.fakes.launch import fake_worker


class Connection:
    """A connection that never reaches a cluster, and ends when it is told."""

    def __init__(self, address, on_event):
        self.on_event, self.gone, self.silent_s, self.requests = on_event, False, 0.0, []

    def request(self, request):
        self.requests.append(request)

    def close(self):
        """As the real one does: the end is told before this returns."""
        self.on_event({"gone": "the connection has ended"})


@pytest.fixture
def connections(monkeypatch):
    made = []

    def connect(address, on_event):
        made.append(Connection(address, on_event))
        return made[-1]

    monkeypatch.setattr(ray_launcher, "RayConnection", connect)
    return made


@pytest.fixture
def launcher(connections, tmp_path):
    authority = open_authority(tmp_path, "job")
    open_token(tmp_path, authority)
    known = {"token_file": tmp_path / FILE, "authority": authority, "certifies": False}
    point = JoinPoint(listen="127.0.0.1:0", node_timeout_s=3.0, **known)
    with RayLauncher(point, "10.0.0.1:6379") as launcher:
        yield launcher


def test_the_end_of_a_connection_concerns_the_attempt_that_was_asked_of_it(
    launcher, connections, tmp_path, monkeypatch
):
    """The next attempt is not made again for it."""
    monkeypatch.setattr(ray_launcher, "AGAIN_S", 0.0)
    specs = [fake_worker(tmp_path, tmp_path / "run", WorkerRole.TRAINER, 0, [])]
    launcher.prepare(specs, 1)
    connections[0].gone = True
    launcher.prepare(specs, 2)
    launcher.waits_for()
    assert [[asked["attempt"] for asked in each.requests] for each in connections] == [[1], [2]]
    connections[1].gone = True
    connections[1].on_event({"gone": "no route"})
    assert launcher.waits_for() == "waits for the Ray cluster at 10.0.0.1:6379: no route; this is tried again"
    assert [asked["attempt"] for asked in connections[2].requests] == [3]
