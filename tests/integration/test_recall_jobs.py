"""A two-tower job measures what its index finds, before it learns: after a kill, on two trainers, in gates."""

import json

import pytest

from headrace.failpoints import Failpoint
from tests.integration.stream_job import headrace
from tests.integration.test_model_zoo_jobs import TOWERS, write_stream
from tests.integration.trainer_here import closes, killed, run

FIGURES = ("index_recall@5", "index_hit_rate@5", "popular_recall@5", "popular_hit_rate@5", "index_recall@20")
SETTINGS = (
    "passes.max_events=500",
    "exports={}",
    "model.settings.popularity=100",
    'retrieval={items={slot="article",files=["items.jsonl"]},at=[5,20],measure=100}',
)


@pytest.fixture
def job(tmp_path):
    (tmp_path / "items.jsonl").write_text("".join(json.dumps({"article": each}) + "\n" for each in range(60)))
    return write_stream(tmp_path, TOWERS, 4000)


def measured(metrics):
    return {span: {name: metrics[span]["ctr"].get(name) for name in FIGURES} for span in ("window", "life")}


@pytest.mark.long
def test_what_is_found_comes_back_after_a_kill_and_is_in_log_and_report(job, tmp_path):
    calm, store = tmp_path / "calm", tmp_path / "killed"
    wanted = run(job, calm, *SETTINGS)
    store.mkdir()
    killed(job, store, *SETTINGS, "commit.every_passes=3", generation=1, point=Failpoint.CLOSED, hit=5)
    ended = run(job, store, *SETTINGS, "commit.every_passes=3", generation=2)
    assert ended.digest == wanted.digest and closes(store) == closes(calm)
    assert measured(ended.metrics) == measured(wanted.metrics)
    life, logged = ended.metrics["life"]["ctr"], closes(store)
    assert 0 < life["index_recall@5"] < life["index_recall@20"] < 1
    assert 0 < life["popular_recall@5"] < 0.4 and life["index_recall"] == life["index_recall@5"]
    assert 350 <= life["looked_for"] <= 800 and "not_in_index" in life, "at most 100 of a pass, and none in the first"
    assert logged[max(logged)]["window"]["ctr"]["index_recall"] == ended.metrics["window"]["ctr"]["index_recall"]


@pytest.mark.long
def test_two_trainers_look_for_their_own_clicks_and_a_gate_holds_what_does_not_beat_popularity(job):
    more = ("cluster.trainers=2", "retrieval.measure=1000")
    two = headrace(job, *SETTINGS[:1], *SETTINGS[2:], *more, "exports={serving={gates={min_recall=0.9}}}")
    assert two.code == 0, two.output
    life = two.report["metrics"]["life"]["ctr"]
    assert life["looked_for"] == round(life["mean_label"] * life["count"]), "each rank has its own, and all are counted"
    (manifest,) = (job.parent / "store").glob("exports/**/manifest.json")
    gate = json.loads(manifest.read_text())["gates"]["min_recall"]
    assert not gate["passed"] and "index_recall of the window" in gate["why"]
