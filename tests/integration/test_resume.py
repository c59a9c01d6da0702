"""A job that ended somewhere goes on there: bit for bit where nothing changed, as the log says where something did."""

import shutil
import signal
from pathlib import Path

import pytest

from headrace.trainer.checkpoint.commits import Commits
from headrace.trainer.journal.job_history import JobHistory
from headrace.trainer.journal.log import RecordKind, read
from tests.integration.running_job import RunningJob
from tests.integration.stream_job import SPEC, headrace, write_job
from tests.jobs import changed

OFTEN = ("passes.max_events=100", "commit.every_passes=4")
SAME = ("digest", "events", "samples", "passes", "positions", "metrics")


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Its pipe takes its time as long as a file "slowly" is there: enough to be stopped on the way."""
    folder = tmp_path_factory.mktemp("stream")
    (folder / "pipe.sh").write_text("if [ -e slowly ]; then sleep 0.2; fi; exec cat\n")
    return write_job(folder, num_lines=1200, spec=changed(SPEC, {"pipe.command": ["sh", "pipe.sh"]}))


@pytest.fixture(scope="module")
def undisturbed(job):
    return finished(job, "undisturbed")


def finished(job, store, *settings):
    run = headrace(job, *OFTEN, *settings, store=store)
    assert run.code == 0, run.output
    return run.report


def stopped_early(job, store, *settings):
    """The job drained by SIGTERM after some passes, in a store of its own below the job's folder."""
    running = started(job, store, *OFTEN, *settings)
    running.process.send_signal(signal.SIGTERM)
    code, output = running.end()
    assert code == 0 and "stopped after the pass in training" in output, output
    shutil.move(running.store, job.parent / store)
    return job.parent / store


def started(job, store, *settings):
    """The job on its way, at some pass after the fourth."""
    slowly = job.parent / "slowly"
    slowly.touch()
    running = RunningJob(job, job.parent / f"{store}-run", *settings)
    running.until_events(400)
    slowly.unlink()
    return running


def closes(store: Path) -> dict:
    return {number: record.body for number, record in JobHistory.of(read(store / "log")).closes.items()}


def records(store: Path, kind: RecordKind) -> list:
    return [record.body for record in read(store / "log") if record.kind is kind]


def equal(report, other):
    return {name: report[name] for name in SAME} == {name: other[name] for name in SAME}


@pytest.mark.long
def test_a_drained_job_goes_on_as_if_it_had_never_stopped(job, undisturbed):
    store = stopped_early(job, "drained")
    versions = sorted(closes(store))
    assert 4 <= versions[-1] < undisturbed["passes"]
    assert Commits(store).whole()[-1].version == versions[-1]  # nothing is left to replay
    report = finished(job, "drained")
    assert equal(report, undisturbed) and report["halves"] == undisturbed["halves"]
    kept = closes(store)  # what came before the oldest commit kept is pruned
    assert len(kept) > 12 and kept.items() <= closes(job.parent / "undisturbed").items()
    assert not records(store, RecordKind.VOID)  # the pass that was planned ahead is the first one of the next run


@pytest.mark.long
def test_rows_move_to_another_number_of_shards(job, undisturbed):
    stopped_early(job, "onto-three", "cluster.shards=2")
    assert equal(finished(job, "onto-three", "cluster.shards=3"), undisturbed)


@pytest.mark.slow
def test_after_a_drain_the_number_of_trainers_may_change(job, undisturbed):
    store = stopped_early(job, "more-trainers")
    report = finished(job, "more-trainers", "cluster.trainers=2", "cluster.shards=1")
    assert report["events"] == undisturbed["events"] and report["positions"] == undisturbed["positions"]
    withdrawn = records(store, RecordKind.VOID)
    assert all("cluster.trainers" in void["reason"] for void in withdrawn) and len(withdrawn) <= 2


@pytest.mark.slow
def test_a_changed_spec_acts_after_what_was_logged_under_the_old_one(job, undisturbed):
    store = job.parent / "changed"
    running = started(job, "changed", "passes.max_events=100", "commit.every=1h")
    running.kill()  # without a commit: all that is closed must be replayed
    shutil.move(running.store, store)
    before = closes(store)
    assert before and not Commits(store).names()
    report = finished(job, "changed", "commit.every_passes=1000", "train.batch_size=16")
    after = closes(store)  # what came before the oldest commit kept is pruned
    assert all(after.get(number, close) == close for number, close in before.items())
    replayed = Commits(store).whole()[0]
    assert replayed.version >= max(before) and replayed.state["spec"]["train"]["batch_size"] == 64
    *_, last = (operation["spec"] for operation in records(store, RecordKind.OPERATION) if operation["op"] == "spec")
    assert last["train"]["batch_size"] == 16
    assert report["events"] == undisturbed["events"]
    assert (
        replayed.state["progress"]["num_events"]
        + sum(close["events"] for number, close in after.items() if number > replayed.version)
        == report["events"]
    )


@pytest.mark.long
def test_what_rows_do_not_survive_is_refused_and_nothing_is_touched(job, undisturbed):
    store = job.parent / "undisturbed"
    before = sorted(path.name for path in (store / "log").iterdir())
    refused = headrace(job, *OFTEN, "tables.default.dim=8", store="undisturbed")
    assert refused.code == 2 and "tables.default.dim: cannot change" in refused.output, refused.output
    assert sorted(path.name for path in (store / "log").iterdir()) == before


@pytest.mark.long
def test_an_empty_machine_goes_on_from_the_mirror_alone(job, undisturbed, tmp_path):
    mirror = f"store.mirror={tmp_path / 'mirror'}"
    store = stopped_early(job, "mirrored", mirror)
    left_at = Commits(store).whole()[-1]
    shutil.rmtree(store)
    assert equal(finished(job, "mirrored", mirror), undisturbed)
    history = JobHistory.of(read(store / "log"))
    assert (history.timeline, history.base) == ("t2", left_at.name)
