"""Identity of the processes of a job: one authority, private keys that stay, names that peers check in words."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import Refused, SpecError
from headrace.identity import certificates
from headrace.identity.authority import FILE, open_authority
from headrace.identity.certificates import InvalidRequest, WrongPeer, check_peer, draw_key, signing_request
from headrace.identity.join_token import FILE as TOKEN
from headrace.identity.join_token import JoinToken, StaleToken, open_token, read_token, rotate_token
from headrace.identity.peers import PeerName, PeerRole, PeerRule

NOW = datetime.now(UTC).replace(second=0, microsecond=0)
SHARD = PeerName("news", 3, PeerRole.SHARD, 1)
TRAINERS = PeerRule("news", 3, {PeerRole.TRAINER: range(2), PeerRole.HEAD: range(1)})
names = st.builds(
    PeerName,
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True),
    st.integers(0, 10**12),
    st.sampled_from(PeerRole),
    st.integers(0, 10**6),
)


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return open_authority(tmp_path_factory.mktemp("identity"), "news")


def der(pem):
    return x509.load_pem_x509_certificate(pem.encode()).public_bytes(serialization.Encoding.DER)


def signed(authority, name, now=NOW):
    return der(authority.sign(signing_request(draw_key()), name, now))


def refusal(certificate, authority, rule, now=NOW):
    with pytest.raises(WrongPeer) as refused:
        check_peer(certificate, authority.certificate, rule, now)
    return str(refused.value)


@given(names)
def test_a_name_reads_back(name):
    assert PeerName.parse(name.dns) == name


@pytest.mark.parametrize(
    "dns", ["", "shard", "shard-0", "shard-0.g1", "shard-0.g1.", "shard-x.g1.a", "nobody-0.g1.a", "shard-0.1.a"]
)
def test_other_texts_are_no_names(dns):
    with pytest.raises(ValueError, match="no name of a process"):
        PeerName.parse(dns)


def test_a_rule_says_whom_it_accepts_and_why_it_refuses():
    assert str(TRAINERS) == "trainer-0 to trainer-1 or head-0 of generation 3 of job 'news'"
    assert str(PeerRule.only(SHARD)) == str(SHARD) == "shard-1 of generation 3 of job 'news'"
    assert TRAINERS.objection(PeerName("news", 3, PeerRole.TRAINER, 1)) == ""
    for name, why in {
        PeerName("news", 3, PeerRole.TRAINER, 2): "address of another process",
        SHARD: "address of another process",
        PeerName("news", 2, PeerRole.TRAINER, 0): "an older generation, which has ended",
        PeerName("news", 4, PeerRole.TRAINER, 0): "a newer generation runs",
        PeerName("sport", 3, PeerRole.TRAINER, 0): "belongs to another job",
    }.items():
        objection = TRAINERS.objection(name)
        assert why in objection and str(name) in objection and str(TRAINERS) in objection


def test_an_authority_is_made_once_and_kept(tmp_path):
    folder = tmp_path / "identity"
    first = open_authority(folder, "news")
    assert open_authority(folder, "news").fingerprint == first.fingerprint
    assert stat.S_IMODE((folder / FILE).stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert os.listdir(folder) == [FILE]


def test_processes_that_make_it_at_the_same_time_get_the_same_one(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: open_authority(tmp_path, "news").fingerprint, range(16)))
    assert len(found) == 1 and os.listdir(tmp_path) == [FILE]


def test_a_damaged_foreign_or_open_authority_is_refused(tmp_path):
    open_authority(tmp_path, "news")
    with pytest.raises(SpecError, match="is the authority of job 'news', not of 'sport'"):
        open_authority(tmp_path, "sport")
    (tmp_path / FILE).chmod(0o640)
    with pytest.raises(SpecError, match="others may use it"):
        open_authority(tmp_path, "news")
    (tmp_path / FILE).chmod(0o600)
    (tmp_path / FILE).write_text((tmp_path / FILE).read_text()[:200])
    with pytest.raises(SpecError, match="is damaged"):
        open_authority(tmp_path, "news")


def test_a_file_that_links_elsewhere_is_not_followed(tmp_path):
    (tmp_path / FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Exception, match="is a symbolic link"):
        open_authority(tmp_path, "news")


def test_a_certificate_names_the_process_that_the_head_says(authority):
    assert check_peer(signed(authority, SHARD), authority.certificate, PeerRule.only(SHARD), NOW) == SHARD


def test_a_request_holds_no_private_key_and_no_name():
    key = draw_key()
    request = signing_request(key)
    assert "PRIVATE" not in request
    assert x509.load_pem_x509_csr(request.encode()).subject == x509.Name([])


def test_each_wrong_peer_is_told_with_the_reason(authority, tmp_path):
    other = open_authority(tmp_path, "news")
    rule = PeerRule.only(SHARD)
    assert "is of another authority" in refusal(signed(other, SHARD), authority, rule)
    assert "is damaged" in refusal(b"x", authority, rule)
    old = PeerName("news", 2, PeerRole.SHARD, 1)
    assert "an older generation" in refusal(signed(authority, old), authority, rule)
    assert "is this the address of another process" in refusal(signed(authority, SHARD), authority, TRAINERS)
    assert "names no process" in refusal(
        authority.certificate.public_bytes(serialization.Encoding.DER), authority, rule
    )


def test_clocks_may_differ_by_an_hour_and_more_is_told(authority):
    certificate, rule = signed(authority, SHARD), PeerRule.only(SHARD)
    for moment in (NOW - timedelta(minutes=59), NOW + certificates.LIFETIME):
        assert check_peer(certificate, authority.certificate, rule, moment) == SHARD
    for moment in (NOW - timedelta(minutes=61), NOW + certificates.LIFETIME + timedelta(seconds=1)):
        why = refusal(certificate, authority, rule, moment)
        assert f"the clock here says {moment:%Y-%m-%d %H:%M} UTC" in why and "may differ by 1 h" in why


def test_requests_that_are_not_ours_are_refused(authority):
    strange = rsa.generate_private_key(65537, 2048)
    of_rsa = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(strange, hashes.SHA256())
    p384 = ec.generate_private_key(ec.SECP384R1())
    of_p384 = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(p384, hashes.SHA256())
    text = [each.public_bytes(serialization.Encoding.PEM).decode() for each in (of_rsa, of_p384)]
    for request, why in (
        (text[0], "another kind of key"),
        (text[1], "another kind"),
        ("x", "damaged"),
        ("x" * 9000, "longer"),
    ):
        with pytest.raises(InvalidRequest, match=why):
            authority.sign(request, SHARD)
    with pytest.raises(ValueError, match="does not sign for"):
        authority.sign(signing_request(draw_key()), PeerName("sport", 3, PeerRole.SHARD, 1))


def test_a_request_with_a_forged_signature_is_refused(authority):
    request = x509.load_pem_x509_csr(signing_request(draw_key()).encode())
    raw = bytearray(request.public_bytes(serialization.Encoding.DER))
    raw[-1] ^= 1  # the last byte of the signature
    forged = x509.load_der_x509_csr(bytes(raw)).public_bytes(serialization.Encoding.PEM).decode()
    with pytest.raises(InvalidRequest, match="not signed by its own key"):
        authority.sign(forged, SHARD)


def test_a_process_cannot_sign_for_others(authority, tmp_path):
    """The certificate of a shard is no authority, although the job's authority signed it."""
    credentials = authority.credentials(SHARD)
    key, mine = certificates.private_key(credentials.key), certificates.load(credentials.certificate)
    made = certificates.signed_for(PeerName("news", 3, PeerRole.TRAINER, 0), key.public_key(), mine, key, NOW)
    assert "another authority" in refusal(made.public_bytes(serialization.Encoding.DER), authority, TRAINERS)


