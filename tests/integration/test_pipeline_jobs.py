"""The dense strategy "pipeline" in whole jobs: stages on any number of trainers, and other strategies after it."""

import shutil

import pytest

from tests.integration.stream_job import headrace, write_job

DEEP = ("train.threads=1", "model.settings.hidden=[12,10,8,8]", "passes.max_events=80", "tables.default.dim=4")
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
@pytest.mark.timeout(300)
def test_stages_have_the_bits_of_one_trainer_and_a_commit_is_for_any_strategy(tmp_path):
    job = write_job(tmp_path, num_lines=200)
    run(job, "divided", PIPELINE, trainers=2)
    run(job, "whole", PIPELINE)
    shutil.copytree(tmp_path / "whole", tmp_path / "plain")
    divided, whole = run(job, "divided", PIPELINE, trainers=3, parts=2), run(job, "whole", PIPELINE, parts=2)
    assert divided["digest"] == whole["digest"] and divided["metrics"] == whole["metrics"]
    plain = run(job, "plain", PLAIN, parts=2)
    assert plain["digest"] != whole["digest"]
    for figure, apart in (("auc", 1e-3), ("logloss", 1e-5)):
        found, wanted = (each["metrics"]["life"]["ctr"][figure] for each in (whole, plain))
        assert found == pytest.approx(wanted, abs=apart)
