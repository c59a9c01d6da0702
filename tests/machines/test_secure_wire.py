"""Shards and trainers on machines of their own: equal bits, and strangers take and learn nothing."""

import sys
from contextlib import ExitStack

import pytest

from headrace.identity.authority import open_authority
from tests.contract import shards_world as w
from tests.machines.scenario import running, shard_of, trained, trainer_of

pytestmark = pytest.mark.long

PORT = 40_000
SCAN = """
import socket, sys
for at in sys.argv[1:]:
    host, _, port = at.replace("[", "").replace("]", "").rpartition(":")
    for _ in range(200):
        socket.create_connection((host, int(port)), 5).close()
    with socket.create_connection((host, int(port)), 5) as browser:
        browser.sendall(b"GET / HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
        try:
            answer = browser.recv(100)
        except ConnectionError:
            answer = b""
        if answer and at == sys.argv[1]:  # ZeroMQ begins by itself
            print(answer)
"""
PLAIN_CALL = """
import sys, grpc
with grpc.insecure_channel(sys.argv[1]) as channel:
    call = channel.unary_unary("/headrace.pserver.Shard/Stats")
    try:
        call(b"", timeout=5, metadata=(("headrace-secret", "a secret"),))
    except grpc.RpcError as error:
        print(error.code().name)
"""
PLAIN_DATA = """
import sys, zmq
context = zmq.Context()
for curve in (False, True):
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    if curve:
        dealer.curve_serverkey = sys.argv[2].encode()
        dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
    events = dealer.get_monitor_socket(
        zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
    )
    dealer.connect("tcp://" + sys.argv[1])
    dealer.send(b"x")
    assert events.poll(5000)
    from zmq.utils.monitor import recv_monitor_message
    print(zmq.Event(recv_monitor_message(events)["event"]).name)
    dealer.disable_monitor()
    dealer.close()
    events.close(0)
context.term()
"""


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return open_authority(tmp_path_factory.mktemp("identity"), "shards")


@pytest.fixture
def held():
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def expected():
    """The digests of the same training in one process."""
    with w.job(0) as embedded:
        return trained(embedded.one)


def test_a_trainer_and_two_shards_on_three_machines_have_the_bits_of_one(machines, authority, held, expected):
    first, second, third = machines(3)
    shards = [held.enter_context(running(m, shard_of(authority, n, 2))) for n, m in enumerate((first, second))]
    trainer = held.enter_context(running(third, trainer_of(authority, [each.first for each in shards])))
    assert trainer.first == "connected"
    assert trainer.ask("train") == expected
    assert trainer.ask("refused") == {}


def test_strangers_take_nothing_are_counted_and_told_at_a_bounded_rate(machines, authority, held, expected, tmp_path):
    home, other, strange = machines(3)
    shard = held.enter_context(running(home, shard_of(authority, 0, 1)))
    trainer = held.enter_context(running(other, trainer_of(authority, [shard.first])))
    data, key = shard.ask("data")
    assert strange.call(sys.executable, "-c", SCAN, shard.first, data) == ""
    assert strange.call(sys.executable, "-c", PLAIN_CALL, shard.first) == "UNAVAILABLE\n"
    ended = strange.call(sys.executable, "-c", PLAIN_DATA, data, key).split()
    assert len(ended) == 2 and "HANDSHAKE_SUCCEEDED" not in ended
    forged = trainer_of(open_authority(tmp_path, "shards"), [shard.first])
    assert "does not prove to be shard-0 of generation 1" in held.enter_context(running(strange, forged)).first
    forged["credentials"]["authority"] = authority.pem
    assert "may not accept the certificate of" in held.enter_context(running(strange, forged)).first
    late = held.enter_context(running(strange, trainer_of(authority, [shard.first], rank=7)))
    assert "trainer-7 of generation 1 of job 'shards', and trainer-0" in late.first
    assert trainer.ask("train") == expected
    counts = trainer.ask("refused")
    assert counts["silent"] >= 200 and counts["plain_text"] >= 2 and counts["wrong_data_key"] >= 1
    assert counts["wrong_certificate"] >= 1 and counts["other_peer"] >= 1
    assert shard.ask("refused") == counts  # and the log so far
    assert 5 <= sum("refused" in line for line in shard.log) <= 40


def test_a_frozen_trainer_that_wakes_in_a_newer_generation_is_refused(machines, authority, held, expected):
    home, frozen, other = machines(3)
    shard = held.enter_context(running(home, shard_of(authority, 0, 1, port=PORT)))
    old = held.enter_context(running(frozen, trainer_of(authority, [shard.first])))
    frozen.freeze()
    home.kill()
    again = held.enter_context(running(home, shard_of(authority, 0, 1, generation=2, port=PORT)))
    assert again.first == shard.first  # a newer process has taken the address
    new = held.enter_context(running(other, trainer_of(authority, [again.first], generation=2)))
    frozen.thaw()
    assert "does not prove to be shard-0 of generation 1" in old.ask("train")
    assert new.ask("train") == expected
    assert sum(new.ask("refused").values()) >= 1


def test_a_shard_whose_link_is_cut_is_reached_again(machines, authority, held, expected):
    home, other = machines(2)
    shard = held.enter_context(running(home, shard_of(authority, 0, 1)))
    trainer = held.enter_context(running(other, trainer_of(authority, [shard.first])))
    home.cut()
    home.heal()
    assert trainer.ask("train") == expected
