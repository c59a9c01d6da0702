"""The records in PostgreSQL: the engine, and what bounds each wait of a connection.

A service that freezes in the middle of a transaction must not block the one that takes over: the server ends such a
transaction after IDLE_S. service.records.lease decides which service is active.
"""

from typing import Any, Final

from sqlalchemy import URL, Connection, Engine, create_engine, event, inspect, text
from sqlalchemy.exc import InterfaceError, InternalError

from headrace.errors import SpecError
from headrace.extras import require
from headrace.service.records.schema import Base, json_of_row

DIALECT: Final = "postgresql"
CONNECT_S = 5
"""How long connecting may take."""
LOCK_S = 5
"""How long a session waits for another one that writes; then it raises Unavailable."""
IDLE_S = 5
"""How long a transaction may stand still before the server ends it, as its service is frozen."""
STATEMENT_S = 30
"""How long one statement may take."""
DEAD_PEER_MS = 10_000
"""How long sent data may wait for an acknowledgement; then the connection is closed."""
MAX_CONNECTIONS = 20
"""Connections of one service. At this bound a session waits LOCK_S for one, and raises Unavailable."""
MIGRATING = 0x4D696C6C
"""The number of the advisory lock that a migration holds."""
UNUSABLE = (InterfaceError, InternalError)
"""Errors for a connection that was closed or a server that only reads: the same session may succeed later."""


def engine_of(url: URL) -> Engine:
    """The engine for `url`.

    Raises SpecError where it holds the password in a place that errors could show, or its driver is not installed.
    """
    if url.get_driver_name() == "psycopg":
        require("psycopg", "PostgreSQL", "database")
    if "password" in url.query:
        raise SpecError(
            'write the password before the "@", or better in the file that "?passfile=" names; as in '
            "postgresql+psycopg://headrace@db.example/headrace?passfile=/etc/headrace/pgpass",
            "database",
        )
    timeouts: dict[str, Any] = {"connect_timeout": CONNECT_S, "tcp_user_timeout": DEAD_PEER_MS}
    engine = create_engine(
        url,
        json_deserializer=json_of_row,
        isolation_level="READ COMMITTED",  # a session that waited for another one sees what that one wrote
        pool_pre_ping=True,
        pool_size=MAX_CONNECTIONS // 2,
        max_overflow=MAX_CONNECTIONS - MAX_CONNECTIONS // 2,
        pool_timeout=LOCK_S,
        connect_args={**timeouts, "application_name": "headrace"},
    )
    event.listen(engine, "connect", _set_up)
    return engine


def _set_up(connection: Any, _record: object) -> None:
    bounds = {"lock": LOCK_S, "idle_in_transaction_session": IDLE_S, "statement": STATEMENT_S}
    with connection.cursor() as cursor:
        for name, seconds in bounds.items():
            cursor.execute(f"SET {name}_timeout = '{seconds}s'")
    connection.commit()


def wait_for_migration(connection: Connection) -> None:
    """Wait until no other process migrates the tables; from now to the transaction's end none does."""
    connection.execute(text("SELECT pg_advisory_xact_lock(:number)"), {"number": MIGRATING})


def foreign_tables(connection: Connection, versions: str) -> list[str]:
    """Tables of another program that have names of ours: some, where there are no `versions` of a migration of ours."""
    there = set(inspect(connection).get_table_names())
    return [] if versions in there else sorted(there & set(Base.metadata.tables))
