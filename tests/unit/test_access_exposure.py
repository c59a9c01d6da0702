"""Where the API may listen, and under which conditions."""

import datetime
import ipaddress

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from headrace.address import is_loopback
from headrace.errors import SpecError
from headrace.http.listening import check_tls
from headrace.service.auth.config import AccessSection, TlsSection
from headrace.service.auth.exposure import exposure_of

NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def write_pair(folder, name, password=None, address=None):
    """A certificate of its own and its key, as PEM files; for localhost, and an IP address."""
    key = ec.generate_private_key(ec.SECP256R1())
    addresses = [] if address is None else [x509.IPAddress(ipaddress.ip_address(address))]
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    cert = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(NOW)
        .not_valid_after(NOW + datetime.timedelta(days=36500))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost"), *addresses]), critical=False)
        .sign(key, hashes.SHA256())
    )
    encryption = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    paths = folder / f"{name}.crt", folder / f"{name}.key"
    paths[0].write_bytes(cert.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption))
    paths[1].chmod(0o600)
    return paths


@pytest.fixture
def pair(tmp_path):
    return write_pair(tmp_path, "ours")


def tls_of(pair):
    return TlsSection(cert=pair[0], key=pair[1])


def refused(act, *arguments, **named):
    with pytest.raises(SpecError) as caught:
        act(*arguments, **named)
    return str(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.8.8.8", "::1"])
def test_loopback_needs_nothing(host):
    listen = f"[{host}]:8080" if ":" in host else f"{host}:8080"
    exposure = exposure_of(listen, AccessSection(anonymous="admin"), TlsSection(), any_token=False)
    assert exposure.port == 8080 and "127.0.0.1" in exposure.names
    assert exposure.url.startswith("http://")


@pytest.mark.parametrize("host", ["192.168.0.1", "host.example", "127.0.0.1.evil.example", "10.0.0.1", "0x7f.1"])
def test_elsewhere_everything_that_is_missing_is_told_at_once(host):
    told = refused(exposure_of, f"{host}:80", AccessSection(anonymous="viewer"), TlsSection(), any_token=False)
    assert told.startswith(f"listen: {host} is not this machine's loopback")
    for part in ("tls.cert", "headrace token create", "access.anonymous", "access.unprotected = true"):
        assert part in told
    assert not is_loopback(host)


@pytest.mark.parametrize("lacking", ["tls", "token", "anonymous"])
def test_elsewhere_one_thing_that_is_missing_is_enough(pair, lacking):
    access = AccessSection(anonymous="viewer" if lacking == "anonymous" else "none")
    tls = TlsSection() if lacking == "tls" else tls_of(pair)
    assert "listen: " in refused(exposure_of, "10.0.0.1:80", access, tls, any_token=lacking != "token")


def test_elsewhere_with_all_of_it_is_fine_and_answers_to_its_names_alone(pair):
    exposure = exposure_of("10.0.0.1:443", AccessSection(hosts=("jobs.example",)), tls_of(pair), any_token=True)
    assert exposure.names == ("127.0.0.1", "localhost", "::1", "jobs.example", "10.0.0.1")
    assert exposure.url == "https://10.0.0.1:443" and exposure.cert == pair[0]


def test_who_insists_may_listen_anywhere_but_must_say_the_names():
    insisting = AccessSection(unprotected=True)
    assert exposure_of("10.0.0.1:80", insisting, TlsSection(), any_token=False).host == "10.0.0.1"
    assert refused(exposure_of, "0.0.0.0:80", insisting, TlsSection(), any_token=True).startswith("access.hosts: ")
    named = AccessSection(unprotected=True, hosts=("headrace",))
    assert "0.0.0.0" not in exposure_of("0.0.0.0:80", named, TlsSection(), any_token=True).names


@pytest.mark.parametrize("listen", ["8080", "host:", ":8080", "host:99999", "host:-1", "host:x"])
def test_what_is_no_address_is_refused(listen):
    assert "not of the form" in refused(exposure_of, listen, AccessSection(), TlsSection(), any_token=True)


def test_half_of_tls_is_none():
    with pytest.raises(ValueError, match="both cert and key"):
        TlsSection(cert="x.pem")


def test_a_key_that_everybody_may_read_is_refused(pair):
    check_tls(*pair)
    pair[1].chmod(0o640)
    check_tls(*pair)
    pair[1].chmod(0o644)
    assert refused(check_tls, *pair).startswith("tls.key: ")


def test_files_that_are_missing_wrong_locked_or_of_another_pair_are_refused(tmp_path, pair):
    other = write_pair(tmp_path, "other")
    locked = write_pair(tmp_path, "locked", password=b"secret")
    nonsense = tmp_path / "nonsense"
    nonsense.write_text("x")
    nonsense.chmod(0o600)
    assert "no such file" in refused(check_tls, tmp_path / "missing", pair[1])
    assert "not a certificate and its key" in refused(check_tls, pair[0], other[1])
    assert "not a certificate and its key" in refused(check_tls, *locked)
    assert "not a certificate and its key" in refused(check_tls, nonsense, nonsense)
