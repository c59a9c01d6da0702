"""A job's folder: its files are read whole, or reported as damaged."""

import json
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime

import pytest

from headrace.deadline import Deadline
from headrace.durable import locked
from headrace.service.jobs import launcher_process
from headrace.service.jobs.decisions import ObservedState
from headrace.service.jobs.folder import Assignment, FolderDamaged, JobFolder, LauncherProcess
from headrace.service.jobs.host import Desired, Ending
from headrace.service.jobs.registry import JobRecord
from headrace.trainer.job_status import Status

NOW = datetime(2026, 1, 2, tzinfo=UTC)
ENDING = Ending(1, "no room", ("last", "words"), NOW)


@pytest.fixture
def folder(tmp_path):
    return JobFolder(tmp_path)


@pytest.fixture
def entry(folder):
    spec = {"name": "one", "store": {"path": "store"}}
    folder.write_job(spec, folder.path)
    return JobRecord(
        name="one", spec=spec, folder=folder, base=folder.path, desired=Desired.RUNNING, asked_at=NOW,
        created_at=NOW, changed_at=NOW, created_by="ann",
    )  # fmt: skip


def test_what_is_written_is_read(folder):
    assert (folder.assigned(), folder.process(), folder.outcome(1)) == (None, None, None)
    folder.assign(Assignment("a", 2, "secret"))
    folder.report(LauncherProcess("a", 7, True))
    folder.write_outcome(2, ENDING, Status(state="failed"))
    folder.write_job({"name": "one"}, folder.path)
    assert (folder.assigned(), folder.process()) == (Assignment("a", 2, "secret"), LauncherProcess("a", 7, True))
    folder.report(LauncherProcess("a", 7, True, "0.2.0", "of this environment"))
    assert launcher_process.build_of(folder) == ("0.2.0", "of this environment")
    assert folder.outcome(2) == (ENDING, Status(state="failed"))
    assert folder.job() == ({"name": "one"}, folder.path)


def test_a_launcher_of_an_older_version_does_not_tell_its_environment(folder):
    assert launcher_process.build_of(folder) == ("", "")
    (folder.path / "launcher.pid").write_text('{"id": "a", "pid": 7, "claimed": true, "version": "0.1.0"}')
    assert launcher_process.build_of(folder) == ("0.1.0", "")
    (folder.path / "launcher.pid").write_text("{")
    assert launcher_process.build_of(folder) == ("", "")


def test_an_outcome_counts_for_the_ask_that_it_is_of(folder):
    folder.write_outcome(2, ENDING, Status())
    assert folder.outcome(1) is None and folder.outcome(3) is None


@pytest.mark.parametrize("name", ["job.json", "launcher.json", "launcher.pid"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"{}", b"\xff"])
def test_damage_is_told_of_with_the_files_name(folder, name, content):
    (folder.path / name).write_bytes(content)
    read = {"job.json": folder.job, "launcher.json": folder.assigned, "launcher.pid": folder.process}[name]
    with pytest.raises(FolderDamaged, match=f"{name} is damaged"):
        read()


def test_an_outcome_that_is_damaged_inside_is_a_failure_that_says_so(folder):
    (folder.path / "outcome.json").write_text(json.dumps({"ask": 1, "code": 0}))
    ending, _ = folder.outcome(1)
    assert ending.code == 1 and "damaged" in ending.reason


def test_a_launcher_is_alive_as_long_as_the_lock_is_held(folder):
    assert not folder.alive()
    with locked(folder.lock, Deadline.after(1)):
        assert folder.alive()
    assert not folder.alive()


def test_kill_ends_the_process_that_holds_the_lock_and_nobody_else(folder):
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    bystander = subprocess.Popen(sleeper)
    try:
        folder.assign(Assignment("a", 1, "s"))
        folder.report(LauncherProcess("a", bystander.pid, False))
        assert not folder.kill(), "the lock is free: the number is another's by now"
        with locked(folder.lock, Deadline.after(1)) as lock:
            launcher = subprocess.Popen(sleeper, pass_fds=[lock])
        assert folder.alive()
        folder.assign(Assignment("b", 1, "s"))
        assert not folder.kill(), "it has not said who it is yet; the number is of the one before"
        folder.report(LauncherProcess("b", bystander.pid, False))
        assert not folder.kill(), "the launcher is on another machine, where it has this number"
        folder.report(LauncherProcess("b", launcher.pid, False))
        assert folder.kill()
        assert launcher.wait(10) == -signal.SIGKILL and bystander.poll() is None
        assert not folder.alive()
    finally:
        bystander.kill()
        bystander.wait()


def test_a_job_that_never_ran_is_seen_as_such(entry):
    assert launcher_process.observed(entry) == ObservedState()


def test_a_store_that_went_away_is_not_begun_anew(entry):
    folder = entry.folder
    folder.assign(Assignment("a", 1, "s"))
    folder.report(LauncherProcess("a", os.getpid(), claimed=True))
    assert "store is missing, though the job has run" in launcher_process.observed(entry).broken
    (entry.store / "x").mkdir(parents=True)
    assert "holds no run, though the job has run" in launcher_process.observed(entry).broken
    (entry.store / "run.json").write_text("{}")
    assert launcher_process.observed(entry).broken == ""


def test_a_spec_that_is_not_the_records_is_not_run(entry):
    entry.folder.write_job({**entry.spec, "seed": 2}, entry.base)
    assert "job.json differs from the service's records" in launcher_process.observed(entry).broken
    (entry.folder.path / "job.json").unlink()
    assert "job.json is missing" in launcher_process.observed(entry).broken


def test_a_store_that_another_run_uses_is_left_to_it(entry):
    entry.store.mkdir()
    with locked(entry.store / "lock", Deadline.after(1)):
        seen = launcher_process.observed(entry)
        assert (seen.broken, seen.alive) == ("", False) and "outside of this service" in seen.foreign
    assert launcher_process.observed(entry).foreign == ""
