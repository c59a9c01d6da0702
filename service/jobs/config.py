"""The configuration of a service: the folder of its jobs, its address, what specs may name, and its limits."""

from pathlib import Path
from typing import Annotated, Self
from urllib.parse import parse_qs, urlsplit

from pydantic import Field, PrivateAttr, field_validator

from headrace.address import parse_address
from headrace.config import Duration, PositiveSize, Section, Size, load_toml, validate
from headrace.service.auth.config import AccessSection, AllowSection, TlsSection

SQLITE = "sqlite:///"
POSTGRESQL = "postgresql"
SECRET_FILES = ("passfile", "sslkey")
"""Keys of a PostgreSQL URL that name files with secrets."""


class LimitsSection(Section):
    """Limits. A request beyond a limit is refused with an explanation."""

    max_jobs: int = Field(default=64, ge=1, le=10_000)
    """Jobs of the service, also those that have ended."""
    max_body: PositiveSize = 1 << 20
    """Longest body of a request."""
    max_streams: int = Field(default=64, ge=0, le=10_000)
    """Open streams of server-sent events, and likewise open pages."""
    max_streams_each: int = Field(default=16, ge=1, le=10_000)
    """Of these for one caller: one token, or one address without a token."""
    max_operations: int = Field(default=64, ge=1, le=10_000)
    """Operations that wait or run at a time."""
    operations: int = Field(default=4, ge=1, le=64)
    """Operations that run at a time."""
    max_output: Size = 32 << 20
    """Output of a job's processes that is kept; older output is deleted."""
    stop: Duration = 60.0
    """How long a stopping job may take to finish its pass and commit; then it is killed."""
    prediction_workers: int = Field(default=8, ge=1, le=128)
    """Processes of one prediction over the API: trainers and shards together."""
    max_restarts: int = Field(default=5, ge=0, le=1000)
    """Restarts of a job's launcher within `restart_window` after which the next death fails the job."""
    restart_window: Duration = 600.0
    """The time over which such restarts are counted."""


class BuildSection(Section):
    """An environment with Headrace that jobs may move to."""

    python: Path
    """Its interpreter, as in "/opt/headrace-0.2/bin/python": an absolute path."""

    @field_validator("python")
    @classmethod
    def _is_absolute(cls, python: Path) -> Path:
        if not python.is_absolute():
            raise ValueError("must be an absolute path")
        return python

    @property
    def private(self) -> Path:
        """The folder that no spec may reach: that of the environment, or else of its programs."""
        environment = self.python.parent.parent
        return environment if (environment / "pyvenv.cfg").exists() else self.python.parent


class ServiceConfig(Section):
    """A service. Relative paths start at the folder of the file."""

    root: Path
    """Folder of the database and of the jobs' folders; created if absent."""
    listen: str = "127.0.0.1:8080"
    """Address of the API."""
    database: str | None = Field(default=None, repr=False)
    """Database URL of SQLAlchemy: "postgresql+psycopg://USER@HOST/NAME?passfile=FILE" lets a second service wait and
    take over. Default: SQLite, below `root`, for one service."""
    tls: TlsSection = TlsSection()
    """Encryption."""
    access: AccessSection = AccessSection()
    """Access to the API."""
    allow: AllowSection = AllowSection()
    """Limits on what job specs may name."""
    builds: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")], BuildSection] = {}
    """Builds that `headrace upgrade` may move jobs to, by name. The service's own environment needs no entry."""
    limits: LimitsSection = LimitsSection()
    """Limits."""
    _file: Path | None = PrivateAttr(None)
    """The file that it was read from."""

    @field_validator("listen")
    @classmethod
    def _is_an_address(cls, listen: str) -> str:
        parse_address(listen)
        return listen

    @property
    def database_url(self) -> str:
        """URL of the database."""
        return self.database or f"sqlite:///{self.root / 'records.db'}"

    @property
    def shares_records(self) -> bool:
        """Whether other services may have the same records, and wait for their turn."""
        return self.database_url.startswith(POSTGRESQL)

    @property
    def private(self) -> tuple[Path, ...]:
        """Paths that no spec may reach, even below an allowed root: jobs, database, key, and this configuration."""
        of_tls = (path for path in (self.tls.cert, self.tls.key) if path is not None)
        secrets = (Path(file) for file in self.allow.secret_files)
        builds = (build.private for build in self.builds.values())
        return (
            self.root,
            *of_tls,
            *secrets,
            *builds,
            *self.record_files,
            *([] if self._file is None else [self._file]),
        )

    def read_from(self, file: Path) -> Self:
        """A copy that records the file it was read from."""
        found = self.model_copy()
        found._file = file  # noqa: SLF001  # of this class
        return found

    @property
    def record_files(self) -> list[Path]:
        """The files of an SQLite database that `database` names, or those with the secrets of a PostgreSQL one."""
        if self.database is not None and self.shares_records:
            keys = parse_qs(urlsplit(self.database).query)
            return [Path(file).absolute() for key in SECRET_FILES for file in keys.get(key, ())]
        if self.database is None or not self.database.startswith(SQLITE):
            return []
        name = self.database.removeprefix(SQLITE).partition("?")[0]
        return [Path(name + suffix).absolute() for suffix in ("", "-wal", "-shm", "-journal")] if name else []

    @property
    def predicting(self) -> Path:
        """Folder for private files of the workers of predictions."""
        return self.root / "predicting"

    @property
    def jobs(self) -> Path:
        """Folder of the jobs' folders."""
        return self.root / "jobs"


def load_service(path: Path) -> ServiceConfig:
    """The configuration at `path`, with absolute paths. Raises SpecError."""
    return with_absolute_paths(validate(ServiceConfig, load_toml(path)), path.resolve().parent).read_from(
        path.resolve()
    )


def with_absolute_paths(config: ServiceConfig, folder: Path) -> ServiceConfig:
    """`config`, with paths relative to `folder` made absolute."""
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
