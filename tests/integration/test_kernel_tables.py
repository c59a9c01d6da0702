"""The table of kernels is a fact of the job: restarts, replays and reruns follow the one in its log or commit."""

import shutil

import pytest

from headrace.failpoints import Failpoint
from headrace.trainer.checkpoint.commits import Commits
from headrace.trainer.journal.job_history import JobHistory
from headrace.trainer.journal.log import read
from headrace.trainer.train import assembly, kernel_choice
from tests.integration.stream_job import headrace, write_job
from tests.integration.trainer_here import closes, killed, run
from tests.unit.test_linear import ONEDNN, needs_onednn

pytestmark = needs_onednn
ALL_ONEDNN, ALL_MKL = 'train.matmul="onednn"', 'train.matmul="mkl"'


@pytest.fixture
def job(tmp_path):
    return write_job(tmp_path)


def tables(store):
    """The logged tables: the first pass of each, and the kernels in it."""
    found = JobHistory.of(read(store / "log")).matmuls()
    return [(first, {k for each in table.kernels.values() for k in each.values()}) for first, table in found]


@pytest.mark.long
def test_a_killed_job_follows_its_table_to_the_same_digest(job, tmp_path):
    calm, store = tmp_path / "calm", tmp_path / "killed"
    wanted = run(job, calm, ALL_ONEDNN)
    store.mkdir()
    killed(job, store, ALL_ONEDNN, generation=1, point=Failpoint.CLOSED, hit=2)
    ended = run(job, store, ALL_ONEDNN, generation=2)
    assert ended.digest == wanted.digest and closes(store) == closes(calm)
    assert tables(store) == tables(calm) == [(1, {"onednn"})]
    assert all(commit.state["matmul"]["setting"] == "onednn" for commit in Commits(store).whole())
    assert run(job, tmp_path / "other", ALL_MKL).digest != wanted.digest, "the kernels do not matter here"


def test_each_pass_is_replayed_under_the_table_of_its_time(job, tmp_path, monkeypatch):
    """After version 2 the environment differs, and another table is measured; then both commits are lost."""
    store, original = tmp_path / "store", assembly.fingerprint
    monkeypatch.setattr(kernel_choice, "measured_table", lambda sizes, _: dict.fromkeys(sizes, ONEDNN))
    run(job, store, drain_after=400)
    assert [commit.version for commit in Commits(store).whole()] == [2]
    monkeypatch.setattr(kernel_choice, "measured_table", lambda *_: {})
    monkeypatch.setattr(assembly, "fingerprint", lambda device: {**original(device), "cpu": "another"})
    ended = run(job, store, generation=2)
    assert tables(store) == [(1, {"onednn"}), (3, set())] and max(closes(store)) == 3
    assert [commit.state["matmul"]["kernels"] == {} for commit in Commits(store).whole()] == [False, True]
    shutil.rmtree(store / "commits")
    again = run(job, store, generation=3)  # a pass that differs from its logged close would stop it
    assert again.digest == ended.digest and len(tables(store)) == 2


@pytest.mark.long
def test_a_rerun_follows_the_table_in_the_log(job):
    ended = headrace(job, ALL_ONEDNN)
    assert ended.code == 0, ended.output
    rerun = headrace(job, command="rerun", options=["--from", "0"])
    assert rerun.code == 0 and "3 of 3 passes are identical" in rerun.output, rerun.output
    shown = headrace(job, command="log")
    assert "matmul: onednn: 2x1 onednn/onednn/onednn, 2x8 onednn/onednn/onednn" in shown.output, shown.output
