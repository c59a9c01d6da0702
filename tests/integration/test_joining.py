"""Joining from another machine: the token lets an agent in, a certificate names its worker; all else is refused."""

import secrets
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime

import grpc
import pytest

from headrace.address import parse_address
from headrace.deadline import Deadline
from headrace.errors import Refused, Unavailable
from headrace.identity import certificates
from headrace.identity.authority import open_authority
from headrace.identity.join_token import FILE, JoinToken, StaleToken, open_token, rotate_token
from headrace.identity.peers import PeerName, PeerRole
from headrace.identity.renewal import RenewedIdentity
from headrace.launcher_contact import LauncherContact
from headrace.proto import rendezvous_pb2 as pb
from headrace.rpc import channels
from headrace.rpc.joining import AgentFacts, JobEnd, JoinClient, NoRoomNow, Order, WorkerReport
from headrace.rpc.refusals import Refusals
from headrace.rpc.rendezvous import RendezvousClient
from headrace.service.cluster import external
from headrace.service.cluster.elastic import Attendance
from headrace.service.cluster.external import ExternalLauncher, JoinPoint
from headrace.service.cluster.places import Places
from headrace.service.cluster.runtime import WorkerRole, WorkerSpec
from headrace.trainer.dense_config import HierarchySection
from headrace.trainer.replica.feed_address import at_launcher


class Head:
    """A launcher with its authority."""

    def __init__(self, folder, held, *, certifies=True):
        self.folder, self.held, self.certifies = folder, held, certifies
        self.authority = open_authority(folder, "news")
        self.token = open_token(folder, self.authority)
        self.noted, self.listen, self.launcher = Refusals(), "127.0.0.1:0", None
        self.specs, self.ends = [], []
        self.open()

    def open(self):
        """Start it, or start it again at the same address."""
        if self.launcher is not None:
            self.launcher.__exit__()
        point = JoinPoint(
            listen=self.listen,
            token_file=self.folder / FILE,
            node_timeout_s=30.0,
            authority=self.authority,
            certifies=self.certifies,
        )
        self.launcher = ExternalLauncher(point, self.noted).__enter__()
        self.listen = self.launcher.address

    def agent(self, token=None):
        return Joining(self.held.enter_context(closing(JoinClient(self.launcher.address, token or self.token))))

    def begin(self, generation, *agents, roles=(WorkerRole.TRAINER, WorkerRole.SHARD), lines=None):
        """Run workers on agents; each with its offer and its credentials. `lines`: takes what the launcher says."""
        more = {"command": ("true",), "config": {}, "folder": self.folder, "run_folder": self.folder}
        numbers = [roles[:place].count(role) for place, role in enumerate(roles)]
        specs = [WorkerSpec(role=role, number=number, **more) for role, number in zip(roles, numbers, strict=True)]
        self.specs = specs
        self.launcher.prepare(specs, generation)
        assert [agent.ask().what for agent in agents] == [None] * len(agents)
        tell = {
            "on_line": lambda *line: None if lines is None else lines.append(line),
            "on_exit": lambda *end: self.ends.append(end),
        }
        thread = threading.Thread(target=self.launcher.start, args=(specs, generation), kwargs=tell)
        thread.start()
        for agent in agents:
            agent.take_offer()
        thread.join()
        return agents


class Joining:
    """An agent whose worker has no process."""

    def __init__(self, client):
        self.client, self.key, self.offer, self.mine = client, certificates.draw_key(), None, None
        self.facts = AgentFacts(id=secrets.token_hex(16), machine=external.machine_id())

    def ask(self):
        return self.client.join(self.facts, certificates.signing_request(self.key))

    def take_offer(self):
        deadline = Deadline.after(10)
        while (offer := self.ask().what) is None:
            deadline.check("waiting for an offer")
        self.offer = offer
        self.mine = None if offer.credentials is None else offer.credentials.model_copy(update={"key": self.key})
        self.client.show(self.mine)
        assert self.report() is Order.GO_ON

    def report(self, **more):
        facts = {"agent": self.facts.id, "worker": self.offer.worker, "generation": self.offer.generation}
        return self.client.report(WorkerReport(**{**facts, **more}))

    def worker(self, **other):
        """Its worker, at the rendezvous."""
        facts = {"secret": self.client.secret, "worker": self.offer.worker, "generation": self.offer.generation}
        facts["address"] = self.client._address
        trust = {} if self.mine is not None else self.client.trust(self.offer.generation)
        return RendezvousClient(LauncherContact(**{**facts, **trust, **other}), self.mine)


