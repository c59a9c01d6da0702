"""The database of the service's records: opens it, migrates it, and gives sessions.

It is SQLite, or PostgreSQL (service.records.postgres). Users of the sessions interpret the rows.
"""

import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

from alembic import command
from alembic.config import Config
from alembic.util.exc import CommandError
from sqlalchemy import Connection, Engine, create_engine, delete, event, func, inspect, select
from sqlalchemy import exc as sql_errors
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DatabaseError, NoSuchModuleError, OperationalError
from sqlalchemy.orm import Session, sessionmaker

from headrace.errors import HeadraceError, SpecError, Unavailable
from headrace.service.records import postgres
from headrace.service.records.schema import (
    LEASE,
    AuditRow,
    LeaseRow,
    OperationRow,
    RepeatRow,
    RowDamaged,
    json_of_row,
)

MIGRATIONS = Path(__file__).with_name("migrations")
BUSY_S = 5.0
"""How long a session waits for another one that writes to SQLite; then it raises Unavailable."""
KEEP_OPERATIONS = timedelta(days=7)
"""How long an operation is kept after its end."""
KEEP_REPEATS = timedelta(hours=24)
"""How long the answer for an Idempotency-Key is kept."""
KEEP_AUDIT = timedelta(days=400)
"""How long entries of the audit log are kept."""
DAMAGED = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)
"""SQLite's error codes for a damaged file."""
NO_TEXT = "Could not decode to UTF-8"
"""The message of Python's sqlite3 for a text that is not UTF-8."""
VERSIONS = "alembic_version"
"""The table with the version of the schema."""
FIRST = frozenset({"audit", "jobs", "operations", "repeats", "tokens"})
"""The tables of the first version of the schema."""
MAX_NAME = 64
"""Longest name of a job in the audit log; refused requests may name longer ones."""
WRITES = "headrace_writes"
"""Option of a connection: whether its transactions may write."""


class RecordsUnusable(HeadraceError):
    """The database is of a later version of Headrace, is damaged, or belongs to another program."""


class NotActive(Unavailable):
    """Another service with the same records is active, or may be."""


class Records:
    """The database. Any thread; each session belongs to one thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.shared = engine.dialect.name == postgres.DIALECT
        """Whether several services may have it."""
        self.fence: Callable[[], int] | None = None
        """The number of the lease with which this service writes; raises NotActive. None: it needs none."""
        self._write = sessionmaker(engine.execution_options(**{WRITES: True}), expire_on_commit=False)
        self._read = sessionmaker(engine.execution_options(**{WRITES: False}), expire_on_commit=False)

    @contextmanager
    def session(self) -> Iterator[Session]:
        """A session that may write: committed at the end, rolled back on an error. Other writers wait for it.

        Raises Unavailable where the database is busy, unreachable or damaged, NotActive where another service is
        active.
        """
        fence = None if self.fence is None else self.fence()
        with self.unfenced() as session:
            if fence is not None and fence != session.scalar(select(LeaseRow.number)):
                raise NotActive("this service is no longer active: another one has taken its place")
            yield session

    @contextmanager
    def unfenced(self) -> Iterator[Session]:
        """A session that may write whoever is active: to tokens and to the lease. Raises Unavailable."""
        with self._translated(), self._write.begin() as session:
            if self.shared:  # SQLite's writers wait for each other; here they do at this row
                session.execute(select(LeaseRow.id).where(LeaseRow.id == LEASE).with_for_update())
            yield session

    def check_active(self) -> None:
        """Before an act outside of the database: raise NotActive where another service is active, and Unavailable."""
        if self.fence is not None:
            with self.session():
                pass

    def held(self) -> bool:
        """Whether a service holds the lease now; False where there is no lease yet. Raises Unavailable."""
        with self._translated(), self._engine.connect() as connection:
            if not inspect(connection).has_table(LeaseRow.__tablename__):
                return False
            return bool(connection.scalar(select(LeaseRow.expires_at > func.clock_timestamp())))

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """A session that only reads, and does not wait for a writer. Raises Unavailable as `session` does."""
        with self._translated(), self._read.begin() as session:
            yield session

    def migrate(self) -> None:
        """Migrate the tables to the schema of this version of Headrace.

        Waits for a migration by another process. Raises RecordsUnusable, Unavailable.
        """
        config = Config()
        config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
        with self._translated(RecordsUnusable), self._engine.execution_options(**{WRITES: True}).begin() as connection:
            config.attributes["connection"] = connection
            if self.shared:
                self._begin_migration(connection)
            try:
                command.upgrade(config, "head")
            except CommandError as error:
                raise RecordsUnusable(
                    f"the records at {self._engine.url.render_as_string()} are not of this version of Headrace "
                    f"({error}); start the version that made them, or a later one"
                ) from error

    def _begin_migration(self, connection: Connection) -> None:
        """Wait for other migrations. Raises RecordsUnusable for a database of another program."""
        postgres.wait_for_migration(connection)
        if tables := postgres.foreign_tables(connection, VERSIONS):
            raise RecordsUnusable(
                f"{self._engine.url.database} is a database of another program (its tables: {', '.join(tables)}); name "
                "another one in `database`"
            )

    def audit(
        self,
        who: str,
        what: str,
        job: str | None = None,
        detail: Mapping[str, Any] | None = None,
        *,
        role: str | None = None,
        path: str = "",
        status: int | None = None,
    ) -> None:
        """Write to the audit log that `who` did `what`: an HTTP method, or a word for an action without a request."""
        row = AuditRow(
            at=utc_now(),
            who=who,
            role=role,
            method=what,
            path=path,
            job=None if job is None else job[:MAX_NAME],
            status=status,
            detail=dict(detail or {}),
        )
        with self.session() as session:
            session.add(row)

    def prune(self, now: datetime) -> None:
        """Delete rows that are older than their retention."""
        with self.session() as session:
            session.execute(delete(OperationRow).where(OperationRow.ended_at < now - KEEP_OPERATIONS))
            session.execute(delete(RepeatRow).where(RepeatRow.at < now - KEEP_REPEATS))
            session.execute(delete(AuditRow).where(AuditRow.at < now - KEEP_AUDIT))

    @contextmanager
    def _translated(self, damaged: type[HeadraceError] = Unavailable) -> Iterator[None]:
        """Translate SQLAlchemy's errors; `damaged` is the error for a file that is no database, or a damaged one."""
        try:
            yield
        except RowDamaged as error:
            raise RecordsUnusable(self._damaged(error)) from error
        except OperationalError as error:
            if NO_TEXT in str(error):
                raise RecordsUnusable(self._damaged(error.orig)) from error
            raise Unavailable(f"the service's records cannot be used now: {_first_line(error)}") from error
        except (*postgres.UNUSABLE, sql_errors.TimeoutError) as error:
            raise Unavailable(f"the service's records cannot be used now: {_first_line(error)}") from error
        except DatabaseError as error:
            if getattr(error.orig, "sqlite_errorcode", 0) & 0xFF not in DAMAGED:  # the other bits give details
                raise
            raise damaged(self._damaged(error.orig)) from error

    def _damaged(self, how: object) -> str:
        return (
            f"{self._engine.url.database} is damaged, or no database of the service ({how}); restore a backup, or "
            "move it away with its -wal and -shm: the service then has no jobs and no tokens; the folders and stores "
            "of the jobs stay"
        )

    def close(self) -> None:
        """Close the database."""
        self._engine.dispose()

    def __enter__(self) -> "Records":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def opened(url: str) -> Records:
    """The database at `url`, created if absent, migrated. Raises SpecError, RecordsUnusable, Unavailable.

    A shared database that a service uses now stays as it is: whoever becomes active migrates it.
    """
    records = Records(_engine_of(url))
    try:
        if not (records.shared and records.held()):
            records.migrate()
    except BaseException:
        records.close()
        raise
    return records


