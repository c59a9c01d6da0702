"""The Role service over a real loopback connection."""

import math
import stat
import threading

import pytest

from headrace.deadline import Deadline
from headrace.errors import DeadlineExceeded, HeadraceError, NotYet, Refused, SpecError, Unavailable
from headrace.rpc import channels
from headrace.rpc.role import RoleClient, serve_role


@pytest.fixture
def world(tmp_path):
    class World:
        status = {"job": "news", "state": "training"}
        drains = commits = 0
        answer = staticmethod(lambda: None)
        socket = tmp_path / "trainer-0.socket"

        def say(self):
            self.answer()
            return self.status

        def drain(self):
            self.drains += 1

        def commit(self):
            self.commits += 1

    world = World()
    with serve_role(world.say, world.drain, "secret", world.socket, world.commit) as server:
        world.server = server
        world.client = RoleClient(server.address, "secret")
        yield world
        world.client.close()


def soon():
    return Deadline.after(10)


def test_a_status_arrives_as_it_was_given(world):
    world.status = {"job": "news", "lag": {"f:0": 3}, "metrics": {"life": {"ctr": {"auc": 0.75}}}, "learning": True}
    assert world.client.status(soon()) == world.status


def test_numbers_that_are_none_arrive_as_null_at_any_depth(world):
    world.status = {"loss": math.nan, "list": (1.0, math.inf), "deep": {"auc": -math.inf}, 7: 1}
    assert world.client.status(soon()) == {"loss": None, "list": [1.0, None], "deep": {"auc": None}, "7": 1}


def test_drain_raises_the_flag_once_a_call(world):
    world.client.drain(soon())
    world.client.drain(soon())
    assert world.drains == 2


def test_commit_raises_the_flag_of_a_rank0(world):
    world.client.commit(soon())
    assert (world.commits, world.drains) == (1, 0)


def test_a_rank0_answers_refuses_or_asks_for_another_try(tmp_path):
    def answer(request):
        match request:
            case {"do": "fail"}:
                raise SpecError("is too large", "a.b")
            case {"do": "too much"}:
                raise HeadraceError("is too much")
            case {"do": "wait"}:
                raise NotYet("counting")
        return {"heard": request, "auc": math.nan}

    with serve_role(dict, print, "secret", tmp_path / "socket", answer=answer) as server:
        client = RoleClient(server.address, "secret")
        assert client.operate({"do": "x", "n": [1]}, soon()) == {"heard": {"do": "x", "n": [1]}, "auc": None}
        with pytest.raises(SpecError, match=r"^a\.b: is too large$"):
            client.operate({"do": "fail"}, soon())
        with pytest.raises(HeadraceError, match="^is too much$") as refused:
            client.operate({"do": "too much"}, soon())
        assert refused.value.exit_code == 1, "a wish that is right, and cannot be"
        with pytest.raises(NotYet, match="^counting$"):
            client.operate({"do": "wait"}, soon())
        client.close()


def test_a_worker_that_leads_no_job_has_no_answers(world):
    with pytest.raises(Refused, match="leads no job"):
        world.client.operate({}, soon())


def test_a_worker_that_leads_no_commits_refuses_to(world, tmp_path):
    with serve_role(world.say, world.drain, "secret", tmp_path / "shard-0.socket") as shard:
        client = RoleClient(shard.address, "secret")
        with pytest.raises(Refused, match="this worker leads no commits"):
            client.commit(soon())
        client.close()
    assert world.commits == 0


def test_only_its_owner_reaches_the_socket_of_the_server(world):
    assert world.server.address == f"unix:{world.socket}"
    assert stat.S_IMODE(world.socket.stat().st_mode) == 0o600
    assert [path.name for path in world.socket.parent.iterdir()] == ["trainer-0.socket"]


def test_a_call_with_another_jobs_secret_is_refused_and_does_nothing(world):
    stranger = RoleClient(world.server.address, "guess")
    with pytest.raises(Refused, match="refused the call: wrong secret: this process belongs to another job"):
        stranger.drain(soon())
    stranger.close()
    assert world.drains == 0


def test_a_worker_that_is_gone_is_unavailable(world):
    world.server.close()
    with pytest.raises(Unavailable, match=f"the worker at {world.server.address} is not reachable"):
        world.client.status(soon())


def test_a_deadline_in_the_past_is_an_error_of_its_own(world):
    with pytest.raises(DeadlineExceeded, match=f"out of time while asking the worker at {world.server.address}"):
        world.client.status(Deadline.after(0))


def test_a_late_answer_is_an_error_of_its_own(world):
    go = threading.Event()
    world.answer = go.wait
    with pytest.raises(DeadlineExceeded, match="did not answer in time"):
        world.client.status(Deadline.after(0.1))
    go.set()


def test_closing_gives_the_socket_back(world):
    world.server.close()
    with serve_role(dict, print, "secret", world.socket) as again:
        client = RoleClient(again.address, "secret")
        assert again.address == world.server.address and client.status(soon()) == {}
        client.close()


def test_a_status_above_the_bound_fails_the_call_only(world):
    world.status = {"text": "x" * (channels.MAX_MESSAGE_BYTES + 1)}
    with pytest.raises(Exception, match="RESOURCE_EXHAUSTED"):
        world.client.status(soon())
    world.status = {"text": "short"}
    assert world.client.status(soon()) == {"text": "short"}
