"""The database: its tables equal those of the migrations, writers wait for each other, old rows are deleted."""

import os
import sqlite3
from contextlib import closing
from datetime import UTC, datetime

import pytest
from sqlalchemy import create_engine, inspect, select, text

from headrace.errors import SpecError, Unavailable
from headrace.service.jobs.registry import JobRegistry
from headrace.service.records import database
from headrace.service.records.database import Records, RecordsUnusable, opened
from headrace.service.records.schema import AuditRow, JobRow

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
