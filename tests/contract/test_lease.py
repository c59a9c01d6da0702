"""The lease of the records: one service at a time writes, and an old one that wakes up can write nothing."""

import threading
from contextlib import contextmanager

import pytest
from sqlalchemy import select, text

from headrace.deadline import Deadline
from headrace.errors import SpecError, Unavailable
from headrace.service.jobs.activation import EndedWaiting, Fence, active
from headrace.service.jobs.config import ServiceConfig
from headrace.service.jobs.registry import JobRegistry
from headrace.service.records import lease as leases
from headrace.service.records import postgres as bounds
from headrace.service.records.database import NotActive, opened, utc_now
from headrace.service.records.lease import LEASE_S, Lease
from headrace.service.records.schema import LEASE, AuditRow, JobRow, LeaseRow
from tests.postgres.cluster import PASSWORD

EXPIRED = text("UPDATE lease SET expires_at = to_timestamp(0)")


@pytest.fixture
def place(postgres):
    return postgres.database()


class Service:
    """One service's part."""

    def __init__(self, url, name="a", root="/jobs"):
        self.records, self.clock_s = opened(url), 0.0
        self.lease = Lease(self.records, name, root, lambda: self.clock_s)


@contextmanager
def services(url, *names):
    made = [Service(url, name) for name in names]
    try:
        yield made
    finally:
        for each in made:
            each.records.close()


def expire(records):
    with records.unfenced() as session:
        session.execute(EXPIRED)


def written(records):
    with records.reading() as session:
        return list(session.scalars(select(AuditRow.who).order_by(AuditRow.id)))


def test_one_service_is_active_and_the_other_takes_over_once_the_lease_has_expired(place):
    with services(place, "a", "b") as (a, b):
        assert a.lease.take() and not b.lease.take()
        a.lease.publish("http://a:1")
        assert str(b.lease.holder()) == "the service of a, http://a:1"
        expire(a.records)
        assert b.lease.holder() is None
        assert b.lease.take()
        assert (a.lease.fence(), b.lease.fence()) == (1, 2), "by its own clock the lease of a holds still"


def test_an_old_service_that_wakes_up_writes_nothing(place):
    with services(place, "a", "b") as (a, b):
        assert a.lease.take()
        a.records.audit("a", "first")
        expire(a.records)
        assert b.lease.take()
        for act in (lambda: a.records.audit("a", "late"), a.records.check_active, lambda: a.lease.publish("http://a")):
            with pytest.raises(NotActive, match="another one has taken its place"):
                act()
        b.records.audit("b", "second")
        a.lease.release()
        assert b.lease.holder() is not None, "a release by the old service does not end the lease of the new one"
        assert written(b.records) == ["a", "b"]


def test_a_lease_that_was_not_renewed_in_time_lets_nothing_be_done_until_it_is(place):
    with services(place, "a") as (a,):
        assert a.lease.take()
        a.clock_s += LEASE_S - 0.1
        a.records.check_active()
        a.clock_s += 0.1
        with pytest.raises(NotActive, match="could not renew its lease"):
            a.records.audit("a", "late")
        a.lease._renew()
        a.records.audit("a", "renewed")
        assert written(a.records) == ["a"] and not a.lease.lost.is_set()


def test_a_service_whose_place_was_taken_knows_by_whom(place):
    with services(place, "a", "b") as (a, b):
        assert a.lease.take()
        expire(a.records)
        assert b.lease.take()
        b.lease.publish("http://b:1")
        a.lease._renew()
        assert a.lease.lost.is_set()
        with pytest.raises(NotActive, match="the service of b, http://b:1 has taken its place"):
            a.lease.fence()


def test_of_many_that_try_at_once_one_becomes_active(place):
    with services(place, *"abcdefgh") as made:
        taken = []
        threads = [threading.Thread(target=lambda each=each: taken.append(each.lease.take())) for each in made]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(taken) == [False] * 7 + [True]
        with made[0].records.reading() as session:
            assert session.get_one(LeaseRow, LEASE).number == 1


