"""The database: its tables equal those of the migrations, writers wait for each other, old rows are deleted."""

import os
import sqlite3
import threading
from contextlib import closing
from datetime import UTC, datetime, timedelta, timezone

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, inspect, select, text

from millrace.errors import SpecError, Unavailable
from service.jobs.registry import JobRegistry
from service.records import database
from service.records.database import KEEP_AUDIT, KEEP_OPERATIONS, KEEP_REPEATS, Records, RecordsUnusable, opened
from service.records.schema import AuditRow, Base, Instant, JobRow, OperationRow, RepeatRow

NOW = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/records.db"


@pytest.fixture
def records(url):
    with opened(url) as records:
        yield records


def test_the_records_are_their_owners_alone_wherever_they_lie(tmp_path):
    old_mask = os.umask(0)
    try:
        (tmp_path / "open.db").touch(0o666)
        for name in ("records", "open"):
            with opened(f"sqlite:///{tmp_path}/{name}.db") as records:
                records.audit("ann", "look")
                modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.glob(f"{name}.db*")}
            assert len(modes) == 3 and set(modes.values()) == {0o600}, modes
    finally:
        os.umask(old_mask)


def operation(number, ended_at):
    return OperationRow(
        id=f"op-{number}", kind="export", who="ann", state="done", said="", created_at=NOW, ended_at=ended_at
    )


def repeat(key, at):
    return RepeatRow(key=key, who="ann", method="POST", path="/", body_hash="", headers={}, at=at)


def same_type(_context, _inspected, _metadata, found, declared):
    """Instant is a timestamp with words around it."""
    return False if isinstance(declared, Instant) else None


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


def garbled(path):
    path.write_bytes(b"nonsense" * 1000)


def cut_off(path):
    with opened(f"sqlite:///{path}"):
        pass
    path.write_bytes(path.read_bytes()[:9000])


@pytest.mark.parametrize("damage", [garbled, cut_off])
def test_a_file_that_is_no_database_is_named_and_left_alone(url, tmp_path, damage):
    path = tmp_path / "records.db"
    damage(path)
    before = path.read_bytes()
    with pytest.raises(
        RecordsUnusable, match=f"{path} is damaged, or no database .*; restore a backup, or move it away"
    ):
        opened(url)
    assert path.read_bytes() == before


def test_records_that_are_damaged_while_the_service_runs_are_unavailable(url, tmp_path):
    garbled(tmp_path / "records.db")
    with Records(create_engine(url)) as records:
        for session in (records.session, records.reading):
            with pytest.raises(Unavailable, match=f"{tmp_path}/records.db is damaged"), session() as asked:
                asked.scalars(select(AuditRow)).all()


def test_a_migration_that_fails_leaves_nothing_half_made(url, monkeypatch):
    monkeypatch.setattr(database, "_check_ours", lambda path: None)  # which would refuse it before
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE repeats (key INTEGER)"))  # in the way of the fourth table
    with pytest.raises(Exception, match="repeats"):
        opened(url)
    assert inspect(engine).get_table_names() == ["repeats"]
    engine.dispose()


@pytest.mark.parametrize("tables", [("wine", "alembic_version"), ("jobs",), ("wine",)])
def test_a_database_of_another_program_is_refused_by_name_and_left_alone(url, tmp_path, tables):
    path = tmp_path / "records.db"
    with closing(sqlite3.connect(path)) as foreign:
        for table in tables:
            foreign.execute(f"CREATE TABLE {table} (version_num VARCHAR(32))")
        foreign.commit()
    before = path.read_bytes()
    with pytest.raises(RecordsUnusable, match=f"{path} is a database of another program .*{tables[0]}.*name another"):
        opened(url)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["records.db"]


def test_an_empty_file_becomes_the_records(url, tmp_path):
    (tmp_path / "records.db").touch()
    opened(url).close()


FLIPPED = {
    "spec": '\'{"name": "cli\'',
    "deaths": "'[{\"reason\": 1}]'",
    "desired": "'runnjng'",
    "created_at": "'2026-x3-04 05:06:07'",
    "folder": "CAST(X'ff2f6a' AS TEXT)",
}


@pytest.mark.parametrize("column", FLIPPED)
def test_a_record_that_was_changed_from_outside_is_refused_by_name(url, tmp_path, column):
    path = tmp_path / "records.db"
    with opened(url) as records, records.session() as session:
        words = {"folder": "/f", "base": "/b", "desired": "running", "created_by": "ann"}
        times = {"asked_at": NOW, "created_at": NOW, "changed_at": NOW}
        session.add(JobRow(name="clicks", spec={"name": "clicks"}, ask=1, deaths=[], revision=1, **words, **times))
        session.flush()
        session.execute(text(f"UPDATE jobs SET {column} = {FLIPPED[column]}"))
    with opened(url) as records, pytest.raises(RecordsUnusable) as refused:
        JobRegistry(records)
    assert str(refused.value).startswith(f"{path} is damaged")
    assert "restore a backup" in str(refused.value)
    assert refused.value.exit_code == 1


@pytest.mark.parametrize("url", ["nonsense", "oracle+none://x", "postgresql+nodriver://x/y"])
def test_a_url_that_names_no_database_is_a_mistake_of_the_configuration(url):
    with pytest.raises(SpecError, match="database"):
        opened(url)


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
