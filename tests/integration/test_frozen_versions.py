"""`headrace freshness` and `headrace doctor` on a job that has run: old commits against the job, and its slots."""

import json

import pytest

from headrace.codec import plain
from headrace.service.history.slot_report import SlotOrder, format_report, report_of
from headrace.service.spec.job import load_job
from tests.fakes.asked_api import api
from tests.integration.stream_job import LIVING, headrace, write_living_job
from tests.jobs import changed

SPEC = changed(LIVING, {"exports": None, "passes.max_events": 60, "guards.min_samples": 20})


@pytest.mark.long
@pytest.mark.timeout(300)
def test_an_old_version_is_measured_on_what_came_after_it_and_slots_are_told(tmp_path):
    job = write_living_job(tmp_path, num_parts=1, num_lines=480, spec=SPEC)
    done = headrace(job, "commit.every_passes=1", "commit.keep=100")
    assert done.code == 0, done.output

    told = headrace(job, command="freshness", options=("--versions", "1", "--horizon", "30d", "--json"))
    assert told.code == 0, told.output
    found = json.loads(told.output[told.output.index("{\n") : told.output.rindex("}") + 1])
    assert found["versions"] == [1]
    auc = [each for each in found["ages"] if each["metric"] == "auc"]
    assert sum(each["parts"] for each in auc) == 7 and sum(each["samples"] for each in auc) == 420
    assert any(each["difference"] for each in auc), "the job has learnt, and the frozen version has not"
    assert not list((tmp_path / "store" / "reruns").glob("read*")), "nothing is left of the frozen run"

    again = headrace(job, command="freshness", options=("--last", "--json"))
    assert json.loads(again.output[again.output.index("{\n") :]) == found and found["passes"] == 8

    report = report_of(load_job(job), SlotOrder.SHIFT, {"a": 0.1})
    slots = {each.slot: each for each in report.slots}
    assert slots.keys() == {"a", "b", "history"} and slots["b"].coverage == 1.0 and slots["b"].drift > 0
    assert slots["history"].coverage < 1 and slots["a"].rows > 0 and slots["a"].weight > 0 and slots["a"].worth == 0.1
    assert sum(slot.num_bytes for slot in slots.values()) > 0
    assert "of trouble at commit" in list(format_report(report))[4]
    (tmp_path / "api").mkdir()
    with api(tmp_path / "api") as served:
        spec = {**load_job(job).raw, "store": {"path": str(tmp_path / "store")}}
        served.job(load_job(job).spec.name, spec=spec)
        told = served.get(f"/v1/jobs/{load_job(job).spec.name}/doctor").json()
        ages = served.get(f"/v1/jobs/{load_job(job).spec.name}/freshness").json()
    assert [slot | {"worth": None} for slot in json.loads(json.dumps(plain(report.slots)))] == told["slots"]
    assert told["commit"] == report.commit and ages["ages"] == found["ages"] and ages["versions"] == [1]