def test_a_service_that_freezes_while_it_writes_does_not_hold_up_the_next_one(place, monkeypatch):
    monkeypatch.setattr(bounds, "IDLE_S", 1)
    with services(place, "a", "b") as (a, b):
        assert a.lease.take()
        begun = Deadline.after(bounds.LOCK_S)
        with pytest.raises(Unavailable, match="cannot be used now"), a.records.session() as session:
            session.add(AuditRow(at=utc_now(), who="a", method="POST", path="", detail={}))
            session.flush()
            with b.records.unfenced() as other:  # waits for the row until the server ends the frozen transaction
                other.execute(EXPIRED)
            assert not begun.passed()
            assert b.lease.take()
        assert written(b.records) == []


def test_records_of_another_folder_are_refused_while_they_are_used(place):
    with services(place, "a") as (a,):
        assert a.lease.take()
        other = Lease(a.records, "b", "/other")
        with pytest.raises(
            SpecError, match="root: the records in `database` belong to a service whose jobs are in /jobs"
        ):
            other.holder()


def test_jobs_of_another_folder_are_not_taken_over_when_their_lease_has_expired(place):
    with services(place, "a") as (a,):
        assert a.lease.take()
        other = Lease(a.records, "b", "/other")
        expire(a.records)
        assert other.take(), "without jobs there is nothing to go on with"
        expire(a.records)
        assert a.lease.take()
        with a.records.session() as session:
            texts = {"folder": "/jobs/news", "base": "/jobs/news", "desired": "stopped", "created_by": "tests"}
            times = dict.fromkeys(("asked_at", "created_at", "changed_at"), utc_now())
            session.add(JobRow(name="news", spec={}, ask=1, deaths=[], revision=1, **texts, **times))
        expire(a.records)
        with pytest.raises(SpecError, match="whose jobs are in /jobs; name that folder, or another database"):
            other.holder()
        assert not other.take(), "nor in the moment between the look and the take"
        assert a.lease.holder() is None and a.lease.take()


def config_of(folder, url):
    return ServiceConfig(root=folder, database=url)


def test_a_second_service_without_a_wait_is_refused_and_with_one_ends_when_it_is_told_to(place, tmp_path):
    with active(config_of(tmp_path, place)) as first:
        assert first.lease is not None and first.fence == Fence(tmp_path / "service.fence", 1)
        assert first.fence.passed() and not Fence(first.fence.file, 0).passed()
        with pytest.raises(SpecError, match="is active with these records"), active(config_of(tmp_path, place)):
            pass
        with pytest.raises(EndedWaiting), active(config_of(tmp_path, place), lambda lease: False):
            pass
    with active(config_of(tmp_path, place)) as second:
        assert second.lease is not None and second.lease.fence() == 2, "a service that ends frees its place at once"


def test_records_in_use_are_not_migrated_by_another_service(place, tmp_path, monkeypatch):
    with active(config_of(tmp_path, place)) as first:
        with first.records.session() as session:
            session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
        opened(place).close()
        with first.records.reading() as session:
            assert session.scalar(text("SELECT version_num FROM alembic_version")) == "9999"


def test_one_root_has_no_second_service_with_sqlite(place, tmp_path):
    with (
        active(config_of(tmp_path, place)),
        pytest.raises(SpecError, match="With SQLite there is one service"),
        active(config_of(tmp_path, None)),
    ):
        pass


def test_a_renewal_that_fails_is_tried_again(place, tmp_path, monkeypatch, postgres):
    monkeypatch.setattr(leases, "RENEW_S", 0.05)
    with active(config_of(tmp_path, place)) as mine:
        before_s = mine.lease._until_s
        with postgres.connection() as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'headrace'"
            )
        deadline = Deadline.after(20)
        while mine.lease._until_s <= before_s:
            assert not deadline.passed()
        JobRegistry(mine.records)
        mine.records.audit("a", "after")


@pytest.mark.parametrize("where", ["?password=", "password"])
def test_the_password_is_in_no_error(postgres, where):
    url = postgres.url("none", "wrong-" + PASSWORD)
    url = url if where == "password" else f"postgresql+psycopg://headrace@/none?password={PASSWORD}"
    with pytest.raises((SpecError, Unavailable)) as refused:
        opened(url)
    shown = f"{refused.value}{refused.value.__cause__}"
    assert PASSWORD not in shown
    assert PASSWORD not in repr(ServiceConfig(root="/", database=url))
