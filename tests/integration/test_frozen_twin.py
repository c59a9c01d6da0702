"""A job that does not learn: it reads and measures every sample once, whatever is killed, and its model stays."""

import shutil
from pathlib import Path

import pytest

from headrace.failpoints import Failpoint
from headrace.service.exports.model_import import ImportRequest, import_into
from headrace.service.history.model_state import CommitState
from headrace.service.spec.job import load_job
from headrace.trainer.checkpoint.commits import Commits
from tests.fakes.exports import write_export
from tests.integration.stream_job import LIVING, headrace, write_living_job
from tests.integration.trainer_here import killed, run
from tests.jobs import changed

PASS_EVENTS, NUM_LINES, NUM_LEARNT = 60, 480, 240
SPEC = changed(LIVING, {"exports": None, "passes.max_events": PASS_EVENTS})
"""Admission, ageing and shrinking at each day tick: all that must not act. Eight days of events."""
FROZEN = "train.learn=false"

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def stream(tmp_path_factory) -> Path:
    """A job that has learnt from the first half of a stream, in store "learnt"; late-0.txt is the other half."""
    folder = tmp_path_factory.mktemp("frozen")
    job = write_living_job(folder, num_parts=1, num_lines=NUM_LINES, spec=SPEC)
    lines = (folder / "part-0.txt").read_text().splitlines(keepends=True)
    (folder / "late-0.txt").write_text("".join(lines[NUM_LEARNT:]))
    run(job, folder / "learnt", drain_after=NUM_LEARNT - PASS_EVENTS)
    return job


def copied(job: Path, name: str) -> Path:
    """A store that stands where the learnt one does."""
    shutil.copytree(job.parent / "learnt", job.parent / name)
    return job.parent / name


@pytest.mark.long
def test_its_model_stays_and_every_sample_is_measured_once_whatever_is_killed(stream):
    plain = run(stream, copied(stream, "plain"), FROZEN, generation=2)
    at_once = run(stream, copied(stream, "one-pass"), FROZEN, "passes.max_events=1000", generation=2)
    assert plain.metrics["life"]["ctr"]["count"] == NUM_LINES == plain.events and not plain.learning
    for name in ("auc", "logloss", "mean_prediction"):  # a model that stays says the same wherever passes are cut
        assert plain.metrics["life"]["ctr"][name] == pytest.approx(at_once.metrics["life"]["ctr"][name], abs=1e-5)
    assert (plain.digest, plain.day) == (at_once.digest, at_once.day)

    again = copied(stream, "again")
    killed(stream, again, FROZEN, generation=2, point=Failpoint.CLOSED, hit=3)
    assert run(stream, again, FROZEN, generation=3) == plain


def test_learning_goes_on_after_it_and_catches_up_with_the_days(stream):
    store = copied(stream, "resumed")
    frozen = run(stream, store, FROZEN, generation=2, drain_after=NUM_LEARNT + PASS_EVENTS)
    learnt = run(stream, store, generation=3)
    assert frozen.events == 360 and frozen.day == 3
    assert learnt.learning and learnt.day == 7 and learnt.events == NUM_LINES
    assert learnt.digest != frozen.digest


TWIN = (FROZEN, 'sources.lines.paths=["late-0.txt"]')


@pytest.fixture(scope="module")
def imported(stream):
    """A store that begins with an export of what was learnt, as `headrace import` makes it, for the stream's rest."""
    folder, commits = stream.parent, Commits(stream.parent / "learnt")
    state = CommitState(commits.read(commits.names()[-1]), folder / "look")
    with state.rows("default") as chunks:
        rows = {
            (slot, sign): values
            for chunk in chunks
            for slot, sign, values in zip(chunk.names(), chunk.sign_R.tolist(), chunk.values, strict=True)
        }
    export = write_export(folder / "export", "base", 3, rows, dense=state.dense())
    import_into(load_job(stream, [*TWIN, f"store.path={folder / 'imported'}"]), ImportRequest(str(export)))
    return folder / "imported"


@pytest.fixture(scope="module")
def twin(stream, imported):
    """How a twin comes out that begins so."""
    shutil.copytree(imported, stream.parent / "twin")
    return run(stream, stream.parent / "twin", *TWIN)


def test_a_twin_begun_with_an_export_says_what_the_job_itself_would(stream, twin):
    frozen = run(stream, copied(stream, "frozen"), FROZEN, generation=2)
    assert twin.metrics["pass"] == frozen.metrics["pass"], "of the last pass, which is of the same samples"
    assert twin.events == NUM_LINES - NUM_LEARNT


@pytest.mark.slow
def test_ranks_and_shards_leave_its_model_as_it_is(stream, imported, twin):
    two = headrace(stream, *TWIN, "cluster.trainers=2", "cluster.shards=2", store="imported")
    assert two.code == 0, two.output
    assert two.report["digest"] == twin.digest and two.report["events"] == twin.events
    ours, theirs = (metrics["life"]["ctr"] for metrics in (twin.metrics, two.report["metrics"]))
    assert theirs["count"] == ours["count"] and theirs["logloss"] == pytest.approx(ours["logloss"], abs=1e-5)
