"""Sums of dense gradients over trainers, in whole jobs: beside the backward pass, and compressed."""

import pytest

from tests.integration.stream_job import headrace, write_job

TWO = ("train.threads=1", "cluster={trainers=2,shards=1}", "dense.bucket_bytes=256B")


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return write_job(tmp_path_factory.mktemp("sums"))


def run(job, store, *settings):
    ended = headrace(job, *TWO, *settings, store=store)
    assert ended.code == 0, ended.output
    return ended.report


@pytest.mark.long
def test_sums_beside_the_backward_pass_have_the_same_bits(job):
    after, beside = run(job, "after"), run(job, "beside", "dense.overlap=true")
    assert beside["digest"] == after["digest"] and beside["metrics"] == after["metrics"]


@pytest.mark.long
@pytest.mark.parametrize("compression", [pytest.param("fp16", marks=pytest.mark.slow), "bf16"])
def test_compressed_gradients_learn_as_well_with_the_same_bits_at_every_run(job, compression):
    plain = run(job, f"plain-{compression}")["metrics"]["life"]["ctr"]
    setting = f"dense.compression={compression}"
    one, two = run(job, f"one-{compression}", setting), run(job, f"two-{compression}", setting, "dense.overlap=true")
    assert one["digest"] == two["digest"] and one["metrics"] == two["metrics"]
    assert one["metrics"]["life"]["ctr"]["auc"] == pytest.approx(plain["auc"], abs=0.01)


@pytest.mark.long
def test_a_job_whose_weights_are_divided_measures_and_commits_what_one_with_whole_weights_does(job):
    """Passes are also predicted before they are learnt, and batches measured apart, as the model has dropout."""
    settings = ("train.matmul=mkl", "metrics.infer_first=true", "model.settings.dropout=0.1")
    stages = {
        stage: run(job, f"stage-{stage}", f"dense={{strategy='sharded',stage={stage}{more}}}", *settings)
        for stage, more in {1: "", 2: ",bucket_bytes=256", 3: ",bucket_bytes=256"}.items()
    }
    assert stages[2]["digest"] == stages[3]["digest"]
    assert stages[1]["metrics"] == stages[2]["metrics"] == stages[3]["metrics"]
