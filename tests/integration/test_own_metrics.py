"""A job with measures of groups and a metric of one's own: a job that is drained and goes on reports the same."""

import pytest

from tests.integration.stream_job import write_job
from tests.integration.trainer_here import closes, run

MEASURES = """
class ShareAboveHalf:
    name, size = "share_above_half", 2

    def add(self, prediction_B, label_B, weight_B, state_W):
        counted_B = weight_B > 0
        state_W += (prediction_B[counted_B] > 0.5).sum(), counted_B.sum()

    def value(self, state_W):
        return float(state_W[0] / state_W[1]) if state_W[1] else None
"""
SETTINGS = ('metrics={gauc_by="group", at_k=[1, 2], group_calibration=true, own=["job_measures:ShareAboveHalf"]}',)
NAMES = {"acc@1", "acc@2", "recall@1", "recall@2", "group_calibration_error", "share_above_half"}


@pytest.mark.long
def test_measures_of_ones_own_are_in_reports_digests_and_commits(tmp_path):
    (tmp_path / "job_measures.py").write_text(MEASURES)
    job = write_job(tmp_path, num_parts=1, num_lines=240)
    small = (*SETTINGS, "passes.max_events=60")
    calm = run(job, tmp_path / "calm", *small)
    run(job, tmp_path / "drained", *small, drain_after=60)
    again = run(job, tmp_path / "drained", *small, generation=2)
    assert again.metrics["life"] == calm.metrics["life"]
    assert {n: each["digests"] for n, each in closes(tmp_path / "drained").items()} == {
        n: each["digests"] for n, each in closes(tmp_path / "calm").items()
    }
    found = calm.metrics["life"]["ctr"]
    assert NAMES <= found.keys()
    assert all(0 < found[name] <= 1 for name in NAMES - {"share_above_half"})
