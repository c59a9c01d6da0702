"""The certificate authority of a job: its key and certificate in a folder at the head, made once, kept over restarts.

The key never leaves the folder. headrace.identity.certificates has the form of certificates.
"""

import os
import secrets
import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from headrace.durable import REAL, Disk, check_no_link, writing
from headrace.errors import SpecError
from headrace.identity import certificates
from headrace.identity.credentials import Credentials
from headrace.identity.peers import PeerName, PeerRole

FILE = "authority.pem"
"""The key and the certificate of the authority, in this order, for the owner only."""
LIFETIME = timedelta(days=3650)
"""How long an authority is valid."""
MAX_FILE_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Authority:
    """Signs the certificates of a job's processes."""

    job: str
    certificate: x509.Certificate
    _key: ec.EllipticCurvePrivateKey = field(repr=False)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of its certificate; a join token has it."""
        return certificates.fingerprint(self.certificate)

    @property
    def pem(self) -> str:
        """Its certificate, which everybody may have."""
        return self.certificate.public_bytes(serialization.Encoding.PEM).decode()

    def sign(self, request: str, name: PeerName, now: datetime | None = None) -> str:
        """The certificate, as PEM, for the key of a signing request; `name` is given, not asked for.

        Raises InvalidRequest, and ValueError for a name of another job.
        """
        if name.job != self.job:
            raise ValueError(f"the authority of job {self.job!r} does not sign for {name}")
        key = certificates.public_key_of(request)
        made = certificates.signed_for(name, key, self.certificate, self._key, now or datetime.now(UTC))
        return made.public_bytes(serialization.Encoding.PEM).decode()

    def name(self, generation: int, role: PeerRole, number: int) -> PeerName:
        """The name of a process of the job."""
        return PeerName(self.job, generation, role, number)

    def identity(self, name: PeerName) -> "OwnIdentity":
        """The identity of a process that has this authority."""
        return OwnIdentity(self, name)

    def credentials(self, name: PeerName) -> Credentials:
        """Credentials with a new key, for a process of this machine: the key does not leave it."""
        key = certificates.draw_key()
        certificate = self.sign(certificates.signing_request(key), name)
        return Credentials(authority=self.pem, certificate=certificate, key=key)


class OwnIdentity:
    """The credentials are drawn again once half their life is over, by whoever asks for them then."""

    def __init__(self, authority: Authority, name: PeerName) -> None:
        self._authority, self._name = authority, name
        self._current = authority.credentials(name)
        self._lock = threading.Lock()

    @property
    def current(self) -> Credentials:
        with self._lock:
            if datetime.now(UTC) >= self._current.half_life:
                self._current = self._authority.credentials(self._name)
            return self._current


def open_authority(folder: Path, job: str, disk: Disk = REAL) -> Authority:
    """The authority of `job` in `folder`; both are made if absent. Any number of processes may open it at once.

    Raises SpecError for a file that is damaged, of another job, or not private; Unwritable.
    """
    path = check_no_link(folder / FILE)
    if not path.exists():
        _make(path, job, disk)
    if (mode := path.stat().st_mode & 0o077) != 0:
        raise SpecError(
            f"{path} has the key of the job's authority, and others may use it (mode {mode | 0o600:o}); replace the "
            "authority: remove this file, restart the job and hand out the new join token",
            "store.path",
        )
    with path.open("rb") as file:
        content = file.read(MAX_FILE_BYTES)
    try:
        key, certificate = certificates.private_key(content.decode()), x509.load_pem_x509_certificate(content)
    except ValueError as error:
        raise SpecError(f"{path} is damaged ({error}); put it back as it was", "store.path") from None
    return Authority(_job_of(path, certificate, job), certificate, key)


def _job_of(path: Path, certificate: x509.Certificate, job: str) -> str:
    (name,) = certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME) or (None,)
    if name is None or name.value != job:
        found = None if name is None else name.value
        raise SpecError(
            f"{path} is the authority of job {found!r}, not of {job!r}; choose another folder", "store.path"
        )
    return job


def _make(path: Path, job: str, disk: Disk) -> None:
    """Draw a key and write it with its certificate, unless another process was quicker.

    1. Write both under a name of this process. 2. Sync. 3. Link: the authority exists from here on. 4. Sync the folder.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = [
        x509.NameAttribute(NameOID.ORGANIZATION_NAME, job),
        x509.NameAttribute(NameOID.COMMON_NAME, f"Headrace authority {secrets.token_hex(4)}"),
    ]
    certificate = certificates.self_signed(x509.Name(name), key, datetime.now(UTC), LIFETIME)
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    write_once(path, secret + certificate.public_bytes(serialization.Encoding.PEM), disk)


def write_once(path: Path, content: bytes, disk: Disk = REAL) -> None:
    """Write a private file durably, unless one of this name exists. Raises Unwritable."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    with writing(path):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            os.close(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            with disk.open(unfinished) as file:  # 1
                disk.append(file, content)
                disk.sync(file)  # 2
            try:
                disk.link(unfinished, path)  # 3
            except FileExistsError:
                pass
        finally:
            unfinished.unlink(missing_ok=True)
        disk.sync_folder(path.parent)  # 4
