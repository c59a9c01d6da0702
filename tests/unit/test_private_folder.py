"""A private folder goes with its process, and what a killed process has left goes at the next start."""

import os
import signal
import subprocess
import sys
import tempfile
import threading

import pytest

from headrace import private_folder as module
from headrace.errors import Unwritable
from headrace.private_folder import private_folder

HOLD = """
import sys
from headrace.private_folder import private_folder
with private_folder("test") as path:
    (path / "secret").write_text("key")
    print(path, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def holder(temporary):
    """Another process with a private folder."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    ) as process:
        assert process.stdout.readline().startswith(f"{temporary}/headrace-test-")
        yield process
        process.kill()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_it_is_for_its_owner_alone_and_goes_at_the_end(temporary):
    with private_folder("test") as path:
        assert path.stat().st_mode & 0o777 == 0o700 and path.name.startswith("headrace-test-")
        (path / "file").touch()
    assert names(temporary) == []


def test_the_folder_of_a_process_that_runs_stays_and_that_of_a_killed_one_goes(temporary, holder):
    (used,) = names(temporary)
    with private_folder("test"):
        assert (temporary / used / "secret").exists()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert names(temporary) == [used]
    with private_folder("test") as path:
        assert names(temporary) == [path.name]


def test_other_kinds_files_and_links_stay(temporary):
    (temporary / "headrace-other-1").mkdir()
    (temporary / "headrace-test-file").touch()
    (temporary / "kept").mkdir()
    (temporary / "headrace-test-link").symlink_to(temporary / "kept")
    before = names(temporary)
    with private_folder("test"):
        pass
    assert names(temporary) == before


def test_one_that_is_taken_for_left_over_before_it_is_locked_is_made_again(temporary, monkeypatch):
    """The other process comes between the making and the lock."""
    made, locks = [], []

    def late(lock, how):
        if not locks:
            locks.append(lock)
            (path,) = temporary.iterdir()
            made.append(path)
            path.rmdir()

    monkeypatch.setattr(module.fcntl, "flock", late)
    with private_folder("test") as path:
        assert path.is_dir() and path != made[0]


def test_many_that_begin_at_once_disturb_nobody():
    errors, barrier = [], threading.Barrier(8)

    def begin():
        barrier.wait()
        for _ in range(20):
            with private_folder("test") as path:
                if not path.is_dir():
                    errors.append(path)

    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_a_disk_that_takes_no_folder_is_named(temporary, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / "gone"))
    with pytest.raises(Unwritable, match=f"{temporary}/gone cannot be written"), private_folder("test"):
        pass
