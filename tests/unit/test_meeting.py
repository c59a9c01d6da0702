"""The rendezvous: who may come, what it learns, and the words for those that are refused. Over a real connection."""

import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest

from headrace.deadline import Deadline
from headrace.errors import DeadlineExceeded, Refused, SpecError, Unavailable
from headrace.identity import certificates
from headrace.identity.authority import open_authority
from headrace.identity.certificates import LIFETIME, draw_key, load, name_of, signing_request
from headrace.identity.peers import PeerRole
from headrace.rpc import rendezvous
from headrace.rpc.rendezvous import Member, RendezvousClient
from headrace.service.cluster.meeting import Meeting, Roll
from headrace.service.cluster.runtime import WorkerRole, WorkerSpec
from headrace.service.monitor.alarms import Alarm, alarms
from headrace.shared_folder import digests, head_sizes
from headrace.trainer.job_status import Status, read
from tests.fakes.rendezvous import RendezvousHere

WORKERS = ("shard-0", "trainer-0", "trainer-1")


@pytest.fixture
def here(tmp_path):
    with RendezvousHere(tmp_path, *WORKERS, generation=3) as here:
        yield here


def soon():
    return Deadline.after(10)


def test_trainers_learn_where_the_store_of_rank_0_is_whoever_comes_first(here):
    learnt = []
    second = RendezvousClient(here.contact("trainer-1"))
    waiting = threading.Thread(target=lambda: learnt.append(second.meet("", {}, soon())))
    waiting.start()
    assert RendezvousClient(here.contact("trainer-0")).meet("127.0.0.1:7", {}, soon()) == "127.0.0.1:7"
    waiting.join()
    assert learnt == ["127.0.0.1:7"]


def test_a_trainer_whose_rank_0_does_not_come_ends_at_its_deadline(here, monkeypatch):
    monkeypatch.setattr(rendezvous, "HOLD_S", 0.05)
    with pytest.raises(DeadlineExceeded, match="trainer-1 has come to the launcher at unix:.*, and trainer-0 has not"):
        RendezvousClient(here.contact("trainer-1")).meet("", {}, Deadline.after(0.2))


def test_an_address_is_known_once_it_is_announced_and_may_be_announced_again(here):
    shard = RendezvousClient(here.contact("shard-0"))
    shard.announce("127.0.0.1:1")
    shard.announce("127.0.0.1:1")
    assert here.address("shard-0") == "127.0.0.1:1"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"generation": 2}, "trainer-1 is of generation 2, which has ended, and generation 3 runs; end that process"),
        ({"generation": 4}, "trainer-1 is of generation 4, and this launcher runs generation 3; is this the launcher"),
        ({"worker": "trainer-2"}, "generation 3 has no trainer-2; its workers are shard-0, trainer-0, trainer-1"),
    ],
)
def test_a_worker_of_another_generation_or_job_is_refused_and_not_noted(here, changes, words):
    stranger = RendezvousClient(here.contact("trainer-1").model_copy(update=changes))
    for call in (lambda: stranger.meet("", {}, soon()), lambda: stranger.announce("127.0.0.1:9")):
        with pytest.raises(Refused, match=words):
            call()
    RendezvousClient(here.contact("trainer-1")).announce("127.0.0.1:2")
    assert here.address("trainer-1") == "127.0.0.1:2"


def test_on_one_machine_only_the_process_that_has_come_gets_another_certificate(tmp_path, monkeypatch):
    authority, request = open_authority(tmp_path / "identity", "news"), signing_request(draw_key())
    with RendezvousHere(tmp_path, *WORKERS, generation=3, authority=authority) as here:
        shard = RendezvousClient(here.contact("shard-0"))
        with pytest.raises(Refused, match="the caller is not the process that has come as shard-0"):
            shard.renew(request)
        shard.announce("10.0.0.1:1")
        assert name_of(load(shard.renew(request))) == authority.name(3, PeerRole.SHARD, 0)
        with pytest.raises(Refused, match="shard-0 is of generation 2, which has ended"):
            RendezvousClient(here.contact("shard-0", generation=2)).renew(request)
        monkeypatch.setattr(rendezvous, "_incarnation", lambda: "another process")
        with pytest.raises(Refused, match="the caller is not the process that has come as shard-0"):
            RendezvousClient(here.contact("shard-0")).renew(request)


def test_workers_without_certificates_get_none(here):
    shard = RendezvousClient(here.contact("shard-0"))
    shard.announce("127.0.0.1:1")
    with pytest.raises(Refused, match="the workers of this job have no certificates"):
        shard.renew(signing_request(draw_key()))


def test_a_second_process_of_one_worker_is_refused_and_the_first_one_stays(here, monkeypatch):
    RendezvousClient(here.contact("shard-0")).announce("127.0.0.1:1")
    monkeypatch.setattr(rendezvous, "_incarnation", lambda: "another process")
    with pytest.raises(Refused, match="generation 3 has another shard-0 already, which serves at 127.0.0.1:1; end one"):
        RendezvousClient(here.contact("shard-0")).announce("127.0.0.1:2")
    assert here.address("shard-0") == "127.0.0.1:1"


def test_a_wrong_secret_is_refused(here):
    stranger = RendezvousClient(here.contact("shard-0", secret="guess"))
    with pytest.raises(Refused, match="wrong secret"):
        stranger.announce("127.0.0.1:2")


def test_a_launcher_that_is_gone_is_unavailable(here):
    client = RendezvousClient(here.contact("shard-0"))
    here.close()
    with pytest.raises(Unavailable, match="the launcher at unix:"):
        client.announce("127.0.0.1:2")


