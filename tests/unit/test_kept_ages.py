"""The last result of `headrace freshness`, kept with the job: report, API, page."""

import asyncio
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.documents import InvalidDocument
from headrace.service.api.schemas import finite
from headrace.service.cluster.store import FRESHNESS, MADE_BY_A_RUN
from headrace.service.history import version_ages
from headrace.service.history.version_ages import (
    AgeCost,
    brief_lines,
    format_measured,
    keep_ages,
    of_message,
    read_ages,
)
from headrace.service.server.foreground_run import _age_lines
from headrace.service.ui.api_client import RequestRefused
from headrace.service.ui.job_guards import (
    AGE_COLUMNS,
    SCORE_COLUMNS,
    SLOT_COLUMNS,
    GuardsPart,
    age_rows,
    diagnosis_rows,
    measured_text,
    score_rows,
    scored_text,
)
from tests.fakes.asked_api import api
from tests.fakes.shown_page import labels_of

figures = st.floats(allow_nan=False, allow_infinity=False)
costs = st.builds(
    AgeCost, st.text(max_size=9), st.sampled_from(["auc", "gauc", "logloss"]), figures, st.none() | figures,
    st.integers(1, 99), st.integers(1, 64), st.integers(1, 10**9), figures, figures, figures, st.none() | figures,
    st.none() | figures,
)  # fmt: skip
COST = AgeCost("ctr", "auc", 600.0, 1800.0, 6, 2, 900, 0.75, 0.73, -0.02, 0.004, 0.03)
OLDER = AgeCost("ctr", "auc", 691200.0, None, 1, 1, 90, 0.75, 0.7, -0.05, None, None)


@given(st.lists(costs, max_size=5), st.lists(st.integers(1, 10**6), max_size=64))
def test_what_is_kept_is_read_back(tmp_path_factory, found, versions):
    store = tmp_path_factory.mktemp("store")
    kept = keep_ages(store, 7, versions, found)
    assert read_ages(store) == kept and kept.ages == tuple(found) and kept.versions == tuple(versions)
    assert of_message(json.loads(json.dumps(kept.message()))) == kept


def test_it_is_bounded_and_the_bound_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(version_ages, "MAX_COSTS", 2)
    kept = keep_ages(tmp_path, 7, [1], [COST] * 5)
    assert len(kept.ages) == 2 and list(format_measured(kept))[-1] == "and 3 more lines, which are not kept"


def test_the_largest_result_is_shorter_than_what_is_read(tmp_path):
    long = AgeCost("t" * 64, "logloss", *[-math.pi * 1e-9] * 2, *[10**9] * 3, *[-math.pi * 1e-9] * 5)
    keep_ages(tmp_path, 10**9, range(10**9, 10**9 + 64), [long] * version_ages.MAX_COSTS)
    assert (tmp_path / FRESHNESS).stat().st_size < version_ages.MAX_BYTES


def test_a_store_without_one_a_newer_one_and_a_damaged_one(tmp_path):
    assert read_ages(tmp_path) is None and list(_age_lines(tmp_path)) == []
    (tmp_path / FRESHNESS).write_text(json.dumps({"format": version_ages.FORMAT + 1, "ages": "of another kind"}))
    assert read_ages(tmp_path) is None
    (tmp_path / FRESHNESS).write_text(json.dumps({"format": 1, "ages": 3}))
    with pytest.raises(InvalidDocument, match="no result of `headrace freshness`"):
        read_ages(tmp_path)
    assert "not known" in next(_age_lines(tmp_path)), "the report of a run is printed all the same"
    assert FRESHNESS in MADE_BY_A_RUN, "a fresh run has none"


def test_the_report_of_a_run_has_a_line_for_each_task(tmp_path):
    assert [*brief_lines(keep_ages(tmp_path, 40, [], []))] == []
    first, when = brief_lines(keep_ages(tmp_path, 40, [1, 5], [COST, OLDER]))
    assert first == "age price AUC ctr: 10 min - 30 min -0.0200, 8 d + -0.0500"
    assert "measured 20" in when and when.endswith("UTC at pass 40") and [*_age_lines(tmp_path)] == [first, when]


def test_the_api_and_the_page_have_it_with_the_time(tmp_path):
    with api(tmp_path) as served:
        store = served.job("news").store
        empty, none = served.get("/v1/jobs/news/freshness").json(), served.get("/v1/jobs/news/doctor").json()
        store.mkdir(parents=True)
        kept = keep_ages(store, 40, [1, 5], [COST, OLDER])
        told = served.get("/v1/jobs/news/freshness").json()
        assert (
            served.get("/v1/jobs/gone/freshness").status_code == served.get("/v1/jobs/gone/doctor").status_code == 404
        )
    assert (empty["measured_at"], empty["ages"]) == (None, []) and of_message(empty) is None
    assert none == {"commit": None, "guarded": False, "slots": []}
    assert of_message(told) == kept and "Not measured" in measured_text(empty)
    assert "when the job had closed pass 40. Versions 1, 5 never" in measured_text(told)
    rows = age_rows(finite(told["ages"]))
    assert [[cell.text for cell in cells][2:] for _, cells in rows] == [
        ["10 min - 30 min", "6", "0.7500", "0.7300", "-0.0200", "0.0300"],
        ["8 d +", "1", "0.7500", "0.7000", "-0.0500", "–"],
    ]
    assert len(rows[0][1]) == len(AGE_COLUMNS)


class Asker:
    """Asks the API as the page does."""

    def __init__(self, served):
        self.served = served

    async def get(self, path, **_query):
        found = await asyncio.to_thread(self.served.get, f"/v1{path}")
        if found.status_code != 200:
            raise RequestRefused(found.status_code, found.json()["detail"])
        return found.json()


def test_the_tab_shows_both_and_why_slots_cannot_be_told(tmp_path):
    async def shown():
        await GuardsPart(Asker(served), "news").refresh({})

    with api(tmp_path) as served:
        served.job("news")
        assert "There is no commit yet; slots are read from one." in labels_of(shown)
        store = served.past("news").store
        (store / "run.json").write_text(json.dumps({"job": "other"}))
        keep_ages(store, 40, [1, 5], [COST])
        served.api.state.statuses.kept.drop(("doctor", "news"))
        told = labels_of(shown)
    assert "-0.0200" in told and any("holds a run of job 'other'" in each for each in told)


def test_the_tab_shows_the_newest_score():
    found = {
        "version": 1200, "at": "2026-11-29T13:30:06+00:00", "samples": 5000, "scored": 3, "error": "",
        "tasks": {"ctr": {"auc": 0.7, "logloss": 0.4}},
    }  # fmt: skip
    [(task, cells)] = score_rows(found)
    assert (task, [cell.text for cell in cells]) == ("ctr", ["ctr", "0.7000", "–", "0.4000", "–"])
    assert len(cells) == len(SCORE_COLUMNS)
    assert scored_text(found) == "Version 1,200, at 2026-11-29 13:30:06 UTC, on 5,000 samples; versions scored: 3."
    assert scored_text({**found, "error": "why"}).endswith("it cannot be scored: why")
    assert "no section" in scored_text(None) and "yet" in scored_text({"version": None}) and score_rows(None) == []


def test_a_slot_on_the_page_has_its_signs():
    keys = ("drift", "coverage", "new_rows", "rows", "num_bytes", "weight")
    [(_, cells)] = diagnosis_rows([{"slot": "user", "signs": ["one", "two"], **dict.fromkeys(keys)}])
    assert len(cells) == len(SLOT_COLUMNS) and (cells[1].text, cells[1].tone) == ("one; two", "warn")