@pytest.fixture
def head(tmp_path, monkeypatch):
    """As if each port of this machine were one of another machine."""
    monkeypatch.setattr(channels, "needs_tls", lambda address: not address.startswith("unix:"))
    with ExitStack() as held:
        made = Head(tmp_path, held)
        yield made
        made.launcher.__exit__()


@pytest.fixture
def here(tmp_path):
    """A launcher whose workers are all on this machine, and have no certificates."""
    with ExitStack() as held:
        made = Head(tmp_path, held, certifies=False)
        yield made
        made.launcher.__exit__()


@pytest.fixture
def two(head):
    return head.begin(1, head.agent(), head.agent())


def until_refused(head, reason, number=1):
    """The count of a refusal; a caller may be gone before it is noted."""
    deadline = Deadline.after(10)
    while head.noted.counts().get(reason, 0) < number:
        deadline.check(f"waiting for {reason} in {head.noted.counts()}")
    return head.noted.counts()


def test_each_worker_gets_a_certificate_for_the_key_of_its_agent(head, two):
    names = [agent.mine.name for agent in two]
    assert names == [PeerName("news", 1, PeerRole.TRAINER, 0), PeerName("news", 1, PeerRole.SHARD, 0)]
    for agent in two:
        assert agent.offer.credentials.key == "" and agent.mine.authority == head.authority.pem
        signed = certificates.load(agent.mine.certificate).public_key()
        assert signed == certificates.private_key(agent.key).public_key()
        agent.worker().announce("10.0.0.1:5")
    assert two[0].worker().meet("10.0.0.1:6", {}, Deadline.after(5)) == "10.0.0.1:6"
    assert head.noted.counts() == {}


def test_an_agent_goes_on_from_generation_to_generation(head, two):
    for agent in two:
        agent.report(exit_code=0, over=True)
        agent.client.show(None)
        agent.key = certificates.draw_key()
    head.begin(2, *two)
    assert [agent.mine.name.generation for agent in two] == [2, 2]
    head.launcher._end = JobEnd(0, "done")
    for agent in two:
        agent.client.show(None)
    assert [agent.ask().what for agent in two] == [JobEnd(0, "done")] * 2
    assert head.noted.counts() == {}


@pytest.mark.parametrize(
    ("size_of", "machines", "warns"),
    [(HierarchySection(group=2).size, "ab", True), (HierarchySection(group=2).size, "aa", False), (None, "ab", False)],
)
def test_sums_within_machines_that_would_cross_them_are_warned_of_once(head, size_of, machines, warns):
    head.launcher._point = replace(head.launcher._point, group_size=size_of)
    agents, lines = [head.agent(), head.agent()], []
    head.launcher._places = Places("a", 30.0)
    for agent, machine in zip(agents, machines, strict=True):
        agent.facts = replace(agent.facts, machine=machine)
    for generation in (1, 2):
        head.begin(generation, *agents, roles=(WorkerRole.TRAINER,) * 2, lines=lines)
        for agent in agents:
            agent.report(exit_code=0, over=True)
            agent.client.show(None)
            agent.key = certificates.draw_key()
    assert [worker for worker, _ in lines] == (["launcher"] if warns else [])
    assert all("sums over trainer-0, trainer-1 first, as if they shared a machine" in text for _, text in lines)