def _engine_of(url: str) -> Engine:
    """The engine; errors never show the URL, which may hold a password. Raises SpecError, RecordsUnusable."""
    try:
        parsed = make_url(url)
        kind = parsed.get_backend_name()
        if kind == postgres.DIALECT:
            return postgres.engine_of(parsed)
        if kind == "sqlite":
            return _sqlite_engine(parsed)
    except ArgumentError:
        raise SpecError("no URL of a database; as in sqlite:////var/lib/headrace/records.db", "database") from None
    except (NoSuchModuleError, ImportError) as error:
        raise SpecError(
            f"{_first_line(error)}; PostgreSQL is postgresql+psycopg://USER@HOST/NAME", "database"
        ) from None
    raise SpecError(f"{kind} is not known; known are sqlite and postgresql", "database")


def _sqlite_engine(url: URL) -> Engine:
    engine = create_engine(url, json_deserializer=json_of_row)
    _check_ours(url.database)
    _keep_private(url.database)
    event.listen(engine, "connect", _set_up)
    event.listen(engine, "begin", _begin)
    return engine


def _check_ours(database: str | None) -> None:
    """Raise RecordsUnusable for an SQLite file of another program, before anything in it is changed."""
    if not database or not Path(database).is_file():
        return
    try:
        with closing(sqlite3.connect(f"file:{quote(str(Path(database).absolute()))}?mode=ro", uri=True)) as file:
            tables = {name for (name,) in file.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except sqlite3.Error:
        return  # the migration reports the error
    tables -= {name for name in tables if name.startswith("sqlite_")}
    if tables and not (VERSIONS in tables and FIRST <= tables):
        raise RecordsUnusable(
            f"{database} is a database of another program (its tables: {', '.join(sorted(tables)[:5])}); name another "
            "file in `database`, or restore that of the service"
        )


def _keep_private(database: str | None) -> None:
    """Make SQLite's file, which holds secrets of specs, readable by its owner only; its -wal and -shm inherit this."""
    if not database or ":" in database:  # in memory, or a URI
        return
    with suppress(OSError):  # opening it reports the error
        os.close(os.open(database, os.O_RDWR | os.O_CREAT, 0o600))
        os.chmod(database, 0o600)


def _set_up(connection: sqlite3.Connection, _record: object) -> None:
    """Set up a connection to SQLite. We begin transactions; readers and one writer do not block each other."""
    connection.isolation_level = None
    for pragma in ("journal_mode=WAL", "foreign_keys=ON", f"busy_timeout={int(BUSY_S * 1000)}", "synchronous=FULL"):
        connection.execute(f"PRAGMA {pragma}").close()


def _begin(connection: Connection) -> None:
    """Begin a transaction. A writer takes the lock at once: if it read first, it could not wait for the lock later."""
    writes = connection.get_execution_options().get(WRITES, True)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def utc_now() -> datetime:
    """Now, UTC."""
    return datetime.now(UTC)
