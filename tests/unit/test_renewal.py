"""Credentials are renewed at half their life, for the same name; each try that fails is told with the end."""

import threading
import time
from datetime import UTC, datetime, timedelta

import pytest

from headrace.deadline import Deadline
from headrace.errors import Refused, Unavailable
from headrace.identity import certificates, renewal
from headrace.identity.authority import open_authority
from headrace.identity.peers import PeerName, PeerRole
from headrace.identity.renewal import RenewedIdentity

SHARD = PeerName("news", 3, PeerRole.SHARD, 1)


@pytest.fixture
def authority(tmp_path):
    return open_authority(tmp_path, "news")


@pytest.fixture
def ended(authority, monkeypatch):
    """Credentials whose life is over."""
    with monkeypatch.context() as patched:
        patched.setattr(certificates, "LIFETIME", timedelta(0))
        return authority.credentials(SHARD)


def test_the_half_of_a_life_counts_from_the_signature(authority):
    signed = datetime(2026, 3, 1, tzinfo=UTC)
    mine = authority.sign(certificates.signing_request(certificates.draw_key()), SHARD, signed)
    assert certificates.half_life(certificates.load(mine)) == signed + certificates.LIFETIME / 2


def test_credentials_in_the_first_half_of_their_life_stay(authority):
    mine = authority.credentials(SHARD)
    identity = RenewedIdentity(mine, lambda _: pytest.fail("it is not time"))
    assert identity.attend() == renewal.LOOK_S and identity.current is mine


def test_a_renewed_certificate_has_the_same_name_and_another_key(authority, ended, caplog):
    caplog.set_level("INFO")
    identity = RenewedIdentity(ended, lambda request: authority.sign(request, SHARD))
    assert identity.attend() > 0
    mine = identity.current
    assert mine.name == SHARD and mine.key != ended.key and mine.ends > ended.ends
    signed = certificates.load(mine.certificate).public_key()
    assert signed == certificates.private_key(mine.key).public_key()
    assert f"the certificate of {SHARD} is renewed until {mine.ends:%Y-%m-%d}" in caplog.text
    identity.attend()
    assert identity.current is mine


def test_a_thread_renews_until_its_context_ends(authority, ended):
    asked = threading.Event()

    def sign(request):
        asked.set()
        return authority.sign(request, SHARD)

    identity = RenewedIdentity(ended, sign)
    with identity.attended():
        assert asked.wait(10)
        deadline = Deadline.after(10)
        while identity.current is ended:
            deadline.check("waiting for the renewal")
            time.sleep(0.005)
    assert "renewal" not in [thread.name for thread in threading.enumerate()]


def test_a_renewal_that_fails_is_told_with_the_end_of_the_life_and_tried_again(authority, monkeypatch, caplog):
    monkeypatch.setattr(certificates, "LIFETIME", timedelta(minutes=40))
    old = authority.sign(
        certificates.signing_request(key := certificates.draw_key()), SHARD, datetime.now(UTC) - timedelta(minutes=21)
    )
    mine = authority.credentials(SHARD).model_copy(update={"key": key, "certificate": old})
    tries = []

    def fail(request):
        tries.append(request)
        raise Unavailable("the launcher is not reachable")

    identity = RenewedIdentity(mine, fail)
    pause_s = identity.attend()
    assert 0 < pause_s <= timedelta(minutes=20).total_seconds() / renewal.NUM_TRIES
    assert f"the certificate of {SHARD} ends at {mine.ends:%Y-%m-%d %H:%M:%S} UTC and was not renewed" in caplog.text
    assert "the launcher is not reachable. The next try is at" in caplog.text
    assert "no new connection with this process succeeds" in caplog.text and "restart the job before" in caplog.text
    identity.attend()
    assert len(tries) == 1, "not before its time"
    assert mine.ends - datetime.now(UTC) > timedelta(minutes=18), "well before the end"


@pytest.mark.parametrize("other", ["name", "authority", "damaged"])
def test_a_certificate_of_somebody_else_is_not_taken(authority, ended, other, tmp_path_factory, caplog):
    stranger = open_authority(tmp_path_factory.mktemp("other"), "news")
    answers = {
        "name": lambda request: authority.sign(request, PeerName("news", 3, PeerRole.SHARD, 2)),
        "authority": lambda request: stranger.sign(request, SHARD),
        "damaged": lambda _: "x",
    }
    told = {"name": "a certificate of shard-2", "authority": "of another authority", "damaged": "a damaged certificate"}
    identity = RenewedIdentity(ended, answers[other])
    identity.attend()
    assert identity.current is ended and told[other] in caplog.text


def test_a_head_draws_its_own_again(authority, monkeypatch):
    monkeypatch.setattr(certificates, "LIFETIME", timedelta(0))
    head = authority.identity(authority.name(3, PeerRole.HEAD, 0))
    first = head.current
    monkeypatch.setattr(certificates, "LIFETIME", timedelta(days=7))
    second = head.current
    assert second.key != first.key and second.name == first.name and head.current is second


def test_the_refusal_of_a_launcher_is_a_failed_try(ended, caplog):
    def refuse(_):
        raise Refused("the caller is not the process that has come as shard-1")

    assert RenewedIdentity(ended, refuse).attend() >= 0
    assert "was not renewed: the caller is not the process that has come" in caplog.text
