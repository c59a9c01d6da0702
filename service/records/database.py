"""The database of the service's records: opened, migrated, and asked in sessions.

SQLite unless the URL says otherwise. What the rows mean is their readers' business.
"""

import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

from alembic import command
from alembic.config import Config
from alembic.util.exc import CommandError
from sqlalchemy import Connection, Engine, create_engine, delete, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DatabaseError, NoSuchModuleError, OperationalError
from sqlalchemy.orm import Session, sessionmaker

from millrace.errors import MillraceError, SpecError, Unavailable
from service.records.tables import AuditRow, Base, OperationRow, RepeatRow, RowDamaged, json_of_row

MIGRATIONS = Path(__file__).with_name("migrations")
BUSY_S = 5.0
"""How long a session waits for another one that writes to SQLite; then it fails as Unavailable."""
KEEP_OPERATIONS = timedelta(days=7)
"""How long an operation that has ended is remembered."""
KEEP_REPEATS = timedelta(hours=24)
"""How long a request may be repeated under its Idempotency-Key."""
KEEP_AUDIT = timedelta(days=400)
"""How long it is remembered who did what."""
DAMAGED = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)
"""What SQLite says of a file that it cannot make out."""
NO_TEXT = "Could not decode to UTF-8"
"""What Python's sqlite3 says of a text whose bytes are none."""
VERSIONS = "alembic_version"
"""The table that says which version of the records a database holds."""
WRITES = "millrace_writes"
"""Option of a connection: whether what it begins may write."""


class RecordsUnusable(MillraceError):
    """The database was made by a later version of Millrace, is damaged, or is none."""


class Records:
    """The service's memory. Any thread; sessions are their thread's own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._write = sessionmaker(engine.execution_options(**{WRITES: True}), expire_on_commit=False)
        self._read = sessionmaker(engine.execution_options(**{WRITES: False}), expire_on_commit=False)

    @contextmanager
    def session(self) -> Iterator[Session]:
        """A session that may write: committed at the end, undone where it raises; those of others wait for it.

        Raises Unavailable where the database is busy, away or damaged.
        """
        with self._translated(), self._write.begin() as session:
            yield session

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """A session that only reads, beside one that writes. Raises Unavailable, as above."""
        with self._translated(), self._read.begin() as session:
            yield session

    def migrate(self) -> None:
        """Bring the tables to what this version of Millrace knows; nothing, where they are.

        One that migrates at the same time is waited for. Raises RecordsUnusable, Unavailable.
        """
        config = Config()
        config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
        with self._translated(RecordsUnusable), self._engine.execution_options(**{WRITES: True}).begin() as connection:
            config.attributes["connection"] = connection
            try:
                command.upgrade(config, "head")
            except CommandError as error:
                raise RecordsUnusable(
                    f"the records at {self._engine.url.render_as_string()} are not of this version of Millrace "
                    f"({error}); start the version that made them, or a later one"
                ) from error

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
        """Write down that `who` did `what`: HTTP's method, or a word for what came by no request."""
        row = AuditRow(
            at=utc_now(),
            who=who,
            role=role,
            method=what,
            path=path,
            job=job,
            status=status,
            detail=dict(detail or {}),
        )
        with self.session() as session:
            session.add(row)

    def prune(self, now: datetime) -> None:
        """Forget what is older than it is kept for."""
        with self.session() as session:
            session.execute(delete(OperationRow).where(OperationRow.ended_at < now - KEEP_OPERATIONS))
            session.execute(delete(RepeatRow).where(RepeatRow.at < now - KEEP_REPEATS))
            session.execute(delete(AuditRow).where(AuditRow.at < now - KEEP_AUDIT))

    @contextmanager
    def _translated(self, damaged: type[MillraceError] = Unavailable) -> Iterator[None]:
        """SQLAlchemy's errors as ours; `damaged` is that of a file that is no database, or none any more."""
        try:
            yield
        except RowDamaged as error:
            raise RecordsUnusable(self._damaged(error)) from error
        except OperationalError as error:
            if NO_TEXT in str(error):
                raise RecordsUnusable(self._damaged(error.orig)) from error
            raise Unavailable(f"the service's records cannot be used now: {_first_line(error)}") from error
        except DatabaseError as error:
            if getattr(error.orig, "sqlite_errorcode", 0) & 0xFF not in DAMAGED:  # the rest says how
                raise
            raise damaged(self._damaged(error.orig)) from error

    def _damaged(self, how: object) -> str:
        return (
            f"{self._engine.url.database} is damaged, or no database of the service ({how}); put a copy of it back, or "
            "move it away with its -wal and -shm: the service then knows no jobs and no tokens; the jobs' folders and "
            "stores stay"
        )

    def close(self) -> None:
        """Let go of the database."""
        self._engine.dispose()

    def __enter__(self) -> "Records":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def opened(url: str) -> Records:
    """The records at `url`, made if absent, brought to this version. Raises SpecError, RecordsUnusable, Unavailable."""
    try:
        parsed = make_url(url)
        engine = create_engine(parsed, json_deserializer=json_of_row)
    except (ArgumentError, NoSuchModuleError, ImportError) as error:
        raise SpecError(f"{_first_line(error)}; as in sqlite:////var/lib/millrace/records.db", "database") from None
    if engine.dialect.name == "sqlite":
        _check_ours(parsed.database)
        _keep_private(parsed.database)
        event.listen(engine, "connect", _set_up)
        event.listen(engine, "begin", _begin)
    records = Records(engine)
    try:
        records.migrate()
    except BaseException:
        records.close()
        raise
    return records


def _check_ours(database: str | None) -> None:
    """Raise RecordsUnusable for a file of SQLite that another program made, before anything in it is changed."""
    if not database or not Path(database).is_file():
        return
    ours = set(Base.metadata.tables)
    try:
        with closing(sqlite3.connect(f"file:{quote(str(Path(database).absolute()))}?mode=ro", uri=True)) as file:
            tables = {name for (name,) in file.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except sqlite3.Error:
        return  # the migration says what is wrong with it
    tables -= {name for name in tables if name.startswith("sqlite_")}
    if tables and not (VERSIONS in tables and ours <= tables):
        raise RecordsUnusable(
            f"{database} is a database of another program (its tables: {', '.join(sorted(tables)[:5])}); name another "
            "file in `database`, or put the service's own back"
        )


def _keep_private(database: str | None) -> None:
    """Have SQLite's file, which holds specs with their secrets, be its owner's alone; those beside it take its mode."""
    if not database or ":" in database:  # in memory, or an address of SQLite's own
        return
    with suppress(OSError):  # opening it says what is wrong
        os.close(os.open(database, os.O_RDWR | os.O_CREAT, 0o600))
        os.chmod(database, 0o600)


def _set_up(connection: sqlite3.Connection, _record: object) -> None:
    """A new connection to SQLite: it begins where we say; readers and one writer do not wait for each other."""
    connection.isolation_level = None
    for pragma in ("journal_mode=WAL", "foreign_keys=ON", f"busy_timeout={int(BUSY_S * 1000)}", "synchronous=FULL"):
        connection.execute(f"PRAGMA {pragma}").close()


def _begin(connection: Connection) -> None:
    """Who may write takes the lock at once: one that began by reading could not wait for it later."""
    writes = connection.get_execution_options().get(WRITES, True)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def utc_now() -> datetime:
    """Now, UTC."""
    return datetime.now(UTC)
