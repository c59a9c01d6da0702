"""What a replica is told at its start."""

from pathlib import Path

from pydantic import field_validator, model_validator

from millrace.address import is_loopback, parse_address
from millrace.config import Count, Duration, PositiveCount, PositiveSize, Section, Size
from millrace.errors import SpecError
from millrace.tls import check_tls


class ReplicaConfig(Section):
    """A replica of one job."""

    exports: str | None = None
    """Folder or object store of one stream of one job's exports, where current.json is."""
    feed: str | None = None
    """Address of a job of a service, http(s)://host:port/v1/jobs/<job>: its live feed is followed."""
    store: Path | None = None
    """Store of a job that runs on this machine: its live feed is followed."""
    feed_token_file: Path | None = None
    """File with the token that the service is asked with."""
    listen: str = "127.0.0.1:8090"
    """Where requests are answered; port 0 takes a free one."""
    token_file: Path | None = None
    """File with the token that requests must bear; health is told to all."""
    tls_cert: Path | None = None
    """PEM file with the certificate and those between it and the root; with `tls_key`, requests come over HTTPS."""
    tls_key: Path | None = None
    """PEM file with its key, without a password; not for everybody to read."""
    anyone: bool = False
    """Whether another address than loopback is listened on without a token."""
    address_file: Path | None = None
    """File that gets host:port once requests are answered."""
    keep_versions: Count = 100
    """Versions to go back to, at most, beside the newest."""
    keep_memory: Size = 1 << 30
    """Memory for them, at most; the oldest go first."""
    max_body: PositiveSize = 8 << 20
    """The longest request."""
    max_batch: PositiveCount = 4096
    """Samples of one request, at most."""
    max_requests: PositiveCount = 256
    """Requests under way at once; more are answered 503."""
    poll: Duration = 1.0
    """How often current.json is looked at."""

    @field_validator("listen")
    @classmethod
    def _address(cls, value: str) -> str:
        parse_address(value, "127.0.0.1:8090")
        return value

    @model_validator(mode="after")
    def _one_source(self) -> "ReplicaConfig":
        if sum(each is not None for each in (self.exports, self.feed, self.store)) != 1:
            raise SpecError("name one of --exports, --feed and --store, and no more: what is to be followed")
        return self

    def tls(self) -> tuple[Path, Path] | None:
        """Certificate and key. Raises SpecError where there is one without the other, or they do not fit."""
        if self.tls_cert is None and self.tls_key is None:
            return None
        if self.tls_cert is None or self.tls_key is None:
            raise SpecError("--tls-cert and --tls-key belong together: name both, or neither", "--tls-cert")
        check_tls(self.tls_cert, self.tls_key, ("--tls-cert", "--tls-key"))
        return self.tls_cert, self.tls_key

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        return parse_address(self.listen)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can ask."""
        return is_loopback(self.address[0])

    def token(self) -> str | None:
        """What requests must bear. Raises SpecError where the address asks for one and there is none."""
        if self.token_file is not None:
            return read_token(self.token_file, "--token-file")
        if not self.is_loopback and not self.anyone:
            raise SpecError(
                f"{self.address[0]!r} is not this machine's loopback: name a file with a token that requests must bear "
                "(--token-file), or say that anyone may ask (--anyone)",
                "--listen",
            )
        return None


MIN_TOKEN = 16


def read_token(path: Path, option: str) -> str:
    """The token in a file. Raises SpecError."""
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: cannot be read: {error}", option) from error
    if len(token) < MIN_TOKEN or not token.isprintable() or " " in token:
        raise SpecError(f"{path}: holds no token: a line of at least {MIN_TOKEN} letters and digits", option)
    return token
