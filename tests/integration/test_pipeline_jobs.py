"""The dense strategy "pipeline" in whole jobs: stages on any number of trainers, and other strategies after it."""

import shutil

import pytest

from tests.integration.epoch_job import write_epoch_job
from tests.integration.stream_job import headrace, write_job

DEEP = (
    *("train.threads=1", "model.settings.hidden=[12,10,8,8]", "passes.max_events=80", "tables.default.dim=4"),
    *("train.calibrate=false", "tables.default.in_batch=false"),  # pipelines have neither
)
PIPELINE = "dense={strategy='pipeline', pipeline={micro_batches=3}, clip_norm=0.5}"
PLAIN = "dense={clip_norm=0.5}"


def run(job, store, *settings, trainers=1, parts=1):
    """To the end of the first parts of the stream."""
    paths = ",".join(f'"part-{part}.txt"' for part in range(parts))
    cluster = f"cluster={{trainers={trainers},shards=1}}"
    ended = headrace(job, *DEEP, *settings, cluster, f"sources.lines.paths=[{paths}]", store=store)
    assert ended.code == 0, ended.output
    return ended.report


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ((), 1e-5),
        (("dense.accumulate=3", "train.batch_size=8"), 1e-5),
        (("train.amp=bfloat16", "dense.recompute={}", "dense.accumulate=2", "train.batch_size=16"), 2e-3),
    ],
    ids=["plain", "accumulate", "amp"],
)
def test_stages_have_the_bits_of_one_trainer_and_a_commit_is_for_any_strategy(tmp_path, settings, most):
    job = write_job(tmp_path, num_lines=200)
    pipeline, plain_settings = (PIPELINE, *settings), (PLAIN, *settings)
    run(job, "divided", *pipeline, trainers=2)
    run(job, "whole", *pipeline)
    shutil.copytree(tmp_path / "whole", tmp_path / "plain")
    divided, whole = run(job, "divided", *pipeline, trainers=3, parts=2), run(job, "whole", *pipeline, parts=2)
    assert divided["digest"] == whole["digest"] and divided["metrics"] == whole["metrics"]
    plain = run(job, "plain", *plain_settings, parts=2)
    assert plain["digest"] != whole["digest"]
    for figure, apart in (("auc", max(1e-3, most)), ("logloss", most)):
        found, wanted = (each["metrics"]["life"]["ctr"][figure] for each in (whole, plain))
        assert found == pytest.approx(wanted, abs=apart)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_pipelines_side_by_side_learn_what_as_many_trainers_learn(tmp_path):
    """Parts of a pass are uneven, and the last pass is short. No bit depends on the number of stages. Each pass is
    predicted first, by the whole model of the first trainer of each pipeline."""
    job = write_job(tmp_path, num_lines=200)
    settings = (
        "dense.accumulate=2",
        "train.batch_size=8",
        "dense.optimizer={kind='sgd',lr=0.1}",
        "metrics.infer_first=true",
    )
    reports = {}
    for name, trainers, strategy in (
        ("plain", 2, PLAIN),
        ("whole", 2, PIPELINE.replace("micro_batches=3", "micro_batches=3,stages=1")),
        ("divided", 4, PIPELINE.replace("micro_batches=3", "micro_batches=3,stages=2")),
        ("three", 6, PIPELINE.replace("micro_batches=3", "micro_batches=3,stages=2")),
    ):
        reports[name] = run(job, name, strategy, *settings, trainers=trainers)
    assert reports["divided"]["digest"] == reports["whole"]["digest"] != reports["three"]["digest"]
    assert reports["divided"]["metrics"] == reports["whole"]["metrics"]
    assert reports["divided"]["metrics"]["life"]["ctr"]["count"] == reports["three"]["metrics"]["life"]["ctr"]["count"]
    losses = [reports[name]["metrics"]["life"]["ctr"]["logloss"] for name in ("plain", "divided")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_in_a_shuffled_pass_the_first_trainer_of_a_pipeline_has_the_share_of_its_group(tmp_path):
    job, reports = write_epoch_job(tmp_path), []
    for trainers, stages in ((2, 1), (4, 2)):
        pipeline = f"dense={{strategy='pipeline', pipeline={{stages={stages}}}}}"
        cluster = f"cluster={{trainers={trainers},shards=1}}"
        ended = headrace(job, pipeline, cluster, "passes.shuffle=true", "train.threads=1", store=f"of-{trainers}")
        assert ended.code == 0, ended.output
        reports.append(ended.report)
    whole, divided = reports
    assert divided["digest"] == whole["digest"] and divided["metrics"] == whole["metrics"]
    assert divided["samples"] == whole["samples"] > 0
