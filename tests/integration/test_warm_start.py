"""A warm start as a user makes one: a job trains, what it learnt is imported by another, which goes on from there."""

import json
import subprocess
import sys

import pytest

from headrace.service.history.model_state import CommitState
from headrace.trainer.checkpoint.commits import Commits
from tests.fakes.exports import write_export
from tests.integration.stream_job import headrace, write_job

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]  # the fixture runs whole jobs


def newest(store):
    commits = Commits(store)
    return commits.read(commits.names()[-1])


def state_of(commit, tmp_path):
    """(slot, sign) -> values of all rows, and the dense tensors."""
    state = CommitState(commit, tmp_path / "look")
    with state.rows("default") as chunks:
        rows = {
            (slot, sign): values
            for chunk in chunks
            for slot, sign, values in zip(chunk.names(), chunk.sign_R.tolist(), chunk.values, strict=True)
        }
    return rows, state.dense()


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """A job, how it came out cold, and an export of its end."""
    tmp_path = tmp_path_factory.mktemp("warm")
    job = write_job(tmp_path)
    cold = headrace(job, store="cold")
    assert cold.code == 0, cold.output
    rows, dense = state_of(newest(tmp_path / "cold"), tmp_path)
    return job, cold, write_export(tmp_path / "exports", "base", 3, rows, dense=dense)


def imported(job, source, *settings, store):
    more = [part for setting in (*settings, f"store.path={store}") for part in ("--set", setting)]
    command = [sys.executable, "-m", "headrace.service", "import", str(job), str(source), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def warm(learnt):
    """The same job, begun with what it had learnt: embedded, and on two shards."""
    job, _, export = learnt
    runs = {}
    for name, settings in (("embedded", []), ("shards", ["cluster.shards=2"])):
        said = imported(job, export, *settings, store=name)
        runs[name] = (said, headrace(job, *settings, store=name))
    return runs


def auc(run):
    return run.report["metrics"]["life"]["ctr"]["auc"]


@pytest.mark.parametrize("name", ["embedded", "shards"])
def test_a_run_goes_on_from_what_was_imported(learnt, warm, name):
    job, cold, export = learnt
    said, run = warm[name]
    assert run.code == 0, run.output
    assert "dense: loaded " in said and "initialised" not in said
    assert run.report["samples"] == cold.report["samples"]
    assert auc(run) > auc(cold) + 0.1, "it predicts from the first on as one that has learnt"
    final = newest(job.parent / name)
    assert final.timeline == "t1" and final.manifest.parent == "t0-0000000001-g0"
    assert final.num_rows == newest(job.parent / "cold").num_rows, "the rows imported are those it meets"


@pytest.mark.slow
def test_shards_do_not_change_what_comes_of_it(warm, learnt, tmp_path):
    job, *_ = learnt
    states = [state_of(newest(job.parent / name), tmp_path / name) for name in warm]
    (rows, dense), (other_rows, other_dense) = states
    assert rows.keys() == other_rows.keys()
    assert all(rows[name].tobytes() == other_rows[name].tobytes() for name in rows)
    assert all(dense[name].tobytes() == other_dense[name].tobytes() for name in dense)


def test_a_rerun_from_the_import_comes_out_alike(warm, learnt):
    job, *_ = learnt
    rerun = headrace(job, store="embedded", command="rerun", options=("--from", "1"))
    assert rerun.code == 0, rerun.output


def test_the_tools_see_the_import_and_what_came_of_it(warm, learnt):
    job, *_ = learnt
    settings = ["--set", "store.path=embedded", "--job", str(job)]
    last = newest(job.parent / "embedded").name
    command = [sys.executable, "-m", "headrace.service", "diff", "1", last, *settings, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stderr
    table = json.loads(done.stdout)["tables"]["default"]
    assert table["changed"] > 0 and table["gone"] == 0
