"""gRPC off loopback: both ends prove who they are; each stranger is refused, counted, and told in words."""

import socket
import ssl
import threading
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import UTC, datetime, timedelta

import grpc
import pytest

from headrace.deadline import Deadline
from headrace.errors import Refused, SpecError, Unavailable
from headrace.identity import certificates
from headrace.identity.authority import open_authority
from headrace.identity.credentials import Credentials
from headrace.identity.join_token import JoinToken
from headrace.identity.peers import PeerName, PeerRole, PeerRule
from headrace.rpc import channels, role, tls_listener
from headrace.rpc.authority_contact import find_head
from headrace.rpc.channels import TlsPeer
from headrace.rpc.refusals import RefusalReason, Refusals
from headrace.rpc.role import RoleClient
from headrace.rpc.rpc_server import RpcServer
from headrace.rpc.tls_listener import TlsEndpoint

HEADS = PeerRule("news", 3, {PeerRole.HEAD: range(1)})
HERE = "127.0.0.1"
SOON_S = 30.0


def named(which, number=0, generation=3):
    return PeerName("news", generation, which, number)


WORKER, HEAD = named(PeerRole.TRAINER), named(PeerRole.HEAD)


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return open_authority(tmp_path_factory.mktemp("identity"), "news")


@pytest.fixture(scope="module")
def another(tmp_path_factory):
    return open_authority(tmp_path_factory.mktemp("identity"), "news")


class Served:
    """A worker's Role, and all that it refused."""

    def __init__(self, server, noted):
        self.address, self.server, self._noted = server.address, server, noted
        self.host, port = server.address.split(":")
        self.port = int(port)

    def counts_to(self, reason, count):
        """Wait for a count: a stranger is gone before the listener has noted it. Whether nothing else was refused.

        A client of gRPC may try again by itself, and give a handshake up when it is closed.
        """
        until = Deadline.after(SOON_S)
        while self._noted.counts().get(reason.value, 0) < count:
            until.check(f"waiting for {reason} in {self._noted.counts()}")
            time.sleep(0.005)
        return self._noted.counts().keys() <= {reason.value, "silent"}

    def connect(self):
        return socket.create_connection((self.host, self.port), SOON_S)


@contextmanager
def serving(authority, name=WORKER, rule=HEADS, status=lambda: {"alive": True}):
    noted = Refusals()
    server = RpcServer("secret", max_workers=4, tls=TlsEndpoint(HERE, authority.credentials(name), rule), noted=noted)
    server.add_service(role.SERVICE, role._Servicer(status, print, None, None))
    server.start()
    try:
        yield Served(server, noted)
    finally:
        server.close(0)


@pytest.fixture
def served(authority):
    with serving(authority) as found:
        yield found


def ask(address, credentials, peer=WORKER, secret="secret"):
    with closing(RoleClient(address, secret, TlsPeer(credentials, peer))) as client:
        return client.status(Deadline.after(SOON_S))


def test_a_peer_with_the_right_certificate_is_served(served, authority):
    assert ask(served.address, authority.credentials(HEAD)) == {"alive": True}
    assert served._noted.counts() == {}


