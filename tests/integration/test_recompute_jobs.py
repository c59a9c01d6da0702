"""`dense.recompute` changes no bit of a job: dropout, BatchNorm, mixed precision, overlap, several trainers."""

import pytest

from tests.integration import trainer_here
from tests.integration.stream_job import SPEC, headrace, write_job
from tests.integration.test_batch_norm import MODEL
from tests.jobs import changed

ALL = "dense.recompute={blocks='all', segments=2}"
DEEP = changed(SPEC, {"model.settings": {"hidden": [16, 8, 8], "dropout": 0.3}, "passes.max_events": 150})
WAYS = {
    "accumulate": ("train.batch_size=16", "train.matmul=onednn", "dense.accumulate=3", "dense.optimizer={kind='lamb'}"),
    "bfloat16": ("train.amp=bfloat16", "train.amp_black=['relu']"),
    "a layer waits for its parameters": ("dense={strategy='shards', slice_floats=1000}", "model.name=deep_crossing"),
    "measured while it learns": ("metrics.progressive=training", "metrics.infer_first=true"),
}


@pytest.mark.parametrize("way", WAYS)
def test_one_trainer_learns_the_same_bits(tmp_path, way):
    job, settings = write_job(tmp_path, num_parts=1, num_lines=330, spec=DEEP), ("train.threads=1", *WAYS[way])
    kept, again = (
        trainer_here.run(job, tmp_path / name, *settings, *more) for name, more in (("kept", ()), ("again", (ALL,)))
    )
    assert kept == again and kept.events == 330


@pytest.mark.long
def test_two_trainers_learn_the_same_bits_with_batch_norm_and_overlap(tmp_path):
    """The last pass has one sample, which BatchNorm does not count."""
    spec = changed(SPEC, {"model": {"class": "normal:Normal"}})
    job = write_job(tmp_path, num_parts=1, num_lines=301, spec=spec)
    (tmp_path / "normal.py").write_text(MODEL.replace("nn.ReLU()", "nn.ReLU(), nn.Dropout(0.4)"))
    given = (
        "train.threads=1",
        "train.batch_size=16",
        "passes.max_events=100",
        "dense.overlap=true",
        "dense.bucket_bytes=64",
    )
    reports = []
    for name, more in (("kept", ()), ("again", ("dense.recompute={blocks=['net']}",))):
        ended = headrace(job, *given, "cluster={trainers=2, shards=1}", *more, store=name)
        assert ended.code == 0, ended.output
        reports.append(ended.report)
    kept, again = reports
    assert kept["digest"] == again["digest"] and kept["metrics"] == again["metrics"]