def test_credentials_do_not_show_their_key(authority):
    credentials = authority.credentials(SHARD)
    assert "PRIVATE" in credentials.key and "PRIVATE" not in repr(credentials) and "PRIVATE" not in repr(authority)


def test_a_token_is_kept_until_it_is_rotated(tmp_path):
    authority = open_authority(tmp_path, "news")
    token = open_token(tmp_path, authority)
    assert open_token(tmp_path, authority) == token == JoinToken.parse(f"{token}\n")
    assert token.fingerprint == authority.fingerprint
    assert stat.S_IMODE((tmp_path / TOKEN).stat().st_mode) == 0o600
    token.check(token.secret)
    newer = rotate_token(tmp_path, authority)
    assert newer.secret != token.secret and open_token(tmp_path, authority) == newer
    with pytest.raises(StaleToken, match="was rotated, or it is of another job; get the present one from the head"):
        newer.check(token.secret)
    assert issubclass(StaleToken, Refused)


def test_a_token_of_a_replaced_authority_is_replaced(tmp_path):
    old = open_token(tmp_path, open_authority(tmp_path, "news"))
    (tmp_path / FILE).unlink()
    authority = open_authority(tmp_path, "news")
    token = open_token(tmp_path, authority)
    assert token.fingerprint == authority.fingerprint != old.fingerprint and token.secret != old.secret


def test_texts_that_are_no_tokens_are_refused_and_not_shown(tmp_path):
    path = tmp_path / "token"
    for text in ("", "abracadabra", "headrace-1.00.11", "headrace-2." + "0" * 64 + "." + "1" * 64, "x" * 5000):
        path.write_text(text)
        with pytest.raises(SpecError, match="is not a join token") as refused:
            read_token(path)
        assert not text or text not in str(refused.value)
    with pytest.raises(SpecError, match="No such file"):
        read_token(tmp_path / "nothing")
    assert "secret=" not in repr(JoinToken("0" * 64, "1" * 64))