def test_shards_start_before_the_trainers_whose_sums_have_groups(head):
    head.launcher._point = replace(head.launcher._point, group_size=HierarchySection(group=2).size)
    (agent,) = head.begin(1, head.agent(), roles=(WorkerRole.SHARD,))
    assert agent.offer.worker == "shard-0"


def test_a_token_that_was_rotated_lets_nobody_in_and_those_that_joined_go_on(head, two):
    rotate_token(head.folder, head.authority)
    with pytest.raises(StaleToken, match="it was rotated, or it is of another job"):
        head.agent().ask()
    assert until_refused(head, "stale_token") == {"stale_token": 1}
    assert two[0].report() is Order.GO_ON
    two[0].client.show(None)
    assert two[0].ask().waits == ""
    (head.folder / FILE).unlink()
    with pytest.raises(StaleToken):
        head.agent().ask()


def test_nothing_is_sent_to_a_launcher_of_another_authority(head, tmp_path_factory):
    other = open_authority(tmp_path_factory.mktemp("other"), "news")
    with pytest.raises(Refused, match="and the join token is of .*: the token is of another job"):
        head.agent(JoinToken(other.fingerprint, head.token.secret)).ask()
    assert head.noted.counts() == {}


class Impostor:
    """Another user's process at the address of a launcher of loopback that is away; notes what it is sent."""

    def __init__(self, tls=None):
        self.seen = []
        self.server = grpc.server(ThreadPoolExecutor(4))
        self.server.add_generic_rpc_handlers((self,))
        port = (
            self.server.add_insecure_port("127.0.0.1:0")
            if tls is None
            else self.server.add_secure_port("127.0.0.1:0", tls)
        )
        self.address = f"127.0.0.1:{port}"

    def service(self, details):
        self.seen.append((details.method, details.invocation_metadata))
        offer = pb.Assignment(worker="trainer-0", generation=1, command=["/bin/false"], config_json=b"{}")
        reply = pb.JoinReply(node_timeout_s=5, pause_s=0.2, secret="s", assignment=offer)
        return grpc.unary_unary_rpc_method_handler(lambda *_: reply, None, pb.JoinReply.SerializeToString)

    @contextmanager
    def listening(self):
        self.server.start()
        try:
            yield self
        finally:
            self.server.stop(0).wait()


@pytest.fixture(params=["plain", "another authority", "a worker of the job"])
def impostor(request, here, tmp_path_factory):
    tls = None
    if request.param != "plain":
        folder = tmp_path_factory.mktemp("other")
        authority = open_authority(folder, "news") if request.param == "another authority" else here.authority
        shown = authority.credentials(authority.name(1, PeerRole.TRAINER, 0))
        pair = (shown.key.encode(), shown.certificate.encode())
        tls = grpc.ssl_server_credentials([pair])
    with Impostor(tls).listening() as found:
        yield found


def test_on_loopback_an_impostor_gets_no_token_and_sends_no_worker(here, impostor):
    """Neither of an agent, nor of a replica, nor of the worker of an agent."""
    with closing(JoinClient(impostor.address, here.token)) as client, pytest.raises((Refused, Unavailable)):
        Joining(client).ask()
    with pytest.raises((Refused, Unavailable)):
        at_launcher(impostor.address, here.folder / FILE)(Deadline.after(5))
    (agent,) = here.begin(1, here.agent(), roles=(WorkerRole.TRAINER,))
    with pytest.raises((Refused, Unavailable)):
        agent.worker(address=impostor.address).announce("unix:/x")
    assert impostor.seen == []


def test_on_loopback_agents_and_workers_call_over_tls_without_certificates(here):
    first, second = here.begin(1, here.agent(), here.agent())
    assert first.offer.credentials is None
    first.worker().announce("unix:/x")
    assert second.report() is Order.GO_ON
    with pytest.raises(Refused, match="have no certificates"):
        first.worker().renew(signing_request())
    with socket.create_connection(parse_address(here.listen)) as plain:
        plain.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        assert b"HTTP" not in plain.recv(1 << 16)
    assert until_refused(here, "plain_text")


