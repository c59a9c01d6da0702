"""Concurrent changes of one job: of several clients that read the same state, only one changes it."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from starlette.exceptions import HTTPException

from headrace.service.api.etags import JobLocks
from headrace.service.jobs.errors import UnknownJob, WrongPhase
from headrace.service.jobs.host import Action
from tests.fakes.asked_api import api


@pytest.fixture
def served(tmp_path, url):
    with api(tmp_path, database=url) as served:
        served.job()
        yield served


def slowed(method):
    def after_a_while(*arguments):
        time.sleep(0.02)  # all who do not wait for their turn have checked by now
        return method(*arguments)

    return after_a_while


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [("PATCH", "", {"keys": {"tables.default.optimizer.lr": 0.1}}), ("POST", "/stop", None)],
)
def test_of_many_with_the_same_etag_one_acts(served, method, path, body):
    served.host.count_change = slowed(served.host.count_change)
    served.host.act = slowed(served.host.act)
    tag = served.get("/v1/jobs/news").headers["etag"]

    def asked(_):
        return served.ask(method, f"/v1/jobs/news{path}", json=body, headers={"if-match": tag}).status_code

    with ThreadPoolExecutor(6) as pool:
        codes = sorted(pool.map(asked, range(6)))
    assert codes[0] in (200, 202) and codes[1:] == [412] * 5


def test_a_change_is_alone_with_its_job_and_no_other_job_waits_for_it(served):
    served.job("views")
    turns = JobLocks(turn_s=0.0)
    with turns.changing(served.host, "news", '"1"', needed=True):
        with (
            pytest.raises(WrongPhase, match="another request"),
            turns.changing(served.host, "news", None, needed=False),
        ):
            pass
        with turns.changing(served.host, "views", "*", needed=True):
            served.host.act("views", Action.STOP, "anne")
    with pytest.raises(HTTPException) as caught, turns.changing(served.host, "views", '"1"', needed=True):
        pass
    assert caught.value.status_code == 412
    with pytest.raises(UnknownJob), turns.changing(served.host, "none", None, needed=False):
        pass


def test_nothing_is_kept_of_jobs_that_nobody_changes(served):
    turns = JobLocks()
    with turns.changing(served.host, "news", None, needed=False):
        assert len(turns._locks) == 1
    assert len(turns._locks) == 0