def test_who_waits_when_the_next_generation_begins_is_refused(here):
    refused = []

    def meet():
        try:
            RendezvousClient(here.contact("trainer-1")).meet("", {}, soon())
        except Refused as error:
            refused.append(str(error))

    waiting = threading.Thread(target=meet)
    waiting.start()
    here.meeting.begin([], 4)
    waiting.join()
    assert "trainer-1 is of generation 3, which has ended, and generation 4 runs" in refused[0]


# -- inputs


def reading(folder, *paths):
    """A trainer that reads files of `folder`, at a rendezvous of its own."""
    sizes = head_sizes(paths, folder)
    spec = WorkerSpec(
        role=WorkerRole.TRAINER, number=0, command=(), config={}, folder=folder, run_folder=folder,
        inputs=digests(sizes, folder),
    )  # fmt: skip
    meeting = Meeting()
    meeting.begin([spec], 1)
    return sizes, lambda given: meeting.meet(Member("trainer-0", 1, "x"), "", given, soon())


def test_the_same_files_are_accepted_also_where_they_have_grown(tmp_path):
    for machine in ("head", "node"):
        (tmp_path / machine).mkdir()
        (tmp_path / machine / "model.py").write_text("class Model: ...")
        (tmp_path / machine / "lines.txt").write_text("1 2\n")
    sizes, meet = reading(tmp_path / "head", "model.py", "lines.txt", "no such file")
    assert list(sizes) == ["model.py", "lines.txt"]
    with (tmp_path / "node" / "lines.txt").open("a") as file:
        file.write("3 4\n")
    assert meet(digests(sizes, tmp_path / "node")) == ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: path.write_text("class Model: pass"), "its first bytes have the digest"),
        (lambda path: path.unlink(), "it is not there"),
    ],
)
def test_other_files_are_refused_with_their_name_and_what_to_do(tmp_path, change, words):
    for machine in ("head", "node"):
        (tmp_path / machine).mkdir()
        (tmp_path / machine / "model.py").write_text("class Model: ...")
    sizes, meet = reading(tmp_path / "head", "model.py")
    change(tmp_path / "node" / "model.py")
    with pytest.raises(SpecError, match=f"trainer-0 reads model.py, and at its machine {words}.*copy the file from"):
        meet(digests(sizes, tmp_path / "node"))


def test_before_a_generation_begins_nobody_is_expected():
    with pytest.raises(Refused, match="trainer-0 is of generation 1, and this launcher runs generation 0"):
        Roll().admit(Member("trainer-0", 1, "x"))


# -- renewals

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
HALF = LIFETIME / 2


def process(worker, incarnation="one"):
    return Member(worker, 3, incarnation)


@pytest.fixture
def certified():
    """A generation whose workers came at BEGIN; trainer-1 has not come."""
    roll = Roll(3, {worker: {} for worker in WORKERS})
    for worker in WORKERS[:2]:
        roll.admit(process(worker))
        roll.certified[worker] = BEGIN
    return roll


def test_a_worker_that_misses_several_renewals_is_named_until_it_has_another_certificate(certified):
    assert certified.unrenewed(BEGIN + HALF) == {}, "it may be at its first try"
    late = BEGIN + HALF * 1.2
    assert certified.unrenewed(late) == {"shard-0": BEGIN, "trainer-0": BEGIN}
    certified.renew(process("shard-0"), late)
    assert certified.unrenewed(late) == {"trainer-0": BEGIN}
    assert set(certified.unrenewed(late + HALF * 1.2)) == {"shard-0", "trainer-0"}


def test_the_certificate_of_an_agent_or_of_another_process_does_not_count(certified):
    late = BEGIN + HALF * 1.2
    for other in ("", "another"):
        certified.renew(process("shard-0", other), late)
    assert "shard-0" in certified.unrenewed(late)


def test_a_renewal_is_noted_and_workers_without_certificates_are_never_late(tmp_path, monkeypatch):
    authority = open_authority(tmp_path / "identity", "news")
    with RendezvousHere(tmp_path, *WORKERS, generation=3, authority=authority) as here:
        shard = RendezvousClient(here.contact("shard-0"))
        shard.announce("10.0.0.1:1")
        assert here.meeting.unrenewed() == {}
        monkeypatch.setattr(certificates, "LIFETIME", timedelta(0))  # every certificate is too old
        (before,) = here.meeting.unrenewed().values()
        shard.renew(signing_request(draw_key()))
        (after,) = here.meeting.unrenewed().values()
        assert after > before
    meeting = Meeting()
    meeting.begin([], 3)
    assert meeting.unrenewed() == {}


def test_a_late_renewal_is_an_alarm():
    status = read(Status, {"unrenewed": {"shard-0": "2026-01-01 00:00:00 UTC"}})
    told = "certificates are not renewed: shard-0 (the last is of 2026-01-01 00:00:00 UTC); the output of these workers"
    assert alarms(status)[Alarm.CERTIFICATES].startswith(told)
    assert alarms(read(Status, {"unrenewed": {}})) == {}


def test_threads_that_call_at_the_same_time_are_one_process(monkeypatch):
    both = threading.Barrier(2)
    draw = secrets.token_hex

    def drawn_by_both(num_bytes):
        both.wait(10)
        return draw(num_bytes)

    monkeypatch.setattr(rendezvous, "_INCARNATIONS", {})
    monkeypatch.setattr(rendezvous.secrets, "token_hex", drawn_by_both)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda _: rendezvous._incarnation(), range(2))
    monkeypatch.undo()
    assert first == second != rendezvous._incarnation()
