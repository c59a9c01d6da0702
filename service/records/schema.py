"""The tables of the service's database, one class each.

service.records.migrations creates and changes them; a test compares both.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial, wraps
from typing import Any, TypeVar

from sqlalchemy import JSON, DateTime, Float, Index, Integer, String, Text, TypeDecorator, inspect
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from headrace import documents
from headrace.errors import HeadraceError


class RowDamaged(HeadraceError):
    """A row holds a value that the service never wrote."""


def _or_damaged(process: Callable[[Any], Any], value: Any) -> Any:
    try:
        return process(value)
    except (TypeError, ValueError) as error:
        raise RowDamaged(f"{value!r} is not a time") from error


def json_of_row(text: str | bytes) -> Any:
    """The value of a JSON column. Raises RowDamaged."""
    text = text.decode() if isinstance(text, bytes) else text  # PostgreSQL's driver has bytes
    try:
        return documents.parse(text, f"{text[:40]!r}")
    except documents.InvalidDocument as error:
        raise RowDamaged(str(error)) from error


Row = TypeVar("Row", bound="Base")
Read = TypeVar("Read")


def of_row(read: Callable[[Row], Read]) -> Callable[[Row], Read]:
    """`read`, which converts a row; its errors become RowDamaged, which names the row."""

    @wraps(read)
    def reading(row: Row) -> Read:
        try:
            return read(row)
        except (LookupError, TypeError, ValueError) as error:
            keys = ", ".join(map(str, inspect(row).identity or ()))
            raise RowDamaged(f"the row {keys!r} of {row.__tablename__} cannot be read: {error}") from error

    return reading


class Instant(TypeDecorator[datetime]):
    """A point in time in UTC, also in a database without time zones."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """To the database; ValueError for a time without a zone."""
        if value is not None and value.tzinfo is None:
            raise ValueError(f"{value} has no zone")
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """From the database, in UTC; SQLite has no zones, PostgreSQL answers in that of the session."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], datetime | None] | None:
        """Raises RowDamaged for a value that is not a time."""
        process = super().result_processor(dialect, coltype)
        return process and partial(_or_damaged, process)


class StoredText(TypeDecorator[str]):
    """Text that every database stores: PostgreSQL refuses NUL, which a path of a request may hold."""

    impl: Any = String
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """To the database: NUL becomes U+FFFD."""
        return None if value is None else value.replace("\0", "\ufffd")


class StoredLongText(StoredText):
    """Such text of any length."""

    impl = Text


class Base(DeclarativeBase):
    """Base of all tables."""

    type_annotation_map = {  # noqa: RUF012  # SQLAlchemy's way
        datetime: Instant(),
        dict[str, Any]: JSON(),
        list[dict[str, Any]]: JSON(),
        str: StoredText(),
    }


class JobRow(Base):
    """A job of the service and its desired state. Its launcher and its store have its actual state."""

    __tablename__ = "jobs"

    name: Mapped[str] = mapped_column(StoredText(64), primary_key=True)
    spec: Mapped[dict[str, Any]]
    """As the user wrote it, overrides applied."""
    folder: Mapped[str]
    """The job's own folder."""
    base: Mapped[str]
    """The folder where relative paths of the spec start."""
    desired: Mapped[str] = mapped_column(StoredText(16))
    """One of service.jobs.host.Desired."""
    ask: Mapped[int] = mapped_column(Integer)
    """Number of requests to start or restart the job. An outcome is valid for one value only."""
    asked_at: Mapped[datetime]
    """Time of the last change of `desired` or `ask`."""
    deaths: Mapped[list[dict[str, Any]]]
    """Deaths of launchers since the last such request, followed by a restart: `at_s` since the epoch, `reason`."""
    revision: Mapped[int] = mapped_column(Integer)
    """Number of changes by users."""
    created_at: Mapped[datetime]
    changed_at: Mapped[datetime]
    created_by: Mapped[str]
    build: Mapped[str] = mapped_column(StoredText(64), default="", server_default="")
    """The build that it runs in, a name of the service's configuration; empty: the service's own environment."""


class OperationRow(Base):
    """A long action that a caller requested; see service.jobs.operation_queue."""

    __tablename__ = "operations"
    __table_args__ = (Index("operations_by_job", "job", "id"),)

    id: Mapped[str] = mapped_column(StoredText(40), primary_key=True)
    """In the order of their creation."""
    kind: Mapped[str] = mapped_column(StoredText(32))
    job: Mapped[str | None] = mapped_column(StoredText(64))
    who: Mapped[str]
    state: Mapped[str] = mapped_column(StoredText(16))
    progress: Mapped[float | None] = mapped_column(Float)
    said: Mapped[str] = mapped_column(StoredLongText)
    result: Mapped[Any] = mapped_column(JSON(none_as_null=True), nullable=True)
    problem: Mapped[Any] = mapped_column(JSON(none_as_null=True), nullable=True)
    created_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]


class AuditRow(Base):
    """A request of a caller, and its status."""

    __tablename__ = "audit"
    __table_args__ = (Index("audit_by_job", "job", "id"), Index("audit_by_time", "at"))

    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    at: Mapped[datetime]
    who: Mapped[str]
    role: Mapped[str | None] = mapped_column(StoredText(16))
    method: Mapped[str] = mapped_column(StoredText(16))
    """The HTTP method, or the name of an action without a request."""
    path: Mapped[str] = mapped_column(StoredLongText)
    job: Mapped[str | None] = mapped_column(StoredText(64))
    status: Mapped[int | None] = mapped_column(Integer)
    detail: Mapped[dict[str, Any]]


class TokenRow(Base):
    """A bearer token, by the hash of its secret."""

    __tablename__ = "tokens"

    id: Mapped[str] = mapped_column(StoredText(40), primary_key=True)
    name: Mapped[str] = mapped_column(StoredText(64))
    role: Mapped[str] = mapped_column(StoredText(16))
    hash: Mapped[str] = mapped_column(StoredText(128))
    salt: Mapped[str] = mapped_column(StoredText(64))
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]


class RepeatRow(Base):
    """The answer to a request with an Idempotency-Key. Without a status the request is not answered yet."""

    __tablename__ = "repeats"
    __table_args__ = (Index("repeats_by_time", "at"),)

    key: Mapped[str] = mapped_column(StoredText(255), primary_key=True)
    who: Mapped[str] = mapped_column(StoredText(255), primary_key=True)
    method: Mapped[str] = mapped_column(StoredText(16))
    path: Mapped[str] = mapped_column(StoredLongText)
    body_hash: Mapped[str] = mapped_column(StoredText(128))
    status: Mapped[int | None] = mapped_column(Integer)
    headers: Mapped[dict[str, Any]]
    body: Mapped[str | None] = mapped_column(StoredLongText)
    at: Mapped[datetime]


class LeaseRow(Base):
    """The active one of several services that share the records: one row, see service.records.lease."""

    __tablename__ = "lease"

    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    """Always LEASE."""
    number: Mapped[int] = mapped_column(Integer)
    """Number of times that a service became active: the fence."""
    holder: Mapped[str]
    """The machine and process of the service, in words; empty before the first."""
    url: Mapped[str]
    """The address of its API; empty until it is known."""
    root: Mapped[str]
    """The folder of its jobs."""
    expires_at: Mapped[datetime]
    """From this time on, of the database's clock, another service may become active."""


LEASE = 1
"""The id of the only row of "lease"."""