def test_a_worker_is_not_taken_for_the_launcher(head, two):
    """Although its certificate is of the authority that the token names."""
    endpoint = replace(head.launcher._point.endpoint(), identity=two[1].mine)
    server = external.RendezvousServer(head.launcher.rendezvous, "guess", 1, tls=endpoint, dispatcher=head.launcher)
    with closing(server), closing(JoinClient(server.address, head.token)) as client:
        with pytest.raises(Refused, match="is the address of shard-0 of generation 1 .*, and not of a launcher"):
            Joining(client).ask()


def test_a_report_and_a_rendezvous_need_the_certificate_of_the_worker(head, two):
    first, second = two
    second.client.show(None)
    with pytest.raises(Refused, match="this call needs a certificate: join first"):
        second.report()
    assert until_refused(head, "no_certificate") == {"no_certificate": 1}
    second.client.show(first.mine)
    with pytest.raises(Refused, match="the caller is trainer-0 of .* by its certificate, and it claims to be shard-0"):
        second.report()
    with pytest.raises(Refused, match="it claims to be shard-0"):
        first.worker(worker="shard-0").announce("10.0.0.1:5")
    assert head.noted.counts()["other_peer"] == 2


def test_a_worker_of_an_older_generation_is_refused_everywhere(head, two):
    """Also on a connection that it opened before."""
    head.begin(2, head.agent(), head.agent())
    with pytest.raises(Refused, match="it is trainer-0 of generation 1 .*: it is of an older generation"):
        two[0].report()
    with pytest.raises(Refused, match="does not prove to be head-0 of generation 1"):
        two[0].report()  # on another connection
    with pytest.raises(Refused, match="does not prove to be head-0 of generation 1"):
        two[1].worker().announce("10.0.0.1:5")
    assert list(until_refused(head, "other_generation", 2)) == ["other_generation"], (
        "calls, and connections without one"
    )


def signing_request():
    return certificates.signing_request(certificates.draw_key())


def test_a_worker_and_its_agent_get_another_certificate_for_the_same_name(head, two):
    for agent in two:
        name = agent.mine.name
        for signed in (
            agent.worker().renew(signing_request()),
            agent.client.renew(agent.offer.worker, 1, signing_request()),
        ):
            assert certificates.name_of(certificates.load(signed)) == name and signed != agent.mine.certificate
    assert head.noted.counts() == {}


def test_nobody_gets_the_certificate_of_another_worker(head, two, caplog):
    first, second = two
    with pytest.raises(Refused, match="the caller is trainer-0 of .* by its certificate, and it claims to be shard-0"):
        first.worker(worker="shard-0").renew(signing_request())
    with pytest.raises(Refused, match="the caller is shard-0 of .* by its certificate, and it claims to be trainer-0"):
        second.client.renew("trainer-0", 1, signing_request())
    assert head.noted.counts() == {"other_peer": 2}
    assert "refused trainer-0 of generation 1 of job 'news': the caller is trainer-0" in caplog.text
    with pytest.raises(Refused, match="trainer-0 is of generation 2, and this launcher runs generation 1"):
        first.worker(generation=2).renew(signing_request())
    assert head.noted.counts() == {"other_peer": 2, "other_generation": 1}
    second.client.show(None)
    with pytest.raises(Refused, match="this call needs a certificate: join first"):
        second.client.renew("shard-0", 1, signing_request())


def test_a_worker_of_an_older_generation_gets_no_other_certificate(head, two):
    worker = two[0].worker()
    head.begin(2, head.agent(), head.agent())
    with pytest.raises(Refused, match="does not prove to be head-0 of generation 1"):
        worker.renew(signing_request())
    with pytest.raises(Refused, match="it is of an older generation"):
        two[0].client.renew("trainer-0", 1, signing_request())


