"""The output of each worker in a file of its own: bounded, beside what is shown, and no reason to stop."""

import threading

import pytest

from headrace.errors import Unwritable
from headrace.service.cluster.worker_logs import OLDER_FILES, WorkerLogs, logged_to


def texts(path):
    """The lines of a file without their times."""
    return [line.split(" ", 2)[2] for line in path.read_text().splitlines()]


def test_each_worker_has_a_file_and_lines_are_shown_as_before(tmp_path):
    shown = []
    for begin in (0, 2):  # a job that starts again goes on with its files
        with logged_to(tmp_path / "logs", lambda *line: shown.append(line)) as on_line:
            for number in (begin, begin + 1):
                on_line("trainer-0", f"line {number}")
            on_line("shard-1", f"ünïcode {begin}")
    assert shown[:3] == [("trainer-0", "line 0"), ("trainer-0", "line 1"), ("shard-1", "ünïcode 0")]
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {"trainer-0.log", "shard-1.log"}
    assert texts(tmp_path / "logs" / "trainer-0.log") == [f"line {number}" for number in range(4)]
    assert texts(tmp_path / "logs" / "shard-1.log") == ["ünïcode 0", "ünïcode 2"]


def test_the_files_of_a_worker_are_bounded_and_the_newest_lines_are_kept(tmp_path):
    logs = WorkerLogs(tmp_path, max_bytes=1_000)
    threads = [
        threading.Thread(target=lambda w=w: [logs.write(f"trainer-{w}", f"line {n}") for n in range(500)])
        for w in range(2)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    logs.close()
    for worker in range(2):
        files = sorted(tmp_path.glob(f"trainer-{worker}.log*"))
        assert len(files) == OLDER_FILES + 1 and all(path.stat().st_size <= 1_000 for path in files)
        newest, *older = files
        kept = [line for path in (*reversed(older), newest) for line in texts(path)]
        assert kept == [f"line {number}" for number in range(500 - len(kept), 500)]


def test_a_folder_that_cannot_be_made_is_refused_before_the_job_starts(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(Unwritable, match="file"), logged_to(tmp_path / "file" / "logs", print):
        pass


def test_a_disk_that_takes_nothing_stops_no_worker(tmp_path, capfd):
    with logged_to(tmp_path / "logs", lambda *_: None) as on_line:
        on_line("trainer-0", "kept")
        (tmp_path / "logs" / "shard-0.log").symlink_to("/dev/full")
        for _ in range(3):
            on_line("shard-0", "lost")
        on_line("trainer-0", "kept, too")
    assert texts(tmp_path / "logs" / "trainer-0.log") == ["kept", "kept, too"]
    assert capfd.readouterr().err == ""
