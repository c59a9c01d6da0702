"""The tables of the service's records, one class each.

How they are made and changed is service.records.migrations' work; a test holds both to each other.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial, wraps
from typing import Any, TypeVar

from sqlalchemy import JSON, DateTime, Float, Index, Integer, String, Text, TypeDecorator, inspect
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from millrace import documents
from millrace.errors import MillraceError


class RowDamaged(MillraceError):
    """A row of the records holds what the service never wrote."""


def _or_damaged(process: Callable[[Any], Any], value: Any) -> Any:
    try:
        return process(value)
    except (TypeError, ValueError) as error:
        raise RowDamaged(f"{value!r} is no time") from error


def json_of_row(text: str) -> Any:
    """What a column of JSON holds. Raises RowDamaged."""
    try:
        return documents.parse(text, f"{text[:40]!r}")
    except documents.NotReadable as error:
        raise RowDamaged(str(error)) from error


Row = TypeVar("Row", bound="Base")
Read = TypeVar("Read")


def of_row(read: Callable[[Row], Read]) -> Callable[[Row], Read]:
    """`read`, which takes a row apart; RowDamaged names the row where that holds what nobody wrote."""

    @wraps(read)
    def reading(row: Row) -> Read:
        try:
            return read(row)
        except (LookupError, TypeError, ValueError) as error:
            keys = ", ".join(map(str, inspect(row).identity or ()))
            raise RowDamaged(f"the row {keys!r} of {row.__tablename__} does not read: {error}") from error

    return reading


class Instant(TypeDecorator[datetime]):
    """A point in time, UTC; also where the database knows no zones."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """To the database; ValueError for a time without a zone."""
        if value is not None and value.tzinfo is None:
            raise ValueError(f"{value} has no zone")
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """From the database."""
        if value is None or value.tzinfo is not None:
            return value
        return value.replace(tzinfo=UTC)

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], datetime | None] | None:
        """As TypeDecorator's; RowDamaged for what is no time."""
        process = super().result_processor(dialect, coltype)
        return process and partial(_or_damaged, process)


class Base(DeclarativeBase):
    """All tables; its names are the database's."""

    type_annotation_map = {  # noqa: RUF012  # SQLAlchemy's way
        datetime: Instant(),
        dict[str, Any]: JSON(),
        list[dict[str, Any]]: JSON(),
        str: String(),
    }


class JobRow(Base):
    """A job that the service hosts, and what is wanted of it; how it is, its launcher and its store say."""

    __tablename__ = "jobs"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    spec: Mapped[dict[str, Any]]
    """As the user wrote it, overrides applied."""
    folder: Mapped[str]
    """The job's own folder."""
    base: Mapped[str]
    """The folder where relative paths of the spec start."""
    desired: Mapped[str] = mapped_column(String(16))
    """One of service.hosting.host.Desired."""
    ask: Mapped[int] = mapped_column(Integer)
    """How often the job was asked to begin, or to begin anew: an outcome counts for the ask it was given only."""
    asked_at: Mapped[datetime]
    """When `desired` or `ask` changed last."""
    deaths: Mapped[list[dict[str, Any]]]
    """Deaths of its launcher since the last ask that were followed by a new one: `at_s` since the epoch, `reason`."""
    revision: Mapped[int] = mapped_column(Integer)
    """Counts the changes by people."""
    created_at: Mapped[datetime]
    changed_at: Mapped[datetime]
    created_by: Mapped[str]


class OperationRow(Base):
    """Long work that somebody asked for; see service.hosting.work."""

    __tablename__ = "operations"
    __table_args__ = (Index("operations_by_job", "job", "id"),)

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    """In the order of their creation."""
    kind: Mapped[str] = mapped_column(String(32))
    job: Mapped[str | None] = mapped_column(String(64))
    who: Mapped[str]
    state: Mapped[str] = mapped_column(String(16))
    progress: Mapped[float | None] = mapped_column(Float)
    said: Mapped[str] = mapped_column(Text)
    result: Mapped[Any] = mapped_column(JSON(none_as_null=True), nullable=True)
    problem: Mapped[Any] = mapped_column(JSON(none_as_null=True), nullable=True)
    created_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]


class AuditRow(Base):
    """Who asked for what, and what came of it."""

    __tablename__ = "audit"
    __table_args__ = (Index("audit_by_job", "job", "id"), Index("audit_by_time", "at"))

    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    at: Mapped[datetime]
    who: Mapped[str]
    role: Mapped[str | None] = mapped_column(String(16))
    method: Mapped[str] = mapped_column(String(16))
    """HTTP's, or the name of an act that came by no request."""
    path: Mapped[str] = mapped_column(Text)
    job: Mapped[str | None] = mapped_column(String(64))
    status: Mapped[int | None] = mapped_column(Integer)
    detail: Mapped[dict[str, Any]]


class TokenRow(Base):
    """A bearer token; itself it is kept nowhere."""

    __tablename__ = "tokens"

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    name: Mapped[str] = mapped_column(String(64))
    role: Mapped[str] = mapped_column(String(16))
    hash: Mapped[str] = mapped_column(String(128))
    salt: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]


class RepeatRow(Base):
    """The answer to a request with an Idempotency-Key, for those that repeat it; no status: it is not answered yet."""

    __tablename__ = "repeats"
    __table_args__ = (Index("repeats_by_time", "at"),)

    key: Mapped[str] = mapped_column(String(255), primary_key=True)
    who: Mapped[str] = mapped_column(String(255), primary_key=True)
    method: Mapped[str] = mapped_column(String(16))
    path: Mapped[str] = mapped_column(Text)
    body_hash: Mapped[str] = mapped_column(String(128))
    status: Mapped[int | None] = mapped_column(Integer)
    headers: Mapped[dict[str, Any]]
    body: Mapped[str | None] = mapped_column(Text)
    at: Mapped[datetime]
