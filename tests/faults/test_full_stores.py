"""A whole job whose store is on a full disk: it trains on while it can, says so everywhere, and loses nothing."""

import os

import numpy as np
import pytest
from rich.console import Console

from headrace.dataset.loader.dead_letters import DeadLetters
from headrace.dataset.samples.rejection import Reason, Rejection
from headrace.dataset.spec.config import DeadLettersSection
from headrace.errors import SpecError, Unwritable
from headrace.rpc.channels import write_address
from headrace.service.api.exposition import exposition
from headrace.service.api.job_figures import figures_of
from headrace.service.cluster.run_folder import run_folder, write_private
from headrace.service.cluster.store import claimed
from headrace.service.monitor.display import render
from headrace.trainer.checkpoint.commits import Commits, problems_of
from headrace.trainer.job_status import Status, read
from headrace.trainer.metrics import halves as halves_module
from headrace.trainer.metrics.halves import StreamHalves
from headrace.trainer.metrics.samples import row_type
from headrace.trainer.status.progress import TrainerProgress
from headrace.trainer.train.report import write_report
from tests.integration.followed_job import FollowedJob, closes, status_of, until
from tests.integration.running_job import assert_gone
from tests.small_disk import small_disk

NUM_PASSES = 12
END_S = 90
COMMIT = "commit={every='0.1s', keep=100, max_failing='%s'}"


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "store") as mounted:
        yield mounted


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The closes of a run that nothing happens to."""
    return FollowedJob(tmp_path_factory.mktemp("undisturbed"), NUM_PASSES).undisturbed()


@pytest.fixture
def follow(tmp_path, disk):
    """A job, and how to start it; leaves nothing of it."""
    job, running = FollowedJob(tmp_path, NUM_PASSES), []

    def start(*settings):
        running.append(job.start(*settings))
        return running[-1]

    yield job, start
    for each in running:
        each.kill()


def committed(version):
    return lambda status: status["commit"]["version"] == version


def drain(running):
    running.process.terminate()
    code, output = running.end(END_S)
    assert code == 0, output
    return output


def assert_sound(store, only=None):
    commits = Commits(store)
    assert only is None or [commit.version for commit in commits.whole()] == [only]
    assert {path.name for path in commits.folder.iterdir()} == set(commits.names())
    assert not any(problems_of(commit) for commit in commits.whole())


@pytest.mark.long
@pytest.mark.timeout(300)
def test_commits_fail_on_a_full_disk_while_training_goes_on_and_succeed_once_there_is_room(follow, disk, expected):
    job, start = follow
    running = start(COMMIT % "300s")
    job.arrive(1)
    running.until_said("committed 1")
    disk.leave(24 << 10)
    job.arrive(2)
    alarm = running.until_said("ALARM commits fail, version 1 is the last one: ")
    assert "No space left on device" in alarm
    job.arrive(3)
    status = until(running, lambda status: status["version"] == 3, "training goes on")
    assert status["commit"]["version"] == 1 and status["commit"]["failing_s"] > 0
    assert_told_everywhere(status)
    assert_sound(disk.folder, only=1)
    disk.free()
    running.until_said("alarm over: commits fail")
    until(running, committed(3), "the next commit succeeds")
    job.arrive(NUM_PASSES)
    until(running, committed(NUM_PASSES), "and those after it")
    output = drain(running)
    assert "restarting" not in output and closes(disk.folder) == expected
    assert_sound(disk.folder)


def assert_told_everywhere(status):
    text = f"commits fail, version 1 is the last one: {status['commit']['failing']}"
    assert figures_of(read(Status, status)).alarms == {"commits": text}
    assert 'headrace_commit_failing{job="small"} 1.0' in exposition([("small", read(Status, status))]).decode()
    console = Console(record=True, width=1000, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(render(read(Status, status), ()))
    console.file.close()
    assert text in console.export_text()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_commits_that_fail_for_too_long_end_the_job_which_then_goes_on_without_loss(follow, disk, expected):
    job, start = follow
    running = start(COMMIT % "2s")
    job.arrive(1)
    running.until_said("committed 1")
    disk.leave(0)
    job.arrive(3)
    code, output = running.end(END_S)
    assert code == 1 and "no commit succeeded for 2 s (commit.max_failing); version 1 is the last one" in output
    assert "No space left on device" in output and "Traceback" not in output and "restarting" not in output
    assert_sound(disk.folder, only=1)
    assert running.report is None
    assert_gone(running)
    code, output = start(COMMIT % "2s").end(END_S)
    assert code == 1 and "error: " in output and "No space left on device" in output, output
    assert str(disk.folder) in output and "Traceback" not in output and "restarting" not in output
    assert_sound(disk.folder, only=1)
    disk.free()
    again = start(COMMIT % "2s")
    again.until_said("  committed ")
    job.arrive(NUM_PASSES)
    until(again, committed(NUM_PASSES), "it goes on")
    drain(again)
    assert closes(disk.folder) == expected


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_training_waits_for_a_log_that_cannot_grow_and_says_so(follow, disk, expected):
    job, start = follow
    running = start("commit={every='300s', max_failing='300s'}")
    job.arrive(1)
    running.until_events(100)
    (log,) = (disk.folder / "log").glob("*.log")
    os.truncate(log, log.stat().st_size)  # gives back what was reserved behind its end; nothing is appended now
    disk.leave(0)
    job.arrive(NUM_PASSES)
    alarm = running.until_said("ALARM training waits")
    assert "the job stops after 300 s of it" in alarm and str(log) in alarm
    status = status_of(running)
    assert figures_of(read(Status, status)).alarms == {"log": status["trouble"]}
    assert status["version"] < NUM_PASSES
    disk.free()
    running.until_said("alarm over: training waits")
    until(running, lambda status: status["version"] == NUM_PASSES, "training goes on")
    assert "Traceback" not in drain(running)
    assert closes(disk.folder) == expected


# What else writes there


def letters(folder):
    bad = Rejection("topic/3", 7, Reason.UNPARSABLE, "slot 'C1'", b"x" * 3000, None)
    made = DeadLetters(folder / "dead_letters", 0, DeadLettersSection())
    try:
        for _ in range(10):
            made.add(1, [bad])
        made.publish(1)
    finally:
        made.close()


def report(folder):
    metrics = {"life": {}, "window": {"ctr": {"text": "y" * 9000}}, "tensors": {"life": {}, "window": {}}}
    write_report(folder, TrainerProgress("job"), metrics, "d" * 64, ())


def config(folder):
    with run_folder(folder / "workers") as private:
        write_private(private / "trainer-0.json", {"secret": "s" * 9000})


def claim(folder):
    with claimed(folder / "fresh", "news", fresh=False):
        pass


def address(folder):
    write_address(folder / "trainer-0.address", "127.0.0.1:" + "1" * 9000)


@pytest.mark.parametrize("names", [0, 1, 2, 3, None])
@pytest.mark.parametrize(
    ("write", "name"),
    [
        (letters, "dead_letters/"),
        (report, "report.json"),
        (config, "workers"),
        (claim, "fresh"),
        (address, "trainer-0.address"),
    ],
)
def test_a_file_that_has_no_room_is_named_and_not_there_by_half(disk, write, name, names):
    disk.leave(4096) if names is None else disk.leave_names(names)
    before = everything(disk.folder)
    try:
        write(disk.folder)
    except (Unwritable, SpecError) as error:
        assert str(disk.folder / name) in str(error) and "No space left on device" in str(error)
    else:
        assert names and names > 0, "it had room"
        return
    left = everything(disk.folder) - before
    assert not [path for path in left if (disk.folder / path).is_file() and not path.startswith("fresh/")], left
    disk.free()
    write(disk.folder)


def some_samples(seed):
    draw, rows_N = np.random.default_rng(seed), np.zeros(1000, row_type(1, False))
    rows_N["prediction0"], rows_N["label0"], rows_N["weight0"] = draw.random(1000), draw.random(1000) < 0.3, 1.0
    return rows_N


@pytest.mark.parametrize("what", ["room", "names"])
def test_samples_of_the_halves_wait_for_room_in_memory(disk, caplog, monkeypatch, what):
    calm, full = (StreamHalves(disk.folder / name, [("ctr", True)], False) for name in ("calm", "full"))
    for number in range(4):
        calm.append(some_samples(number))
    for number in range(4):
        if number < 3:
            disk.leave(4096 * number) if what == "room" else disk.leave_names(number)
        full.append(some_samples(number))
    assert caplog.text.count("No space left on device; samples of the halves wait in memory") >= 1
    monkeypatch.setattr(halves_module, "MAX_WAITING_BYTES", 20_000)
    disk.leave(0) if what == "room" else disk.leave_names(0)
    if what == "room":
        with pytest.raises(Unwritable, match="predictions.bin cannot be written: No space left .*; make room"):
            full.measures()
    disk.free()
    assert full.measures() == calm.measures()
    disk.leave(0)
    with pytest.raises(Unwritable, match="make room"):
        for number in range(4):
            full.append(some_samples(number))


def everything(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}
