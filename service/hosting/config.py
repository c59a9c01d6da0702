"""What a service's owner writes: where it keeps its jobs, where it listens, what it allows, and its bounds."""

from pathlib import Path
from typing import Self

from pydantic import Field, PrivateAttr, field_validator

from millrace.address import parse_address
from millrace.config import Duration, PositiveSize, Section, Size, load_toml, validate
from service.access.config import AccessSection, AllowSection, TlsSection

SQLITE = "sqlite:///"


class LimitsSection(Section):
    """Bounds; beyond one, a request is refused with words."""

    max_jobs: int = Field(default=64, ge=1, le=10_000)
    """Jobs that are kept, ended ones too."""
    max_body: PositiveSize = 1 << 20
    """Of a request."""
    max_streams: int = Field(default=64, ge=0, le=10_000)
    """Server-sent event streams at a time, and as many pages."""
    max_streams_each: int = Field(default=16, ge=1, le=10_000)
    """Of these, what one caller may have open: one token, or, without one, one address."""
    max_operations: int = Field(default=64, ge=1, le=10_000)
    """Operations that wait or run at a time."""
    operations: int = Field(default=4, ge=1, le=64)
    """Operations that run at a time."""
    max_output: Size = 32 << 20
    """Of what a job's processes print, the newest so much is kept."""
    stop: Duration = 60.0
    """How long a job that is stopped may take to finish its pass and commit; then it is killed."""
    prediction_workers: int = Field(default=8, ge=1, le=128)
    """Processes of one prediction that somebody asks for: trainers and shards together."""
    max_restarts: int = Field(default=5, ge=0, le=1000)
    """How often a job's launcher is started again after a death within `restart_window`; then the job has failed."""
    restart_window: Duration = 600.0
    """The time over which such restarts are counted."""


class ServiceConfig(Section):
    """A service, as its owner writes it. Relative paths start at the file's folder."""

    root: Path
    """Folder of the records and of the jobs' folders; made if absent."""
    listen: str = "127.0.0.1:8080"
    """Address of the API."""
    database: str | None = None
    """Address of the records, as SQLAlchemy has it; unless set: SQLite, below `root`."""
    tls: TlsSection = TlsSection()
    """Encryption."""
    access: AccessSection = AccessSection()
    """Who may ask."""
    allow: AllowSection = AllowSection()
    """What specs may name."""
    limits: LimitsSection = LimitsSection()
    """Bounds."""
    _file: Path | None = PrivateAttr(None)
    """Where it was read."""

    @field_validator("listen")
    @classmethod
    def _is_an_address(cls, listen: str) -> str:
        parse_address(listen)
        return listen

    @property
    def database_url(self) -> str:
        """Where the records are."""
        return self.database or f"sqlite:///{self.root / 'records.db'}"

    @property
    def private(self) -> tuple[Path, ...]:
        """What no spec may reach, be it below an allowed root: jobs, records, key, and the file that allows things."""
        of_tls = (path for path in (self.tls.cert, self.tls.key) if path is not None)
        secrets = (Path(file) for file in self.allow.secret_files)
        return (self.root, *of_tls, *secrets, *self._records(), *([] if self._file is None else [self._file]))

    def read_from(self, file: Path) -> Self:
        """The same, as that file's."""
        found = self.model_copy()
        found._file = file  # noqa: SLF001  # one of us
        return found

    def _records(self) -> list[Path]:
        """SQLite's files, where a database of it lies elsewhere than below `root`."""
        if self.database is None or not self.database.startswith(SQLITE):
            return []
        name = self.database.removeprefix(SQLITE).partition("?")[0]
        return [Path(name + suffix).absolute() for suffix in ("", "-wal", "-shm", "-journal")] if name else []

    @property
    def predicting(self) -> Path:
        """Where private files of predictions' workers lie while these run."""
        return self.root / "predicting"

    @property
    def jobs(self) -> Path:
        """Where the jobs' folders are."""
        return self.root / "jobs"


def load_service(path: Path) -> ServiceConfig:
    """The service described at `path`, all its paths absolute. Raises SpecError."""
    return placed(validate(ServiceConfig, load_toml(path)), path.resolve().parent).read_from(path.resolve())


def placed(config: ServiceConfig, folder: Path) -> ServiceConfig:
    """`config` with relative paths begun at `folder`."""
    tls = config.tls
    if tls.cert is not None and tls.key is not None:
        tls = tls.model_copy(update={"cert": folder / tls.cert, "key": folder / tls.key})
    roots = tuple(root if "://" in root else str(folder / root) for root in config.allow.roots)
    secret_files = tuple(str(folder / file) for file in config.allow.secret_files)
    return config.model_copy(
        update={
            "root": (folder / config.root).resolve(),
            "tls": tls,
            "allow": config.allow.model_copy(update={"roots": roots, "secret_files": secret_files}),
        }
    )