def test_a_server_that_cannot_bind_leaves_no_folder(authority, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    nowhere = TlsEndpoint("192.0.2.1", authority.credentials(WORKER), HEADS)
    with pytest.raises((SpecError, Unavailable, OSError)):
        RpcServer("secret", max_workers=1, tls=nowhere)
    assert list(tmp_path.iterdir()) == []


def test_the_server_knows_who_calls(authority):
    noted, callers = Refusals(), []
    server = RpcServer(
        "secret", max_workers=4, tls=TlsEndpoint(HERE, authority.credentials(WORKER), HEADS), noted=noted
    )

    class Named(role._Servicer):
        def Status(self, request, context):
            callers.append(server.peer_of(context))
            return super().Status(request, context)

    server.add_service(role.SERVICE, Named(dict, print, None, None))
    server.start()
    try:
        ask(server.address, authority.credentials(HEAD))
    finally:
        server.close(0)
    assert callers == [HEAD]


@contextmanager
def joined_at(authority, **more):
    """A launcher at which processes join; only `Status` may be called without a certificate."""
    noted = Refusals()
    endpoint = TlsEndpoint(HERE, authority.credentials(HEAD), PeerRule("news", 3, {}), joins=True, **more)
    server = RpcServer("secret", max_workers=4, tls=endpoint, noted=noted)
    server.add_service(role.SERVICE, role._Servicer(lambda: {"joined": True}, print, print, None), joining=("Status",))
    server.start()
    try:
        yield Served(server, noted)
    finally:
        server.close(0)


@pytest.fixture
def head(authority):
    with joined_at(authority) as found:
        yield found


def test_a_process_with_the_token_finds_the_head_and_calls_it_without_a_certificate(head, authority):
    token = JoinToken(authority.fingerprint, "0" * 64)
    tls = find_head(head.address, token, Deadline.after(SOON_S))
    assert tls.name == HEAD and tls.identity == Credentials(authority=authority.pem)
    with closing(RoleClient(head.address, "secret", tls)) as client:
        assert client.status(Deadline.after(SOON_S)) == {"joined": True}
        with pytest.raises(Refused, match="this call needs a certificate: join first"):
            client.commit(Deadline.after(SOON_S))
    assert head.counts_to(RefusalReason.NO_CERTIFICATE, 1)


def test_a_head_of_another_authority_gets_nothing(head, another):
    token = JoinToken(another.fingerprint, "0" * 64)
    with pytest.raises(Refused, match=f"has the authority .*, and the join token is of {another.fingerprint[:16]}"):
        find_head(head.address, token, Deadline.after(SOON_S))
    assert head._noted.counts() == {}


def test_where_no_head_listens_a_joining_process_says_so(served, authority):
    token = JoinToken(authority.fingerprint, "0" * 64)
    with pytest.raises((Refused, Unavailable), match=served.address):
        find_head(served.address, token, Deadline.after(SOON_S))  # a worker
    with pytest.raises(Unavailable, match=r"the launcher at 127.0.0.1:\d+ is not reachable"):
        with socket.create_server((HERE, 0)) as closed:
            address = f"{HERE}:{closed.getsockname()[1]}"
        find_head(address, token, Deadline.after(SOON_S))


def test_strangers_give_way_to_those_that_join_and_those_with_the_secret_keep_their_place(authority, monkeypatch):
    monkeypatch.setattr(tls_listener, "MAX_UNPROVEN", 8)
    with joined_at(authority) as head:
        tls = find_head(head.address, JoinToken(authority.fingerprint, "0" * 64), Deadline.after(SOON_S))
        with closing(RoleClient(head.address, "secret", tls)) as first, ExitStack() as held:
            first.status(Deadline.after(SOON_S))
            wrong = held.enter_context(closing(RoleClient(head.address, "guess", tls)))
            with pytest.raises(Refused):
                wrong.status(Deadline.after(SOON_S))
            for _ in range(20):  # with and without a handshake
                held.enter_context(head.connect())
                held.enter_context(silent(head, authority))
            with closing(RoleClient(head.address, "secret", tls)) as second:
                assert second.status(Deadline.after(SOON_S)) == {"joined": True}
            with pytest.raises(Refused, match="nobody of generation 3"):  # it is heard
                ask(head.address, authority.credentials(WORKER), HEAD)
            assert first.status(Deadline.after(SOON_S)) == {"joined": True}
        head.counts_to(RefusalReason.SILENT, 25)


def silent(head, authority):
    """A connection whose handshake is done, and on which nothing follows."""
    context = ssl.create_default_context(cadata=authority.pem)
    context.check_hostname = False
    context.set_alpn_protocols(["h2"])
    return context.wrap_socket(head.connect())


def test_a_wrong_certificate_is_refused_also_where_none_is_needed(head, another, authority):
    forged = another.credentials(WORKER).model_copy(update={"authority": authority.pem})
    with pytest.raises(Unavailable, match="may not accept the certificate"):
        ask(head.address, forged, HEAD)
    assert head.counts_to(RefusalReason.WRONG_CERTIFICATE, 1)


def test_an_older_generation_is_refused_in_words(served, authority):
    old = authority.credentials(named(PeerRole.HEAD, generation=2))
    with pytest.raises(Refused, match="head-0 of generation 2 .* is expected: it is of an older generation"):
        ask(served.address, old)
    assert served.counts_to(RefusalReason.OTHER_GENERATION, 1)


@pytest.mark.parametrize("name", [named(PeerRole.HEAD, 1), named(PeerRole.SHARD), WORKER], ids=str)
def test_another_role_or_number_is_refused(served, authority, name):
    with pytest.raises(Refused, match="head-0 of generation 3 of job 'news' is expected"):
        ask(served.address, authority.credentials(name))
    assert served.counts_to(RefusalReason.OTHER_PEER, 1)


def test_a_certificate_of_another_authority_is_refused(served, authority, another):
    forged = another.credentials(HEAD).model_copy(update={"authority": authority.pem})
    with pytest.raises(Unavailable, match="may not accept the certificate of head-0 of generation 3"):
        ask(served.address, forged)
    assert served.counts_to(RefusalReason.WRONG_CERTIFICATE, 1)


def test_an_expired_certificate_is_refused(served, authority, caplog):
    key = tls_listener.certificates.draw_key()
    long_ago = datetime.now(UTC) - timedelta(days=30)
    certificate = authority.sign(tls_listener.certificates.signing_request(key), HEAD, long_ago)
    with pytest.raises(Unavailable, match="may not accept"):
        ask(served.address, Credentials(authority=authority.pem, certificate=certificate, key=key))
    assert served.counts_to(RefusalReason.WRONG_CERTIFICATE, 1)
    assert "certificate has expired" in caplog.text


def test_a_client_sends_nothing_to_a_server_that_is_not_the_one_it_wants(served, authority, another):
    for peer in (named(PeerRole.TRAINER, 1), named(PeerRole.TRAINER, generation=4)):
        with pytest.raises(Refused, match=f"does not prove to be {peer}: another process has this address"):
            ask(served.address, authority.credentials(HEAD), peer)
    with pytest.raises(Refused, match="does not prove to be trainer-0 of generation 3"):
        ask(served.address, another.credentials(HEAD))


def test_a_server_without_tls_gets_no_secret(authority):
    heard = []

    def listen(server):
        connection, _ = server.accept()
        with connection:
            heard.append(connection.recv(4096))
            connection.sendall(b"HTTP/1.1 400 no\r\n\r\n")

    with socket.create_server((HERE, 0)) as server:
        thread = threading.Thread(target=listen, args=(server,))
        thread.start()
        with pytest.raises((Refused, Unavailable)):
            ask(f"{HERE}:{server.getsockname()[1]}", authority.credentials(HEAD))
        thread.join()
    assert heard[0][:1] == b"\x16" and b"secret" not in heard[0]  # a handshake


def test_another_secret_is_refused(served, authority):
    with pytest.raises(Refused, match="wrong secret"):
        ask(served.address, authority.credentials(HEAD), secret="guessed")
    assert served.counts_to(RefusalReason.WRONG_SECRET, 1)


def test_plain_clients_are_refused(served):
    with closing(RoleClient(served.address, "secret")) as client, pytest.raises(Unavailable):
        client.status(Deadline.after(SOON_S))
    served.counts_to(RefusalReason.PLAIN_TEXT, 1)
    with served.connect() as browser:
        browser.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert browser.recv(100) == b""
    assert served._noted.counts().keys() == {"plain_text"}


def test_a_client_without_a_certificate_is_refused(served):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with served.connect() as plain, context.wrap_socket(plain) as connection:
        with suppress(ConnectionError):
            assert connection.recv(1) == b""
    assert served.counts_to(RefusalReason.NO_CERTIFICATE, 1)


def test_old_versions_of_tls_are_refused(served):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with served.connect() as plain, pytest.raises((ssl.SSLError, ConnectionError)):
        context.wrap_socket(plain)
    served.counts_to(RefusalReason.WRONG_CERTIFICATE, 1)


def test_a_port_scan_is_counted_and_told_at_a_bounded_rate(served, authority, caplog):
    for _ in range(200):
        served.connect().close()
    assert served.counts_to(RefusalReason.SILENT, 200) and served._noted.counts() == {"silent": 200}
    lines = [record for record in caplog.records if "port scan" in record.message]
    assert [line.message.partition(" (")[2] for line in lines] == ["", "10 times)", "100 times)"]
    assert ask(served.address, authority.credentials(HEAD)) == {"alive": True}


def test_connections_that_say_nothing_keep_no_peer_out(authority, monkeypatch):
    monkeypatch.setattr(tls_listener, "MAX_UNPROVEN", 64)
    with serving(authority) as served, ExitStack() as held:
        for _ in range(192):
            held.enter_context(served.connect())
        assert ask(served.address, authority.credentials(HEAD)) == {"alive": True}
        assert served.counts_to(RefusalReason.SILENT, 129)


def test_a_handshake_that_takes_too_long_is_given_up(authority, monkeypatch):
    monkeypatch.setattr(tls_listener, "HANDSHAKE_S", 0.2)
    with serving(authority) as served, served.connect() as connection:
        connection.sendall(b"\x16\x03\x01")
        assert connection.recv(1) == b""
        assert served.counts_to(RefusalReason.SILENT, 1)


def test_peers_beyond_the_bound_are_turned_away(authority, monkeypatch):
    monkeypatch.setattr(tls_listener, "MAX_PEERS", 1)
    with serving(authority) as served:
        mine = TlsPeer(authority.credentials(HEAD), WORKER)
        with closing(RoleClient(served.address, "secret", mine)) as first:
            first.status(Deadline.after(SOON_S))
            with pytest.raises(Unavailable):
                ask(served.address, mine.identity)
            assert first.status(Deadline.after(SOON_S)) == {"alive": True}
        assert served._noted.counts()["too_many"] >= 1


def test_long_messages_pass_in_both_directions(authority):
    text = "x" * (3 << 20)
    with serving(authority, status=lambda: {"text": text}) as served:
        mine = authority.credentials(HEAD)
        assert ask(served.address, mine)["text"] == text
        with channels.open_channel(served.address, tls=TlsPeer(mine, WORKER)) as channel:
            call = channel.unary_unary(channels.path_of(role.SERVICE, "Operate"))
            with pytest.raises(grpc.RpcError) as refused:
                call(b"\x0a\x80\x80\x80\x01" + b"x" * (2 << 20), timeout=SOON_S, metadata=channels.metadata("secret"))
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION  # it was read: this worker leads no job


def test_many_peers_at_a_time_are_served(authority):
    rule = PeerRule("news", 3, {PeerRole.TRAINER: range(16)})
    with serving(authority, named(PeerRole.SHARD), rule) as served:
        answers = []

        def call(number):
            mine = authority.credentials(named(PeerRole.TRAINER, number))
            answers.append(ask(served.address, mine, named(PeerRole.SHARD)))

        threads = [threading.Thread(target=call, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == [{"alive": True}] * 16


class Changed:
    """An identity whose credentials the test replaces."""

    def __init__(self, current):
        self.current = current


def ended(authority, name, monkeypatch):
    """Credentials whose life is over."""
    with monkeypatch.context() as patched:
        patched.setattr(certificates, "LIFETIME", timedelta(0))
        mine = authority.credentials(name)
    until = Deadline.after(SOON_S)
    while datetime.now(UTC) <= mine.ends + timedelta(seconds=1):  # certificates tell seconds
        until.check("the end of a certificate")
        time.sleep(0.05)
    return mine


def test_a_client_whose_certificate_has_ended_is_served_again_once_it_is_renewed(served, authority, monkeypatch):
    mine = Changed(ended(authority, HEAD, monkeypatch))
    with closing(RoleClient(served.address, "secret", TlsPeer(mine, WORKER))) as client:
        with pytest.raises(Unavailable):
            client.status(Deadline.after(SOON_S))
        assert served.counts_to(RefusalReason.WRONG_CERTIFICATE, 1)
        mine.current = authority.credentials(HEAD)
        assert client.status(Deadline.after(SOON_S)) == {"alive": True}


def test_a_server_whose_certificate_has_ended_serves_again_once_it_is_renewed(authority, monkeypatch):
    mine = Changed(ended(authority, WORKER, monkeypatch))
    endpoint = TlsEndpoint(HERE, mine, HEADS)
    server = RpcServer("secret", max_workers=4, tls=endpoint, noted=Refusals())
    server.add_service(role.SERVICE, role._Servicer(lambda: {"alive": True}, print, None, None))
    server.start()
    try:
        with pytest.raises(Refused, match="does not prove to be"):
            ask(server.address, authority.credentials(HEAD))
        mine.current = authority.credentials(WORKER)
        assert ask(server.address, authority.credentials(HEAD)) == {"alive": True}
    finally:
        server.close(1.0)


def test_a_call_in_flight_is_not_lost_when_both_ends_are_renewed(authority):
    called, answer = threading.Event(), threading.Event()
    answers = []

    def status():
        called.set()
        assert answer.wait(SOON_S)
        return {"alive": True}

    server_identity, client_identity = Changed(authority.credentials(WORKER)), Changed(authority.credentials(HEAD))
    server = RpcServer("secret", max_workers=4, tls=TlsEndpoint(HERE, server_identity, HEADS), noted=Refusals())
    server.add_service(role.SERVICE, role._Servicer(status, print, None, None))
    server.start()
    try:
        with closing(RoleClient(server.address, "secret", TlsPeer(client_identity, WORKER))) as client:
            first = client._channel._open
            thread = threading.Thread(target=lambda: answers.append(client.status(Deadline.after(SOON_S))))
            thread.start()
            assert called.wait(SOON_S)
            server_identity.current = authority.credentials(WORKER)
            client_identity.current = authority.credentials(HEAD)
            client.drain(Deadline.after(SOON_S))
            assert client._channel._open is not first and first.num_users == 1, "the call in flight has the old one"
            answer.set()
            thread.join()
            assert answers == [{"alive": True}] and first.num_users == 0
    finally:
        server.close(1.0)


def test_a_server_that_ends_lets_its_address_go(authority):
    with serving(authority) as served:
        ask(served.address, authority.credentials(HEAD))
    with pytest.raises(Unavailable):
        ask(served.address, authority.credentials(HEAD))
    with socket.create_server((served.host, served.port)):
        pass


def test_an_address_of_another_machine_is_never_called_in_plain_text():
    with pytest.raises(Refused, match="10.1.2.3:4 is another machine's address, and this process has no certificate"):
        RoleClient("10.1.2.3:4", "secret")


def test_an_address_that_is_not_ours_cannot_be_listened_at(authority):
    endpoint = TlsEndpoint("192.0.2.1", authority.credentials(WORKER), HEADS)
    with pytest.raises(SpecError, match=r"cluster.interface: 192.0.2.1:0 is not available"):
        RpcServer("secret", max_workers=1, tls=endpoint)
