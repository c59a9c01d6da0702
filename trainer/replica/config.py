"""Configuration of a replica."""

from pathlib import Path

from pydantic import field_validator, model_validator

from headrace.address import is_loopback, parse_address
from headrace.config import Count, Duration, PositiveCount, PositiveSize, Section, Size
from headrace.errors import SpecError
from headrace.http.listening import check_tls


class ReplicaConfig(Section):
    """A replica of one job."""

    exports: str | None = None
    """Folder or object store of one export stream of one job, where current.json is. With a live feed: followed
    while the replica is too slow for the live feed."""
    feed: str | None = None
    """Address of a job at a service, http(s)://host:port/v1/jobs/<job>: follows its live feed."""
    store: Path | None = None
    """Store of a job that runs on this machine: follows its live feed."""
    join: str | None = None
    """Address of a job's launcher, HOST:PORT (`cluster.listen`): follows its live feed."""
    feed_token_file: Path | None = None
    """File with the token for requests to the service; with `join`, the job's join token."""
    listen: str = "127.0.0.1:8090"
    """Address for requests; port 0 takes a free port."""
    grpc_listen: str | None = None
    """Address for requests over gRPC; port 0 takes a free port. Token and certificate are those of `listen`."""
    health: str | None = None
    """Another address, where only `/live` and `/ready` are answered, whatever clients do at `listen`."""
    token_file: Path | None = None
    """File with the token that requests must carry. Health checks need none."""
    tls_cert: Path | None = None
    """PEM file with the certificate and its intermediates; with `tls_key`, requests use HTTPS."""
    tls_key: Path | None = None
    """PEM file with the key of the certificate, without a password; others must not be able to read it."""
    anyone: bool = False
    """Whether to listen on other addresses than loopback without a token."""
    address_file: Path | None = None
    """File that receives host:port once requests are answered."""
    items: tuple[str, ...] = ()
    """Files of the catalogue of items, or globs; unset: those of the job file's [retrieval]."""
    rankers: tuple[str, ...] = ()
    """Jobs whose models rank retrieved items: each a store on this machine, or exports as in `exports`."""
    keep_versions: Count = 100
    """Most versions that are kept for a rollback, beside the newest."""
    keep_memory: Size = 1 << 30
    """Most memory for kept versions; the oldest are dropped first."""
    max_body: PositiveSize = 8 << 20
    """Longest body of a request."""
    max_batch: PositiveCount = 4096
    """Most samples of one request."""
    max_requests: PositiveCount = 256
    """Most requests at the same time; more are answered 503."""
    poll: Duration = 1.0
    """Interval of reads of current.json."""

    @field_validator("listen", "grpc_listen")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is not None:
            parse_address(value, "127.0.0.1:8090")
        return value

    @field_validator("join")
    @classmethod
    def _address_of_launcher(cls, value: str | None) -> str | None:
        if value is not None:
            parse_address(value, "127.0.0.1:7070")
        return value

    @model_validator(mode="after")
    def _one_source(self) -> "ReplicaConfig":
        feeds = [each for each in (self.feed, self.store, self.join) if each is not None]
        if self.exports is None and not feeds:
            raise SpecError("name the source to follow: --exports, --feed, --join or --store")
        if len(feeds) > 1:
            raise SpecError("name one of --feed, --join and --store: each is the live feed")
        if self.store is not None and not self.store.is_dir():
            raise SpecError(
                f"there is no folder {self.store}; name the store.path of a job that has started", "--store"
            )
        if self.join is not None and self.feed_token_file is None:
            raise SpecError("--join needs the join token of the job: name its file", "--feed-token-file")
        return self

    def tls(self) -> tuple[Path, Path] | None:
        """Certificate and key. Raises SpecError where there is one without the other, or they do not fit."""
        if self.tls_cert is None and self.tls_key is None:
            return None
        if self.tls_cert is None or self.tls_key is None:
            raise SpecError("--tls-cert and --tls-key belong together: name both, or neither", "--tls-cert")
        check_tls(self.tls_cert, self.tls_key, ("--tls-cert", "--tls-key"))
        return self.tls_cert, self.tls_key

    def ranker(self, place: str) -> "ReplicaConfig":
        """The configuration of what follows a ranking model, as of a replica of its own."""
        is_store = (Path(place) / "log").is_dir()
        found = {"exports": None, "store": Path(place)} if is_store else {"exports": place, "store": None}
        return self.model_copy(update={**found, "feed": None, "join": None, "items": (), "keep_versions": 0})

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        return parse_address(self.listen)

    @property
    def grpc_address(self) -> tuple[str, int] | None:
        """Host and port for gRPC."""
        return None if self.grpc_listen is None else parse_address(self.grpc_listen)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can send requests over HTTP."""
        return is_loopback(self.address[0])

    def token(self) -> str | None:
        """The token that requests must carry. Raises SpecError where an address needs one and there is none."""
        if self.token_file is not None:
            return read_token(self.token_file, "--token-file")
        for option, address in (("--listen", self.address), ("--grpc-listen", self.grpc_address)):
            if address is not None and not is_loopback(address[0]) and not self.anyone:
                raise SpecError(
                    f"{address[0]!r} is not this machine's loopback: name a file with a token that requests must "
                    "carry (--token-file), or allow requests of anyone (--anyone)",
                    option,
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
        raise SpecError(f"{path}: holds no token; write a line of at least {MIN_TOKEN} letters and digits", option)
    return token