def test_an_agent_shows_its_renewed_certificate_from_the_next_call_on(head, two):
    agent = two[0]
    identity = RenewedIdentity(agent.mine, lambda request: agent.client.renew(agent.offer.worker, 1, request))
    agent.client.show(identity)
    assert agent.report() is Order.GO_ON
    identity._next = datetime.now(UTC)
    identity.attend()
    assert identity.current is not agent.mine
    assert agent.report() is Order.GO_ON and agent.client._shown is identity.current


def test_one_agent_too_many_is_refused_and_told_on_both_sides(head, two, caplog):
    with pytest.raises(NoRoomNow, match="this worker is one too many"):
        head.agent().ask()
    assert head.noted.counts() == {"other_peer": 1}
    assert "refused 127.0.0.1: generation 1 has all of its workers" in caplog.text


def test_a_signing_request_that_cannot_be_signed_is_refused(head):
    agent = head.agent()
    with pytest.raises(Refused, match="the signing request is damaged"):
        agent.client.join(agent.facts, "x")
    assert head.noted.counts() == {"other_peer": 1}


def test_agents_join_a_launcher_that_is_started_again_with_the_token_they_have(head, two):
    head.open()
    with pytest.raises((Refused, Unavailable)):
        two[0].report()
    for agent in two:
        agent.client.show(None)
        agent.key = certificates.draw_key()
    assert [agent.ask().what for agent in two] == [None, None]
    head.begin(2, *two)
    rotate_token(head.folder, head.authority)
    head.open()
    two[0].client.show(None)
    with pytest.raises(StaleToken):
        two[0].ask()


def test_stand_ins_that_leave_are_not_waited_for(here):
    agent, launcher = here.agent(), here.launcher
    more = {"command": ("true",), "config": {}, "folder": here.folder, "run_folder": here.folder}
    specs = [WorkerSpec(role=WorkerRole.TRAINER, number=number, **more) for number in range(2)]
    launcher.prepare(specs, 1)
    agent.ask()
    launcher.stand_in(1)
    deadline = Deadline.after(60)
    while launcher.waits_for() is not None:
        deadline.check("waiting for the stand-in")
    launcher.prepare(specs, 2)
    agent.ask()
    assert launcher.attendance() == Attendance(able=1, leads=True)


def test_the_agent_of_a_reader_waits_while_its_job_predicts(here):
    agent, launcher = here.agent(), here.launcher
    launcher._point = replace(launcher._point, readers=1)
    agent.facts = replace(agent.facts, role="reader")
    more = {"command": ("true",), "config": {}, "folder": here.folder, "run_folder": here.folder}
    launcher.prepare([WorkerSpec(role=WorkerRole.PREDICTOR, number=0, **more)], 1)
    assert agent.ask().what is None
    assert launcher.waits_for().startswith("waits for 1 of 1 workers: predictor-0; ")


@pytest.mark.parametrize("leaves", [True, False])
def test_the_reader_of_an_agent_that_leaves_or_cannot_run_it_is_told_of_and_goes_to_the_next(here, leaves):
    """It stood by when the reader was started there, while the trainer runs."""
    roles = (WorkerRole.TRAINER, WorkerRole.READER, WorkerRole.READER)
    *_, reader = here.begin(1, *(here.agent() for _ in roles), roles=roles)
    spec = here.specs[-1]
    reader.report(exit_code=-9, over=True)
    first, second = here.agent(), here.agent()
    assert first.ask().what is None and here.launcher.has_place(spec)
    start = {"on_line": lambda *_: None, "on_exit": lambda *end: here.ends.append(end)}
    here.launcher.start([spec], 1, **start)
    if leaves:
        first.client.leave(first.facts)
    else:
        first.offer = first.ask().what
        first.report(cannot_start="no memory")
    assert here.ends == [("reader-1", -9), ("reader-1", 75)] and not here.launcher.has_place(spec)
    assert second.ask().what is None and here.launcher.has_place(spec)
    here.launcher.start([spec], 1, **start)
    second.take_offer()
    assert second.offer.worker == "reader-1" and len(here.ends) == 2
