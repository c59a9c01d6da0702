"""A replica asks the launcher of a job where its live feed is: by the join token, and never another process."""

import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest

from headrace.deadline import Deadline
from headrace.errors import NotYet, Refused, SpecError, Unavailable
from headrace.identity import certificates
from headrace.identity.authority import open_authority
from headrace.identity.join_token import FILE, JoinToken, StaleToken, check_token, open_token, rotate_token
from headrace.identity.peers import PeerName, PeerRole, PeerRule
from headrace.rpc import feed_joining
from headrace.rpc.authority_contact import find_head
from headrace.rpc.feed_joining import MAX_CALLS, serve_feed_address
from headrace.rpc.refusals import RefusalReason, Refusals
from headrace.rpc.rpc_server import RpcServer
from headrace.rpc.tls_listener import TlsEndpoint
from headrace.trainer.replica.feed_address import FeedAddress, at_launcher, certified
from tests.unit.test_feed_finding import MESSAGE, WHERE

SOON_S = 30.0


class Launcher:
    """A launcher's side: its folder of identity, and the answer that a test chooses."""

    def __init__(self, store):
        self.store, self.folder = store, store / "identity"
        self.authority = open_authority(self.folder, "job")
        open_token(self.folder, self.authority)
        self.token_file, self.noted = self.folder / FILE, Refusals()
        self.said = lambda _: MESSAGE

    @contextmanager
    def listening(self):
        server = RpcServer(
            "the workers' secret",
            max_workers=MAX_CALLS + 1,
            tls=self.endpoint(),
            check_token=lambda given: check_token(self.token_file, given),
            noted=self.noted,
        )
        serve_feed_address(server, lambda request: self.said(request), self.noted)
        server.start()
        try:
            yield server.address
        finally:
            server.close(1.0)

    def endpoint(self):
        head = self.authority.identity(self.authority.name(0, PeerRole.HEAD, 0))
        return TlsEndpoint("127.0.0.1", head, PeerRule("job", 0, {}), joins=True)


@pytest.fixture
def launcher(tmp_path):
    return Launcher(tmp_path)


def asked(address, token_file):
    return at_launcher(address, token_file)(Deadline.after(SOON_S))


def test_a_replica_with_the_token_learns_where_the_feed_is(launcher):
    with launcher.listening() as address:
        assert asked(address, launcher.token_file) == WHERE


def test_it_gets_a_certificate_of_the_generation_over_tls(launcher):
    launcher.said = lambda request: certified(MESSAGE | {"tls": True}, launcher.store, request)
    with launcher.listening() as address:
        found = asked(address, launcher.token_file)
    assert isinstance(found, FeedAddress)
    assert found.credentials.name == PeerName("job", 3, PeerRole.REPLICA, 0)
    assert certificates.load(found.credentials.authority) == launcher.authority.certificate


def test_a_token_that_was_rotated_is_refused_and_the_present_one_is_read_again(launcher, tmp_path):
    copy = tmp_path / "copy"
    copy.write_text(launcher.token_file.read_text())
    with launcher.listening() as address:
        find = at_launcher(address, copy)
        rotate_token(launcher.folder, launcher.authority)
        with pytest.raises(StaleToken, match="the join token is not valid"):
            find(Deadline.after(SOON_S))
        assert launcher.noted.counts() == {RefusalReason.STALE_TOKEN: 1}
        copy.write_text(launcher.token_file.read_text())
        assert find(Deadline.after(SOON_S)) == WHERE


def test_a_file_without_a_token_is_named_at_once(tmp_path):
    with pytest.raises(SpecError, match="nothing: No such file"):
        at_launcher("127.0.0.1:1", tmp_path / "nothing")


def test_another_jobs_launcher_gets_nothing(launcher, tmp_path):
    of_another = tmp_path / "token"
    of_another.write_text(str(JoinToken("0" * 64, "1" * 64)))
    with launcher.listening() as address:
        with pytest.raises(Refused, match="the token is of another job, or the authority was replaced"):
            asked(address, of_another)


@pytest.mark.parametrize("trouble", [Unavailable("rank 0 is starting"), NotYet("rows are counted")])
def test_trouble_that_passes_is_no_refusal(launcher, trouble):
    def fail(_):
        raise trouble

    launcher.said = fail
    with launcher.listening() as address, pytest.raises(Unavailable, match=str(trouble)):
        asked(address, launcher.token_file)
    assert launcher.noted.counts() == {}


def test_a_generation_that_begins_while_it_asks_is_trouble_that_passes(launcher, monkeypatch):
    def found(*asked):
        head = find_head(*asked)
        return replace(head, name=replace(head.name, generation=head.name.generation + 1))

    monkeypatch.setattr(feed_joining, "find_head", found)
    with launcher.listening() as address:
        with pytest.raises(Unavailable, match="shows another certificate now, perhaps of a newer generation"):
            asked(address, launcher.token_file)


def test_what_the_job_refuses_is_counted_and_told(launcher):
    def refuse(_):
        raise Refused("this job has no feed")

    launcher.said = refuse
    with launcher.listening() as address, pytest.raises(Refused, match="refused the call: this job has no feed"):
        asked(address, launcher.token_file)
    assert launcher.noted.counts() == {RefusalReason.OTHER_PEER: 1}


def test_many_at_once_are_told_to_ask_again(launcher):
    arrived, go_on = threading.Semaphore(0), threading.Event()

    def slow(_):
        arrived.release()
        go_on.wait(SOON_S)
        return MESSAGE

    launcher.said = slow
    found = []
    with launcher.listening() as address:
        threads = [
            threading.Thread(target=lambda: found.append(asked(address, launcher.token_file))) for _ in range(MAX_CALLS)
        ]
        for thread in threads:
            thread.start()
        for _ in threads:
            assert arrived.acquire(timeout=SOON_S)
        with pytest.raises(Unavailable, match="ask again"):
            asked(address, launcher.token_file)
        go_on.set()
        for thread in threads:
            thread.join()
    assert found == [WHERE] * MAX_CALLS


def test_nobody_there_is_unavailable(launcher):
    with pytest.raises(Unavailable):
        asked("127.0.0.1:1", launcher.token_file)
