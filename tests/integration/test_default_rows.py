"""A job with a learnt default row ends with the same bits after a kill and on shards."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from headrace.trainer.checkpoint.commits import Commits
from headrace.trainer.exports.materialize import materialize
from headrace.trainer.exports.reader import open_export
from tests.integration.running_job import RunningJob
from tests.integration.stream_job import LIVING, headrace, write_living_job
from tests.jobs import changed

SERVE = Path(__file__).resolve().parents[2] / "deploy" / "examples" / "serving" / "serve.py"
OFTEN = ("passes.max_events=60", "commit.every_passes=4", "exports.serving={base='1000h', delta='24h'}")
SAME = ("digest", "events", "passes", "positions", "metrics")
NAME = "default_row.default"
LEARNT = changed(
    LIVING,
    {
        "pipe.command": ["sh", "pipe.sh"],
        "tables.default.extend_at": None,
        "tables.default.default_row": "learnt",
        "exports.thin": None,
    },
)

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Its pipe is slow while a file "slowly" exists, so that the job can be killed on the way."""
    folder = tmp_path_factory.mktemp("default-row")
    (folder / "pipe.sh").write_text("if [ -e slowly ]; then sleep 0.2; fi; exec cat\n")
    return write_living_job(folder, num_lines=160, spec=LEARNT)


@pytest.fixture(scope="module")
def undisturbed(job):
    return finished(job, "undisturbed")


def finished(job, store, *settings):
    run = headrace(job, *OFTEN, *settings, store=store)
    assert run.code == 0, run.output
    return {name: run.report[name] for name in SAME}


def learnt_row(store):
    commits = Commits(store)
    return load_file(commits.folder / commits.names()[-1] / "dense.safetensors")[f"model.{NAME}"]


def asked(*words):
    done = subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, timeout=110, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_job_that_was_killed_continues_with_shards_to_the_same_default_row(job, undisturbed):
    slowly, store = job.parent / "slowly", job.parent / "killed"
    slowly.touch()
    running = RunningJob(job, job.parent / "killed-run", *OFTEN)
    try:
        running.until_events(300)  # past a commit, before the next: there is something to replay
    finally:
        running.kill()
        slowly.unlink()
    shutil.move(running.store, store)
    assert finished(job, "killed", "cluster.shards=2") == undisturbed
    found = learnt_row(store)
    assert found.shape == (5,) and found.all()
    assert found.tobytes() == learnt_row(job.parent / "undisturbed").tobytes()


@pytest.mark.long
def test_what_it_exports_is_served_as_one_folder_too_and_begins_another_job(job, undisturbed):
    exports = job.parent / "undisturbed" / "exports" / "serving" / "living"
    assert "32 golden samples" in asked(SERVE, exports)
    newest = sorted((exports / "t1").glob("*-delta"))[-1]
    whole = job.parent / "whole"
    materialize(open_export(str(newest), job.parent / "scratch"), whole)
    assert "32 golden samples" in asked(SERVE, whole)
    store = ("--set", f"store.path={job.parent / 'warm'}")
    said = asked("-m", "headrace.service", "import", job, whole, "--dense", "default_row.*", *store)
    assert NAME in said
    wanted = load_file(whole / "dense.safetensors")[NAME]
    assert np.array_equal(learnt_row(job.parent / "warm"), wanted) and wanted.all()
