"""Pass-wise "infer, then train" beside the progressive metrics: it changes no bit of training, and is repeatable."""

import pytest

from headrace.failpoints import Failpoint
from tests.integration.stream_job import SPEC, headrace, write_job
from tests.integration.trainer_here import closes, killed, run
from tests.jobs import changed

INFER = "metrics.infer_first=true"
DROPPING = changed(SPEC, {"model.settings.dropout": 0.3, "passes.max_events": 100})
"""Training draws random numbers, and predicts otherwise than inference."""
ALL_KEPT = "commit.keep=1000"

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return write_job(tmp_path_factory.mktemp("infer-first"), num_parts=2, num_lines=210, spec=DROPPING)


@pytest.fixture(scope="module")
def ended(job):
    return run(job, job.parent / "twice", INFER, ALL_KEPT)


def without(mapping):
    return {name: value for name, value in mapping.items() if name != "infer_first"}


def test_it_alters_no_bit_of_training(job, ended):
    plain = run(job, job.parent / "plain", ALL_KEPT)
    assert ended.digest == plain.digest and without(ended.metrics) == plain.metrics
    ours, theirs = (closes(job.parent / name) for name in ("twice", "plain"))
    assert len(ours) == 5 and ours.keys() == theirs.keys()
    for number, close in ours.items():
        assert without(close["digests"]) == theirs[number]["digests"] != close["digests"]


@pytest.mark.long
def test_after_a_kill_its_result_is_the_same(job, ended):
    killed(job, job.parent / "killed", INFER, generation=1, point=Failpoint.CLOSED, hit=4)
    assert run(job, job.parent / "killed", INFER, generation=2) == ended


def test_a_pass_is_measured_by_the_model_at_its_beginning(job, ended):
    learnt = run(job, job.parent / "cut", INFER, drain_after=200)
    assert learnt.events == 300
    run(job, job.parent / "frozen", drain_after=100)
    frozen = run(job, job.parent / "frozen", "train.learn=false", generation=2, drain_after=200)
    assert learnt.metrics["infer_first"]["pass"] == frozen.metrics["pass"] != learnt.metrics["pass"]
    life = ended.metrics["infer_first"]["life"]["ctr"]
    assert life["count"] == ended.metrics["life"]["ctr"]["count"] == ended.events


def test_the_rest_of_a_pass_that_does_not_fit_in_memory_is_learnt_and_not_measured(job, ended):
    little = run(job, job.parent / "little", INFER, "metrics.infer_first_memory=1B")
    assert little.digest == ended.digest
    assert little.metrics["infer_first"]["pass"]["ctr"]["count"] == 13, "the last pass is of one batch"
    assert little.metrics["infer_first"]["life"]["ctr"]["count"] == 4 * 64 + 13


@pytest.mark.slow
def test_ranks_measure_the_same_where_the_model_is_the_same(job):
    one = headrace(job, INFER, "train.learn_until=100", store="one")
    two = headrace(job, INFER, "train.learn_until=100", "cluster.trainers=2", "cluster.shards=2", store="two")
    assert one.code == two.code == 0, one.output + two.output
    ours, theirs = (each.report["metrics"]["infer_first"]["life"]["ctr"] for each in (one, two))
    assert ours["count"] == theirs["count"]
    assert theirs["auc"] == pytest.approx(ours["auc"], abs=0.02)
