"""Refusals in the audit log: the first and every tenfold, within a bounded rate."""

import pytest

from headrace.logs import BURST, MAX_KINDS, QUIET_S, LoggedOccurrence, LogLimiter
from headrace.service.auth.roles import Role
from tests.fakes.asked_api import api


def test_of_many_alike_the_first_is_told_and_every_tenfold():
    refusals = LogLimiter()
    told = [refusals.note("anne", 100.0 + number / 1000) for number in range(1500)]
    assert [each.times for each in told if each is not None] == [1, 10, 100, 1000]


def test_after_a_quiet_while_it_is_a_first_again():
    refusals = LogLimiter()
    assert refusals.note("anne", 0.0) == LoggedOccurrence(1, 0) and refusals.note("anne", QUIET_S) is None
    assert refusals.note("anne", 2 * QUIET_S + 1) == LoggedOccurrence(1, 0)


def test_however_many_kinds_there_are_few_lines_are_written_and_the_next_says_how_many_were_not():
    refusals = LogLimiter()
    told = [refusals.note(number, 0.0) for number in range(10_000)]
    assert sum(each is not None for each in told) == BURST
    assert refusals.note("another", 61.0) == LoggedOccurrence(1, 10_000 - int(BURST))
    assert len(refusals._kinds) == MAX_KINDS


@pytest.fixture
def served(tmp_path, url):
    with api(tmp_path, database=url) as served:
        served.job()
        yield served


def audit(served):
    return served.get("/v1/audit").json()["items"]


def test_who_may_not_is_in_the_audit_log_with_what_they_were_told(served):
    assert served.get("/v1/jobs", token=None).status_code == 401
    assert served.get("/v1/jobs", token="mlr_guessed").status_code == 401
    assert served.post("/v1/jobs/news/stop", token=served.tokens[Role.VIEWER]).status_code == 403
    assert served.ask("DELETE", "/v1/jobs/news", headers={"origin": "https://elsewhere.example"}).status_code == 403
    found = {(line["who"], line["method"], line["path"], line["status"]): line["detail"] for line in audit(served)}
    assert set(found) == {
        ("anonymous", "GET", "/v1/jobs", 401),
        ("viewer", "POST", "/v1/jobs/news/stop", 403),
        ("anonymous", "DELETE", "/v1/jobs/news", 403),
    }
    told = found["viewer", "POST", "/v1/jobs/news/stop", 403]
    assert told == {"address": "127.0.0.1", "refused": told["refused"], "times": 1} and "operator" in told["refused"]


def test_ten_thousand_in_vain_are_a_handful_of_lines_that_hold_no_token(served):
    for number in range(120):
        assert served.get("/v1/jobs/" + "x" * 5000, token=f"mlr_{number}").status_code in (401, 429)
    lines = audit(served)
    assert len(lines) < 8 and all(len(line["path"]) <= 200 for line in lines)
    assert "mlr_1" not in str(lines)
