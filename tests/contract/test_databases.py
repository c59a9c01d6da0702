"""The contract of the records: what they promise in SQLite and in PostgreSQL alike."""

import threading
from datetime import UTC, datetime, timedelta, timezone

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import TypeDecorator, create_engine, inspect, select, text

from headrace.service.jobs.registry import JobRegistry
from headrace.service.records.database import KEEP_AUDIT, KEEP_OPERATIONS, KEEP_REPEATS, RecordsUnusable, opened
from headrace.service.records.schema import AuditRow, Base, JobRow, OperationRow, RepeatRow

NOW = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)


@pytest.fixture
def records(url):
    with opened(url) as records:
        yield records


def operation(number, ended_at):
    return OperationRow(
        id=f"op-{number}", kind="export", who="ann", state="done", said="", created_at=NOW, ended_at=ended_at
    )


def repeat(key, at):
    return RepeatRow(key=key, who="ann", method="POST", path="/", body_hash="", headers={}, at=at)


def same_type(_context, _inspected, _metadata, found, declared):
    """Ours are plain types with words around them."""
    return False if isinstance(declared, TypeDecorator) and isinstance(declared.impl, type(found)) else None


def test_the_migrations_make_the_tables_that_the_code_declares(url):
    opened(url).close()
    engine = create_engine(url)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": same_type})
        assert compare_metadata(context, Base.metadata) == []
    engine.dispose()


def test_records_opened_again_are_what_they_were(url):
    with opened(url) as records:
        records.audit("ann", "POST", "clicks", {"a": 1}, role="admin", path="/v1/jobs", status=201)
    with opened(url) as records, records.reading() as session:
        row = session.scalars(select(AuditRow)).one()
    assert (row.who, row.role, row.method, row.job, row.status, row.detail) == (
        *("ann", "admin", "POST", "clicks", 201),
        {"a": 1},
    )
    assert row.at.tzinfo is UTC


def test_records_of_a_later_version_are_refused_and_left_alone(url):
    with opened(url) as records, records.session() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(RecordsUnusable, match="not of this version"):
        opened(url)
    engine = create_engine(url)
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT version_num FROM alembic_version")) == "9999"
    engine.dispose()


def test_a_session_that_raises_leaves_nothing(records):
    with pytest.raises(ZeroDivisionError), records.session() as session:
        session.add(repeat("k", NOW))
        raise ZeroDivisionError
    with records.reading() as session:
        assert session.scalars(select(RepeatRow)).all() == []


def test_sessions_that_read_and_then_write_wait_for_each_other(records):
    """Begun as readers, the second would fail at once: SQLite cannot let a reader of an old state write."""
    with records.session() as session:
        session.add(OperationRow(id="n", kind="", who="", state="", said="0", created_at=NOW))

    def count():
        for _ in range(10):
            with records.session() as session:
                row = session.get_one(OperationRow, "n")
                row.said = str(int(row.said) + 1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with records.reading() as session:
        assert session.get_one(OperationRow, "n").said == "40"


def test_one_that_reads_is_not_held_up_by_one_that_writes(records):
    with records.session() as writer:
        writer.add(repeat("k", NOW))
        writer.flush()
        with records.reading() as reader:
            assert reader.scalars(select(RepeatRow)).all() == []


def test_a_time_is_kept_in_utc_whatever_zone_it_came_in(records):
    elsewhere = NOW.astimezone(timezone(timedelta(hours=9)))
    with records.session() as session:
        session.add(repeat("k", elsewhere))
    with records.reading() as session:
        at = session.scalars(select(RepeatRow.at)).one()
    assert (at, at.utcoffset()) == (NOW, timedelta(0))


def test_what_is_older_than_it_is_kept_for_is_forgotten(records):
    second = timedelta(seconds=1)
    with records.session() as session:
        session.add_all([operation(0, NOW - KEEP_OPERATIONS - second), operation(1, NOW), operation(2, None)])
        session.add_all([repeat("old", NOW - KEEP_REPEATS - second), repeat("new", NOW - KEEP_REPEATS + second)])
        for at in (NOW - KEEP_AUDIT - second, NOW):
            session.add(AuditRow(at=at, who="ann", method="POST", path="/", detail={}))
    records.prune(NOW)
    with records.reading() as session:
        assert session.scalars(select(OperationRow.id).order_by(OperationRow.id)).all() == ["op-1", "op-2"]
        assert session.scalars(select(RepeatRow.key)).all() == ["new"]
        assert session.scalars(select(AuditRow.at)).all() == [NOW]


def test_a_job_that_is_stored_is_read_as_it_was(records):
    words = {"folder": "/f", "base": "/b", "desired": "running", "created_by": "ann"}
    times = {"asked_at": NOW, "created_at": NOW, "changed_at": NOW}
    spec = {"name": "clicks", "text": "\0 \u20ac", "numbers": [1, 2.5, None]}
    with records.session() as session:
        deaths = [{"at_s": 1.5, "reason": "it died"}]
        session.add(JobRow(name="clicks", spec=spec, ask=1, deaths=deaths, revision=1, **words, **times))
    (entry,) = JobRegistry(records).all()
    assert (entry.spec, entry.created_at, entry.deaths[0].at_s) == (spec, NOW, 1.5)


def test_an_entry_of_the_audit_log_may_have_any_text(records):
    records.audit("ann", "POST", "x" * 500, {"a": "\0"}, path="/v1/\0")
    with records.reading() as session:
        row = session.scalars(select(AuditRow)).one()
    assert (row.job, row.path, row.detail) == ("x" * 64, "/v1/\ufffd", {"a": "\0"})
    with records.reading() as session:
        assert session.get(OperationRow, "no\0ne") is None


def test_a_migration_that_fails_leaves_nothing_half_made(url):
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE alembic_version (version_num VARCHAR(32))"))
        connection.execute(text("CREATE TABLE tokens (key INTEGER)"))  # in the way of the last table
    with pytest.raises(Exception, match="tokens"):
        opened(url)
    assert set(inspect(engine).get_table_names()) == {"alembic_version", "tokens"}
    engine.dispose()


@pytest.mark.parametrize("table", ["jobs", "audit"])
def test_a_database_of_another_program_with_tables_of_these_names_is_refused(url, table):
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text(f"CREATE TABLE {table} (key INTEGER)"))
    with pytest.raises(RecordsUnusable, match=f"is a database of another program .*{table}.*name another"):
        opened(url)
    assert inspect(engine).get_table_names() == [table]
    engine.dispose()
