"""Exports with a full disk, a read-only folder, an object store that does not answer, a command that fails."""

import ctypes
import json
import os
import sys
import uuid

import pytest

from headrace.blob import blob_retry
from headrace.blob import bucket as bucket_module
from headrace.deadline import Deadline
from headrace.retry import Backoff
from headrace.trainer.exports.destination import open_destination
from headrace.trainer.exports.exporter import export, run_command
from headrace.trainer.exports.reader import chain_of, open_export, state_at
from tests.fakes.commits_of_rows import TABLE, Job, parent_of
from tests.s3_server import proxy, s3  # noqa: F401
from tests.small_disk import small_disk

CAP_DAC_OVERRIDE = 1
ROWS = {("a", n): [n, n, n, n] for n in range(3000)}


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path / "store", shards=1)
    job.set(1, ROWS)
    yield job
    job.close()


@pytest.fixture
def make(job):
    return lambda request: export(request, job.store / "live" / "export-test")


@pytest.fixture
def commit(job):
    return job.commit(1)


def num_rows(answer, tmp_path):
    found = open_export(answer.path, tmp_path / uuid.uuid4().hex).check()
    return sum(len(chunk) for chunk in state_at(chain_of(found), TABLE))


# Disks


def test_a_full_disk_is_reported_and_an_incomplete_export_removed(job, commit, make, tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        request = job.request(commit, "base", str(disk.folder / "out"))
        disk.leave(0)  # every folder that is made takes none of it, every file does
        for room in (0, 8, 40, 100, 160, 200):
            disk.leave(room << 10)
            answer = make(request)
            if answer.outcome == "complete":
                break
            assert "make room on this disk" in answer.error and not answer.final
            assert not list(disk.folder.rglob("*.parquet")) and not list(disk.folder.rglob("_DONE")), (
                "nothing half done"
            )
        else:
            pytest.fail("there was room enough")
        assert room > 8
        disk.free()
        assert num_rows(make(request), tmp_path) == 3000


def test_a_disk_without_free_inodes_is_reported(job, commit, make, tmp_path):
    with small_disk(tmp_path / "disk", num_names=200) as disk:
        request = job.request(commit, "base", str(disk.folder / "out"))
        for number in range(12):
            disk.leave_names(number)
            answer = make(request)
            assert answer.outcome == "complete" or "make room" in answer.error, answer
            whole = answer.outcome == "complete" or "current.json" in answer.error or "donefile" in answer.error
            assert len(list(disk.folder.rglob("_DONE"))) == whole
        disk.free()
        assert num_rows(make(request), tmp_path) == 3000


def test_a_path_that_cannot_be_made_is_reported(job, commit, make, tmp_path):
    (tmp_path / "file").write_text("in the way")
    answer = make(job.request(commit, "base", str(tmp_path / "file" / "out")))
    assert answer.outcome == "failed" and f"{tmp_path}/file" in answer.error and "cannot be written" in answer.error


@pytest.fixture
def forbidden():
    """Folders without permission are closed to this thread, even where it runs as root (capabilities(7))."""
    libc, header = ctypes.CDLL(None, use_errno=True), (ctypes.c_uint32 * 2)(0x20080522, 0)
    before, without = (ctypes.c_uint32 * 6)(), (ctypes.c_uint32 * 6)()
    for held in (before, without):
        assert libc.capget(header, held) == 0, os.strerror(ctypes.get_errno())
    without[0] &= ~(1 << CAP_DAC_OVERRIDE)
    assert libc.capset(header, without) == 0, os.strerror(ctypes.get_errno())
    yield
    assert libc.capset(header, before) == 0, os.strerror(ctypes.get_errno())


@pytest.mark.usefixtures("forbidden")
def test_a_folder_without_permission_is_reported(job, commit, make, tmp_path):
    (tmp_path / "out").mkdir(mode=0o500)
    answer = make(job.request(commit, "base", str(tmp_path / "out")))
    assert answer.outcome == "failed" and "Permission denied" in answer.error


def test_a_full_store_is_reported(job, commit, tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        disk.leave_names(0)
        answer = export(job.request(commit, "base", str(tmp_path / "out")), disk.folder / "live" / "export-x")
    assert answer.outcome == "failed" and "export-x cannot be written" in answer.error
    assert not (tmp_path / "out").exists()


# The object store


@pytest.fixture
def impatient(monkeypatch):
    """Tries follow each other at once, and a silent connection is given up early."""
    monkeypatch.setattr(blob_retry, "BACKOFF", Backoff((0.02, 0.05)))
    monkeypatch.setattr(bucket_module, "SILENCE_S", 1.0)
    monkeypatch.setattr(bucket_module, "SEND_S", 1.0)
    monkeypatch.setattr(bucket_module, "CLIENT_TRIES", 1)


@pytest.fixture
def prefix():
    return uuid.uuid4().hex


@pytest.fixture
def straight(s3, prefix, tmp_path):  # noqa: F811
    """The destination through a good connection."""
    return open_destination(s3.uri("bucket", prefix), "small", tmp_path / "gathered", Deadline.after(60))


@pytest.fixture
def shaky(s3, proxy, prefix):  # noqa: F811
    """The same destination, through the proxy."""
    return s3.uri("bucket", prefix, proxy.port)


@pytest.mark.slow
def test_a_cut_connection_leaves_no_done_or_all_of_it(job, commit, make, tmp_path, impatient, straight, proxy, shaky):  # noqa: F811
    request = job.request(commit, "base", shaky)
    seen = set()
    for budget in (0, 3_000, 30_000, 90_000, *range(98_000, 130_000, 700)):
        proxy.cut_after(budget)
        answer = make(request)
        proxy.heal()
        if answer.outcome == "complete":
            break
        assert not answer.final and "exports at s3://" in answer.error, answer
        there = straight.names("t1/0000000001-base")
        seen.add("_DONE" in there)
        if "_DONE" in there:
            assert {"manifest.json", "rows-default-0.parquet"} <= set(there)
        else:
            assert straight.get("current.json") is None and straight.tail("donefile.txt") == b""
    assert seen == {True, False}
    again = make(request)
    assert again.outcome == "complete" and again.current, again
    assert num_rows(again, tmp_path) == 3000
    assert len(straight.tail("donefile.txt").splitlines()) == 1


def test_a_request_is_repeated_after_slow_down(job, commit, make, impatient, proxy, shaky):  # noqa: F811
    proxy.refuse(2)
    assert make(job.request(commit, "base", shaky)).outcome == "complete"
    assert proxy.refusals == 0


def test_a_silent_server_ends_an_export_within_its_deadline(job, commit, make, impatient, proxy, shaky):  # noqa: F811
    proxy.stall()
    answer = make(job.request(commit, "base", shaky, deadline=1.0))
    assert answer.outcome == "failed" and not answer.final and answer.seconds < 30
    assert answer.error.endswith(".deadline is 1 s"), "the key that gives it more time"


def test_a_missing_bucket_is_reported(job, commit, make, s3):  # noqa: F811
    answer = make(job.request(commit, "base", s3.uri("nowhere", "prefix")))
    assert answer.outcome == "failed" and answer.error.endswith("make it first")


# The command


def commanded(job, commit, make, tmp_path, script, **more):
    path = tmp_path / "after.py"
    path.write_text(script)
    request = job.request(
        commit, "base", str(tmp_path / "out"), command=("python", "after.py", "x y"), folder=tmp_path, **more
    )
    return make(request)


def test_the_command_gets_the_exports_address_and_little_environment(job, commit, make, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    script = "import json, os, sys; json.dump([sys.argv[1:], dict(os.environ), os.getcwd()], open('told', 'w'))"
    answer = commanded(job, commit, make, tmp_path, script)
    assert answer.command_error is None
    arguments, environment, folder = json.loads((tmp_path / "told").read_text())
    assert arguments == ["x y", answer.path] and folder == str(tmp_path)
    assert "AWS_SECRET_ACCESS_KEY" not in environment and "PATH" in environment


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("import sys; print('no room'); sys.exit(3)", "ended with 3; its output: no room"),
        ("import time; time.sleep(60)", "did not end in 0.5 s (command_deadline) and was killed"),
        ("import subprocess; subprocess.Popen(['sleep', '60'])", "did not end in 0.5 s"),
    ],
)
def test_a_failed_command_is_reported_and_the_export_is_complete(job, commit, make, tmp_path, script, words):
    answer = commanded(job, commit, make, tmp_path, script, command_deadline=0.5 if "60" in script else 60.0)
    assert answer.outcome == "complete" and answer.current and words in answer.command_error


def test_a_missing_program_is_reported(tmp_path):
    assert "no such program" in run_command(("./nothing",), "address", tmp_path, 5)
    assert "no such program" in run_command(("surely-no-program",), "address", tmp_path, 5)
    (tmp_path / "text").write_text("no program")
    (tmp_path / "text").chmod(0o755)
    assert "not found" in run_command(
        ("./text",), "address", tmp_path, 5
    )  # setpriv has sh run what names no interpreter
    assert run_command((sys.executable, "-c", "pass"), "address", tmp_path, 60) is None


def test_a_delta_succeeds_after_a_failure(job, commit, make, impatient, proxy, shaky):  # noqa: F811
    base = job.request(commit, "base", shaky)
    assert make(base).outcome == "complete"
    job.set(2, {("a", 1): [5, 5, 5, 5]})
    delta = job.request(job.commit(2, since=1), "delta", shaky, parent_of(base))
    proxy.cut_after(0)
    assert make(delta).outcome == "failed"
    proxy.heal()
    assert make(delta).outcome == "complete"
