"""A job that is resized while it runs learns the same as one that is not, and can be trained again from its log."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.deadline import Deadline
from headrace.rpc.job_client import JobClient
from headrace.trainer.checkpoint.commits import Commits
from headrace.trainer.journal.job_history import JobHistory
from headrace.trainer.journal.log import RecordKind, read
from headrace.trainer.journal.records import Claim
from tests.integration.running_job import RunningJob, assert_gone
from tests.integration.stream_job import SPEC, headrace, write_job
from tests.jobs import changed

SETTINGS = ("passes.max_events=50", "train.threads=1", "train.batch_size=8", 'train.matmul="mkl"')
SAME = ("digest", "events", "samples", "passes", "positions", "metrics")


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Its pipe takes its time as long as a file "slowly" is there: enough to be resized on the way."""
    folder = tmp_path_factory.mktemp("stream")
    (folder / "pipe.sh").write_text("if [ -e slowly ]; then sleep 0.5; fi; exec cat\n")
    return write_job(folder, num_lines=2400, spec=changed(SPEC, {"pipe.command": ["sh", "pipe.sh"]}))


def resize(running: RunningJob, job: Path, *numbers: str) -> str:
    """Resize the running job by the command; what it prints."""
    words = [
        sys.executable,
        "-m",
        "headrace.service",
        "resize",
        str(job),
        "--set",
        f"store.path={running.store}",
        *numbers,
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr + "".join(running.said)
    return done.stdout


def resized(job: Path, store: str, first: tuple[str, ...], steps: list[tuple[str, ...]]) -> RunningJob:
    """The job resized by `steps` one after another, run to its end."""
    slowly = job.parent / "slowly"
    slowly.touch()
    running = RunningJob(job, job.parent / store, *SETTINGS, *first)
    try:
        events = 50
        for numbers in steps:
            running.until_events(events)
            assert (job.parent / "slowly").exists()
            resize(running, job, *numbers)
            events = JobClient(running.store).status(Deadline.after(20))["events"] + 50
        slowly.unlink()
        code, output = running.end(within_s=100)
        assert code == 0, output
        assert_gone(running)
        return running
    finally:
        running.kill()


def worlds(store: Path) -> list[tuple[int, int]]:
    """Trainers and shards of each generation."""
    claims = [record.content for record in read(store / "log") if isinstance(record.content, Claim)]
    found = {claim.generation: (claim.facts["world"], claim.facts["shards"]) for claim in claims}
    return [found[generation] for generation in sorted(found)]


def equal(report, other):
    return {name: report[name] for name in SAME} == {name: other[name] for name in SAME}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_job_whose_shards_are_resized_four_times_ends_with_the_same_digest(job):
    undisturbed = headrace(job, *SETTINGS, store="undisturbed")
    assert undisturbed.code == 0, undisturbed.output
    steps = [("--shards", str(number)) for number in (2, 3, 1, 2)]
    running = resized(job, "shards", ("cluster.shards=0", "commit.keep=1000"), steps)
    assert equal(running.report, undisturbed.report)
    assert worlds(running.store) == [(1, 0), (1, 2), (1, 3), (1, 1), (1, 2)]
    acted = [r for r in read(running.store / "log") if r.kind is RecordKind.OPERATION and r.body["op"] == "resize"]
    assert [each.body["keys"]["cluster.shards"] for each in acted] == [2, 3, 1, 2]
    voids = [record for record in read(running.store / "log") if record.kind is RecordKind.VOID]
    assert not voids, "a plan holds for any number of shards"


@pytest.mark.long
@pytest.mark.timeout(200)
def test_the_numbers_of_a_resize_hold_after_a_stop_until_the_file_changes_them(job):
    slowly = job.parent / "slowly"
    slowly.touch()
    running = RunningJob(job, job.parent / "held", *SETTINGS)
    try:
        running.until_events(100)
        said = resize(running, job, "--shards", "2")
        assert re.fullmatch(r"shards 2, trainers 1, after version \d+\n", said)
        running.process.terminate()
        assert running.end()[0] == 0
    finally:
        running.kill()
        slowly.unlink()
    store = str(running.store)
    assert headrace(job, *SETTINGS, "passes.max_events=400", store=store).code == 0
    assert worlds(running.store)[-1] == (1, 2)
    assert Commits(running.store).whole()[-1].state["operations"]["overrides"] == {
        "cluster.shards": 2, "cluster.trainers": 1,
    }  # fmt: skip
    assert headrace(job, *SETTINGS, "cluster.shards=1", store=store).code == 0
    assert worlds(running.store)[-1] == (1, 1)
    assert headrace(job, *SETTINGS, store=store).code == 0
    assert worlds(running.store)[-1] == (1, 0), "the file's own number again, and not the old resize"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_each_number_of_trainers_learnt_is_the_same_when_trained_again(job):
    steps = [("--trainers", "3", "--shards", "2"), ("--trainers", "2")]
    running = resized(job, "trainers", ("commit.keep=1000",), steps)
    assert worlds(running.store) == [(1, 0), (3, 2), (2, 2)]
    history = JobHistory.of(read(running.store / "log"))
    widths = {number: len(plan.content.segments) for number, plan in sorted(history.plans.items())}
    assert list(dict.fromkeys(widths.values())) == [1, 3, 2]
    assert sum(close.content.events for close in history.closes.values()) == running.report["events"] == 3 * 2400 - 21
    begins = ["0", *(str(max(n for n, width in widths.items() if width == before)) for before in (1, 3))]
    for begin, refused in zip(begins, (True, True, False), strict=True):
        again = headrace(
            job, *SETTINGS, store=str(running.store), command="rerun", options=("--from", begin), timeout_s=200
        )
        assert (again.code != 0) == refused, again.output
        assert ("the number of trainers changed after pass" in again.output) == refused


@pytest.mark.long
def test_a_job_that_does_not_run_is_not_resized(job):
    headrace(job, *SETTINGS, "passes.max_events=2400", store="over")
    words = [sys.executable, "-m", "headrace.service", "resize", str(job), "--set", "store.path=over", "--shards", "2"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "no run is active" in done.stderr
