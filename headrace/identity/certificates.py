"""Keys, signing requests and certificates of the processes of a job, and the check of a peer's certificate.

Pure, but for the drawing of keys. Private keys never travel: a process draws its key and sends a signing request;
headrace.identity.authority signs it.
"""

from datetime import datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from headrace.errors import HeadraceError, Refused
from headrace.identity.peers import PeerName, PeerRule

MAX_REQUEST_BYTES = 8 << 10
"""Longest signing request."""
LIFETIME = timedelta(days=7)
"""How long a certificate is valid; it is renewed at half of it. Generations are the guard against old processes; this
bounds a stolen key."""
MAX_SKEW = timedelta(hours=1)
"""Largest difference between the clocks of two machines of a job. A certificate begins so much before it is made."""


class WrongPeer(Refused):
    """A peer's certificate is not the expected one."""


class InvalidRequest(HeadraceError):
    """A signing request cannot be signed."""


def draw_key() -> str:
    """A new private key on P-256, as PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()


def signing_request(key: str) -> str:
    """A signing request, as PEM, for a private key. It names nobody: the authority gives the name."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return builder.sign(private_key(key), hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()


def public_key_of(request: str) -> ec.EllipticCurvePublicKey:
    """The public key of a signing request. Raises InvalidRequest."""
    if len(request) > MAX_REQUEST_BYTES:
        raise InvalidRequest(f"the signing request is longer than {MAX_REQUEST_BYTES} bytes")
    try:
        found = x509.load_pem_x509_csr(request.encode())
        key, signed = found.public_key(), found.is_signature_valid
    except ValueError as error:
        raise InvalidRequest(f"the signing request is damaged: {error}") from None
    if not signed:
        raise InvalidRequest("the signing request is not signed by its own key")
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise InvalidRequest("the signing request has another kind of key than P-256")
    return key


def private_key(pem: str) -> ec.EllipticCurvePrivateKey:
    """The private key in `pem`. Raises ValueError."""
    key = serialization.load_pem_private_key(pem.encode(), None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("the key is not of an elliptic curve")
    return key


def check_peer(certificate: bytes, authority: x509.Certificate, rule: PeerRule, now: datetime) -> PeerName:
    """The name in a peer's certificate (DER), if `authority` signed it, it is valid now, and `rule` accepts the name.

    Raises WrongPeer with the reason in words.
    """
    name = check_signed(certificate, authority, now)
    if reason := rule.objection(name):
        raise WrongPeer(reason)
    return name


def check_signed(certificate: bytes, authority: x509.Certificate, now: datetime) -> PeerName:
    """The name in a peer's certificate (DER), if `authority` signed it and it is valid now.

    Raises WrongPeer with the reason in words.
    """
    try:
        found = x509.load_der_x509_certificate(certificate)
    except ValueError as error:
        raise WrongPeer(f"its certificate is damaged: {error}") from None
    check_issuer(found, authority)
    check_time(found, now)
    return name_of(found)


def check_issuer(certificate: x509.Certificate, authority: x509.Certificate) -> None:
    """Raise WrongPeer unless `authority` signed the certificate."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        raise WrongPeer(
            f"its certificate is of another authority than the one expected ({fingerprint(authority)[:16]}): "
            "it belongs to another job, or joined with the token of another one"
        ) from None


def half_life(certificate: x509.Certificate) -> datetime:
    """When half the life of a certificate is over."""
    begun, end = certificate.not_valid_before_utc + MAX_SKEW, certificate.not_valid_after_utc
    return begun + (end - begun) / 2


def check_time(certificate: x509.Certificate, now: datetime) -> None:
    """Raise WrongPeer unless the certificate is valid at `now`."""
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if not begin <= now <= end:
        raise WrongPeer(
            f"its certificate is valid from {begin:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} UTC, and the clock here "
            f"says {now:%Y-%m-%d %H:%M} UTC; clocks of a job may differ by {MAX_SKEW.total_seconds() / 3600:g} h: "
            "set the clocks, or start the worker again for a new certificate"
        )


def name_of(certificate: x509.Certificate) -> PeerName:
    """The name in a certificate. Raises WrongPeer."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        (dns,) = names.get_values_for_type(x509.DNSName)
        return PeerName.parse(dns)
    except (x509.ExtensionNotFound, ValueError) as error:
        raise WrongPeer(f"its certificate names no process of a job: {error}") from None


def fingerprint(certificate: x509.Certificate) -> str:
    """SHA-256 of a certificate, in hexadecimal digits."""
    return certificate.fingerprint(hashes.SHA256()).hex()


def load(pem: str) -> x509.Certificate:
    """The certificate in `pem`. Raises ValueError."""
    return x509.load_pem_x509_certificate(pem.encode())


def signed_for(
    name: PeerName,
    key: ec.EllipticCurvePublicKey,
    issuer: x509.Certificate,
    by: ec.EllipticCurvePrivateKey,
    now: datetime,
) -> x509.Certificate:
    """A certificate for a process of a job, valid for LIFETIME."""
    usage = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    return (
        _begun(key, issuer.subject, now, LIFETIME, is_authority=False)
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{name.role}-{name.number}")]))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name.dns)]), critical=False)
        .add_extension(x509.ExtendedKeyUsage(usage), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(by.public_key()), critical=False)
        .sign(by, hashes.SHA256())
    )


def self_signed(
    subject: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, life: timedelta
) -> x509.Certificate:
    """The certificate of an authority, which may sign those of processes only."""
    builder = _begun(key.public_key(), subject, now, life, is_authority=True).subject_name(subject)
    return builder.sign(key, hashes.SHA256())


def _begun(
    key: ec.EllipticCurvePublicKey, issuer: x509.Name, now: datetime, life: timedelta, *, is_authority: bool
) -> x509.CertificateBuilder:
    usage = {name: False for name in ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")}
    signs = {"digital_signature": not is_authority, "key_cert_sign": is_authority, "crl_sign": is_authority}
    return (
        x509.CertificateBuilder()
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - MAX_SKEW)
        .not_valid_after(now + life)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True)
        .add_extension(x509.KeyUsage(**usage, **signs, encipher_only=False, decipher_only=False), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )
